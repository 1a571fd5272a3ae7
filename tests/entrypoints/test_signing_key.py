"""What `sol benchmark` does with a key before it runs anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from verify.keys import keygen


def test_a_key_that_cannot_sign_is_refused_before_anything_runs(tmp_path: Path) -> None:
    private, _, _ = keygen(tmp_path / "lab.key")
    private.chmod(0o644)
    command = [
        sys.executable,
        "-m",
        "entrypoints.cli",
        "benchmark",
        "cpu",
        "--key",
        private,
        "--out",
        tmp_path / "runs",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "can be read by others" in done.stderr and "chmod 600" in done.stderr
    assert not (tmp_path / "runs").exists()
