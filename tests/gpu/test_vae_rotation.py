"""SGLang's own video VAE decoder, a few layers of it at full width, with our rotation and with its plain branch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.gpu import vae_rotation

pytestmark = pytest.mark.skipif(vae_rotation.missing() is not None, reason=str(vae_rotation.missing()))


def test_a_decode_is_bitwise_that_of_the_plain_branch(tmp_path):
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.gpu.vae_rotation", "--layers", "4", "--latents", "3", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (report,) = json.loads(file.read_text())["decodes"]
    assert report["ours_bitwise_equal_to_plain"] and report["repeats_bitwise_equal"]
    assert report["kernel_calls"] > 0 and report["relative_l2_none_to_plain"] > 1e-3
