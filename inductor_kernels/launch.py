"""Kernel launches without triton's per-launch argument binding, which costs more than a small layer's kernels run."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.jit import JITFunction

_compiled: dict[tuple, tuple[Any, list]] = {}


def cdiv(a: int, b: int) -> int:
    """Rounded up; triton's own also works inside kernels and costs ten times as much."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is no less than n; as `cdiv`, for the host alone."""
    return 1 << (n - 1).bit_length()


def _traits(args: tuple[torch.Tensor | int, ...]) -> list[Any]:
    """What triton specialises a kernel on: dtype and alignment of pointers; value 1, divisibility and width of ints."""
    traits: list[Any] = []
    for arg in args:
        if type(arg) is int:
            traits.append((arg == 1) + 2 * (arg % 16 == 0) + 4 * (-(2**31) <= arg < 2**31))
        else:
            traits.append(arg.dtype)  # type: ignore[union-attr]
            traits.append(arg.data_ptr() % 16 == 0)  # type: ignore[union-attr]
    return traits


def launch(
    kernel: Any, grid: tuple[int, ...], *args: torch.Tensor | int, num_warps: int, num_stages: int = 3, **constants: Any
) -> None:
    """`kernel[grid](*args, **constants, num_warps=..., num_stages=...)`, remembering the compiled kernel.

    Args:
        args: all runtime arguments, in the kernel's order, before its constexpr parameters; the first is a tensor.
        constants: all constexpr parameters, by name.
    """
    if not isinstance(kernel, JITFunction):  # the interpreter compiles nothing
        kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
        return
    # id: a kernel lives as long as its module, and its own hash is slow.
    key = (id(kernel), args[0].get_device(), num_warps, num_stages, *constants.values(), *_traits(args))  # type: ignore[union-attr]
    known = _compiled.get(key)
    if known is None:
        values = [constants[name] for name in kernel.arg_names[len(args) :]]
        compiled = kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
        _compiled[key] = compiled, values
    else:
        compiled, values = known
        compiled[(*grid, 1, 1)[:3]](*args, *values)
