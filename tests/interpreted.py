"""Runs a test file in a new process with Triton's interpreter, which must be set before triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_interpreted(file: Path) -> str:
    """What pytest prints for `file`, all of whose tests must pass; skips where there is no triton."""
    pytest.importorskip("triton", reason="this build of torch brings no triton")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    return result.stdout
