"""Tile sizes per device kind and problem. A choice depends on shapes, dtype and device alone: never on the data."""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch


class GemmConfig(NamedTuple):
    """Launch parameters of one grouped GEMM. A tuple, because each launch takes its hash."""

    block_m: int
    """Rows of an output tile. For the row GEMMs this is the row tile that segments are padded to."""
    block_n: int
    block_k: int
    """Length of a block of the contraction; in the weight gradients, which contract over rows, half a row tile or a
    divisor of that."""
    num_warps: int = 8
    num_stages: int = 3
    group_m: int = 8
    descriptor_stores: bool = True
    """Store contiguous results through tensor descriptors, as their loads always are."""
    gather: bool = True
    """Gather rows inside the GEMM's loads; otherwise its input was gathered beforehand."""


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Configs of the six GEMMs of one MoE layer."""

    gate_up: GemmConfig
    down: GemmConfig
    down_backward: GemmConfig
    gate_up_backward: GemmConfig
    gate_up_weight_grad: GemmConfig
    down_weight_grad: GemmConfig

    @property
    def row_tile(self) -> int:
        return self.gate_up.block_m


def _uniform(config: GemmConfig) -> LayerConfig:
    return LayerConfig(
        gate_up=config,
        down=config,
        down_backward=config,
        gate_up_backward=config,
        gate_up_weight_grad=config,
        down_weight_grad=config,
    )


_HOPPER_16BIT = LayerConfig(
    gate_up=GemmConfig(block_m=128, block_n=128, block_k=64, num_stages=4, group_m=12, descriptor_stores=False),
    down=GemmConfig(block_m=128, block_n=256, block_k=64, num_stages=4, group_m=12),
    down_backward=GemmConfig(block_m=128, block_n=256, block_k=64, num_stages=4, group_m=4, gather=False),
    gate_up_backward=GemmConfig(block_m=128, block_n=256, block_k=64, num_stages=4),
    gate_up_weight_grad=GemmConfig(block_m=128, block_n=256, block_k=64, num_stages=4, group_m=4, gather=False),
    down_weight_grad=GemmConfig(block_m=128, block_n=256, block_k=64, num_stages=4, group_m=4, gather=False),
)
# From the sizes that reference work on Intel's Max 1550 uses (256 x 256 x 32, 32 warps); not measured by us.
_XPU_16BIT = _uniform(GemmConfig(block_m=128, block_n=128, block_k=32, num_warps=32, num_stages=4))
_GENERIC_16BIT = _uniform(GemmConfig(block_m=64, block_n=128, block_k=32, num_warps=4))
# Small contraction blocks: products without tensor cores are unrolled, and larger ones spill registers.
_GENERIC_FP32 = _uniform(GemmConfig(block_m=64, block_n=64, block_k=16, num_warps=8, num_stages=2))
_INTERPRETER = _uniform(GemmConfig(block_m=16, block_n=32, block_k=8, num_stages=1))


@functools.cache
def layer_config(device: torch.device, dtype: torch.dtype, D: int, F: int) -> LayerConfig:
    """Configs for experts of model width D and width F: what `tune` measured on this device, or the built-in."""
    if device.type not in ("cuda", "xpu"):
        return _INTERPRETER
    config = _built_in(device, dtype)
    tuned = load_tuned(device).get(problem_key(dtype, D, F), {})
    return replace(config, **{family: GemmConfig(**values) for family, values in tuned.items()})


def _built_in(device: torch.device, dtype: torch.dtype) -> LayerConfig:
    if dtype == torch.float32:
        return _GENERIC_FP32
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        return _HOPPER_16BIT
    return _XPU_16BIT if device.type == "xpu" else _GENERIC_16BIT


def problem_key(dtype: torch.dtype, D: int, F: int) -> str:
    return f"{str(dtype).removeprefix('torch.')}-D{D}-F{F}"


def tuned_file(device: torch.device) -> Path:
    """The file of a device kind's choices, in $INDUCTOR_KERNELS_CACHE or ~/.cache/inductor_kernels."""
    folder = os.environ.get("INDUCTOR_KERNELS_CACHE") or Path.home() / ".cache" / "inductor_kernels"
    name = torch.get_device_module(device).get_device_name(device)
    return Path(folder) / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}.json"


@functools.cache
def load_tuned(device: torch.device) -> dict[str, dict[str, dict]]:
    """Problem key -> GEMM family -> GemmConfig fields; empty where nothing was tuned."""
    path = tuned_file(device)
    return json.loads(path.read_text()) if path.exists() else {}


@functools.cache
def num_programs(device: torch.device) -> int:
    """Programs that keep the whole device busy with one resident program a core; 0 = unknown (one program a tile)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 0
