"""Kernel launches without triton's per-launch argument binding, which costs more than a small layer's kernels run."""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_compiled: dict[tuple, tuple[Any, Any, Any, Any, list]] = {}
"""The compiled kernel, what its launch needs of it (to look that up takes as long again), its constants in order."""


def cdiv(a: int, b: int) -> int:
    """Rounded up; triton's own also works inside kernels and costs ten times as much."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is no less than n; as `cdiv`, for the host alone."""
    return 1 << (n - 1).bit_length()


def _traits_and_values(args: tuple[torch.Tensor | int, ...]) -> tuple[list[Any], list[int]]:
    """What triton specialises a kernel on, and what it hands to the device.

    Dtype and alignment of pointers; value 1, divisibility and width of ints. Addresses instead of tensors:
    triton would ask the driver about each tensor.
    """
    traits: list[Any] = []
    values: list[int] = []
    for arg in args:
        if type(arg) is int:
            traits.append((arg == 1) + 2 * (arg % 16 == 0) + 4 * (-(2**31) <= arg < 2**31))
            values.append(arg)
        else:
            address = arg.data_ptr()  # type: ignore[union-attr]
            traits += (arg.dtype, address % 16 == 0)  # type: ignore[union-attr]
            values.append(address)
    return traits, values


class Constants:
    """How a kernel is compiled: its constexpr parameters by name, warps and pipeline stages. Made by `constants`."""

    __slots__ = ("num_stages", "num_warps", "values")

    def __init__(self, num_warps: int, num_stages: int, values: dict[str, Any]) -> None:
        self.num_warps, self.num_stages, self.values = num_warps, num_stages, values


@functools.cache
def constants(*, num_warps: int, num_stages: int = 3, **values: Any) -> Constants:
    """The one object of these values: comparing by identity is quick."""
    return Constants(num_warps, num_stages, values)


def launch(kernel: Any, grid: tuple[int, ...], how: Constants, *args: torch.Tensor | int) -> None:
    """`kernel[grid](*args, **constants, num_warps=..., num_stages=...)`, remembering the compiled kernel.

    Args:
        how: all constexpr parameters of the kernel, warps and stages.
        args: all runtime arguments, in the kernel's order, before its constexpr parameters; the first is a tensor, the
            others are on its device.
    """
    if not isinstance(kernel, JITFunction):  # the interpreter compiles nothing
        kernel[grid](*args, **how.values, num_warps=how.num_warps, num_stages=how.num_stages)
        return
    traits, values = _traits_and_values(args)
    device = args[0].get_device()  # type: ignore[union-attr]
    key = (id(kernel), how, device, *traits)  # id: a kernel lives as long as its module, and its own hash is slow
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[grid](*args, **how.values, num_warps=how.num_warps, num_stages=how.num_stages)
        constant_values = [how.values[name] for name in kernel.arg_names[len(args) :]]
        _compiled[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata, constant_values
        return
    compiled, run, function, metadata, constant_values = known
    grid3 = (*grid, 1, 1)[:3]
    if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:  # a profiler wants to see it
        compiled[grid3](*args, *constant_values)
    else:  # the same without what hooks need
        stream = driver.active.get_current_stream(device)
        run(*grid3, stream, function, metadata, None, None, None, *values, *constant_values)
