"""Without a GPU: the files below under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.interpreted import run_interpreted


@pytest.mark.skipif(torch.cuda.is_available() or torch.xpu.is_available(), reason="the kernels run on the GPU itself")
@pytest.mark.parametrize("file", ["test_triton_kernels.py", "test_adamw.py"])
def test_kernels_under_the_interpreter(file):
    assert " passed" in run_interpreted(Path(__file__).with_name(file))
