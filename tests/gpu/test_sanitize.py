"""memcheck and racecheck over the kernels, and their controls, in processes of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from engine.attention.sanitize import TOOLKIT

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of capability 9.0; this machine has none",
    ),
    pytest.mark.skipif(
        not (shutil.which("compute-sanitizer") or TOOLKIT.is_file()),
        reason="needs compute-sanitizer of the CUDA toolkit",
    ),
]


def test_the_kernels_are_clean_and_the_planted_race_is_seen(tmp_path):
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "engine.attention.sanitize", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(file.read_text())
    assert report["planted_race_seen"] and report["of_ours"] == [] and report["memcheck_errors"] == 0
