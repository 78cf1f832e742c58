"""Initial weights as a function of (seed, parameter name, global index), identical on every mesh and world size.

DTensor's random stream depends on the mesh (and on a CPU mesh gives every shard the same numbers), so values come from
a counter-based generator instead: element i of a parameter is hash(seed, name, i) turned into a normal variate.

Shape suffixes: N = elements of one chunk.
"""

import hashlib
import math

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.components.checkpointer.utils import canonical_fqn

_CHUNK = 1 << 24  # elements hashed at once: bounds the temporary memory to a few hundred MiB


def _wrap_int64(value: int) -> int:
    """The Python integer as the int64 with the same low 64 bits."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x_N: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (x_N >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix64(counter_N: torch.Tensor, key: int) -> torch.Tensor:
    """SplitMix64 output function (Steele, Lea, Flood, OOPSLA 2014) of ``key + counter * golden gamma``, int64."""
    x_N = counter_N * _wrap_int64(0x9E3779B97F4A7C15) + _wrap_int64(key)
    x_N = (x_N ^ _shift_right(x_N, 30)) * _wrap_int64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ _shift_right(x_N, 27)) * _wrap_int64(0x94D049BB133111EB)
    return x_N ^ _shift_right(x_N, 31)


def standard_normal(index_N: torch.Tensor, *, seed: int, name: str) -> torch.Tensor:
    """Standard normal variates, one for each int64 global index, by the Box-Muller transform.

    Args:
        index_N: int64 row-major element indices of the full parameter.
        seed: run seed.
        name: parameter name; two parameters never share a stream.

    Returns:
        float32 tensor of the same shape.
    """
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
    bits_N = _splitmix64(index_N, key)
    # 32 bits for the radius, in (0, 1], and 32 for the angle.
    radius_N = (_shift_right(bits_N, 32).float() + 1.0) * 2.0**-32
    angle_N = (bits_N & 0xFFFFFFFF).float() * (2.0 * math.pi * 2.0**-32)
    return torch.sqrt(-2.0 * torch.log(radius_N)) * torch.cos(angle_N)


@torch.no_grad()
def fill_normal(param: torch.Tensor, *, std: float, seed: int, name: str) -> None:
    """Fill a parameter (or this rank's shard of a DTensor) with its part of the global N(0, std^2) values.

    Args:
        param: plain tensor or DTensor of any shape and floating dtype, written in place.
        std: standard deviation.
        seed: run seed.
        name: fully qualified parameter name.
    """
    if isinstance(param, DTensor):
        local = param.to_local()
        local_shape, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        assert tuple(local_shape) == tuple(local.shape), (name, local_shape, local.shape)
    else:
        local, offsets = param, (0,) * param.ndim
    if local.numel() == 0:
        return

    # Rows along dim 0 are filled in chunks; the index of an element is the sum of its coordinates times global strides.
    strides = [math.prod(param.shape[d + 1 :]) for d in range(param.ndim)]
    row_index = torch.zeros((), dtype=torch.int64, device=local.device)
    for d in range(1, param.ndim):
        coordinate = torch.arange(local.shape[d], device=local.device) + offsets[d]
        row_index = row_index.unsqueeze(-1) + coordinate * strides[d]
    rows_per_chunk = max(1, _CHUNK // max(1, row_index.numel()))
    for start in range(0, local.shape[0], rows_per_chunk):
        stop = min(local.shape[0], start + rows_per_chunk)
        first = torch.arange(start, stop, device=local.device) + offsets[0]
        index = first.reshape(-1, *([1] * (param.ndim - 1))) * strides[0] + row_index
        local[start:stop] = (standard_normal(index, seed=seed, name=name) * std).to(local.dtype)


@torch.no_grad()
def initialize(model: nn.Module, *, std: float, seed: int) -> None:
    """Give every parameter of a materialised model its initial value: 1 for norm weights, N(0, std^2) for matrices.

    Args:
        model: full model or pipeline stage; names must be those of the full model.
        std: standard deviation of matrices.
        seed: run seed.
    """
    for name, param in model.named_parameters():
        if param.ndim < 2:
            param.fill_(1.0)
        else:
            fill_normal(param, std=std, seed=seed, name=canonical_fqn(name))
