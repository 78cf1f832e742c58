"""Tile sizes per device kind and problem. A choice depends on shapes, dtype and device alone: never on the data."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """Launch parameters of one grouped GEMM."""

    block_m: int
    """Rows of an output tile. For the row GEMMs this is the row tile that segments are padded to."""
    block_n: int
    block_k: int
    num_warps: int = 8
    num_stages: int = 3
    group_m: int = 8
    descriptors: bool = True
    """Contiguous operands through tensor descriptors (TMA on Hopper, 2-D block loads on XPU) instead of pointers."""
    flatten: bool = False
    """Pipeline across tiles, so that the next tile's loads overlap this tile's epilogue."""
    descriptor_stores: bool = True
    """Store contiguous results through descriptors too."""
    persistent: bool = True
    gather: bool = True
    """Gather rows inside the GEMM's loads; otherwise its input was gathered beforehand."""


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Configs of the five GEMM families of one MoE layer."""

    gate_up: GemmConfig
    down: GemmConfig
    down_backward: GemmConfig
    gate_up_backward: GemmConfig
    gate_up_weight_grad: GemmConfig
    down_weight_grad: GemmConfig

    @property
    def row_tile(self) -> int:
        return self.gate_up.block_m


def _uniform(**kwargs) -> LayerConfig:
    config = GemmConfig(**kwargs)
    return LayerConfig(
        gate_up=config,
        down=config,
        down_backward=config,
        gate_up_backward=config,
        gate_up_weight_grad=config,
        down_weight_grad=config,
    )


_HOPPER_BF16 = LayerConfig(
    gate_up=GemmConfig(block_m=128, block_n=128, block_k=64, num_stages=4, group_m=12, descriptor_stores=False),
    down=GemmConfig(block_m=128, block_n=256, block_k=64, num_stages=3, flatten=True),
    down_backward=GemmConfig(block_m=128, block_n=256, block_k=64, num_stages=3, group_m=4, flatten=True, gather=False),
    gate_up_backward=GemmConfig(block_m=128, block_n=256, block_k=64, num_stages=3, flatten=True),
    gate_up_weight_grad=GemmConfig(
        block_m=128, block_n=256, block_k=64, num_stages=3, group_m=4, flatten=True, gather=False
    ),
    down_weight_grad=GemmConfig(
        block_m=128, block_n=256, block_k=64, num_stages=3, group_m=4, flatten=True, gather=False
    ),
)
_GENERIC_16BIT = _uniform(block_m=64, block_n=128, block_k=32, num_warps=4, num_stages=3)
_GENERIC_FP32 = _uniform(block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=2)
_INTERPRETER = _uniform(block_m=16, block_n=32, block_k=16, num_stages=1)


@functools.cache
def layer_config(device: torch.device, dtype: torch.dtype) -> LayerConfig:
    if device.type == "cpu":
        return _INTERPRETER
    if dtype == torch.float32:
        return _GENERIC_FP32
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        return _HOPPER_BF16
    return _GENERIC_16BIT


@functools.cache
def num_programs(device: torch.device) -> int:
    """Programs that keep the whole device busy with one resident program a core; 0 = unknown (one program a tile)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 0
