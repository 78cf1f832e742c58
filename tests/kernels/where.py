"""Where the kernels' tests run: a GPU, or the CPU under Triton's interpreter, which test_interpreter.py starts."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU; test_interpreter.py runs this file with the interpreter"
)
# The interpreter multiplies bf16 bit patterns as integers and cuts bf16 off: on CPU the 16-bit case is fp16.
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16
