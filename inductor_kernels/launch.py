"""Kernel launches without triton's per-launch argument binding, which costs more than a small layer's kernels run."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.jit import JITFunction

_compiled: dict[tuple, Any] = {}
_constant_names: dict[Any, list[str]] = {}


def _trait(arg: Any) -> Any:
    """What triton specialises a kernel on: dtype and alignment of pointers; value 1, divisibility and width of ints."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    return arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31


def launch(
    kernel: Any, grid: tuple[int, ...], *args: torch.Tensor | int, num_warps: int, num_stages: int = 3, **constants: Any
) -> None:
    """`kernel[grid](*args, **constants, num_warps=..., num_stages=...)`, remembering the compiled kernel.

    Args:
        args: all runtime arguments, in the kernel's order, before its constexpr parameters.
        constants: all constexpr parameters, by name.
    """
    if not isinstance(kernel, JITFunction):  # the interpreter compiles nothing
        kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
        return
    names = _constant_names.get(kernel)
    if names is None:
        names = _constant_names[kernel] = kernel.arg_names[len(args) :]
    values = [constants[name] for name in names]
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    key = (kernel, device, num_warps, num_stages, *values, *map(_trait, args))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
    else:
        compiled[(*grid, 1, 1)[:3]](*args, *values)
