"""Weights on disk and SGLang's layer-wise offload on a real GPU: copies from pages of a file, on its own stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import mapped_weights

pytestmark = pytest.mark.skipif(mapped_weights.missing() is not None, reason=str(mapped_weights.missing()))


def test_layers_from_files_compute_what_resident_ones_compute(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.gpu.mapped_weights", "--mib", "128", "--folder", str(tmp_path)]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(file.read_text())
    assert report["in_files"] and report["pinned_tensors"] == 0
    assert report["bitwise_equal"] == dict.fromkeys(("pageable", "pinned", "mapped", "mapped_cold"), True)
