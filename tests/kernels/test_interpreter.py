"""Without a GPU: the files below under Triton's interpreter, set before triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available() or torch.xpu.is_available(), reason="the kernels run on the GPU itself")
@pytest.mark.parametrize("file", ["test_triton_kernels.py", "test_adamw.py"])
def test_kernels_under_the_interpreter(file):
    pytest.importorskip("triton", reason="this build of torch brings no triton")
    here = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=here.parents[1],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
