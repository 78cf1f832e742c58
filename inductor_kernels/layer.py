"""One MoE layer out of the Triton kernels: `build_plan`, `forward` and `backward`, twins of those in reference.py.

Importing this module imports triton.
"""

from __future__ import annotations

import torch
import triton

from . import grouped_gemm
from .combine import combine, fill_missing, reduce_dweight
from .configs import layer_config
from .index import build_plan
from .plan import Plan

__all__ = ["backward", "build_plan", "forward"]


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for tensor descriptors that kernels make; the caching allocator ties it to the current stream."""
    return torch.empty(size, dtype=torch.int8, device=torch.accelerator.current_accelerator())


triton.set_allocator(_scratch)


def forward(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w3_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    plan: Plan,
    save: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.forward`. Without `save`, gate_up_R2F is empty."""
    config = layer_config(x_TD.device, x_TD.dtype)
    h_RF, gate_up_R2F = grouped_gemm.gate_up(x_TD, w1_EFD, w3_EFD, plan, config.gate_up, save)
    out = grouped_gemm.down(h_RF, w2_EDF, weights_TK, plan, config.down)
    if weights_TK.shape[1] == 1:
        fill_missing(out, plan)
    else:
        out = combine(out, plan, weights_TK)
    return out, gate_up_R2F


def backward(
    dout_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w3_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    plan: Plan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference.backward`. The order of the steps keeps the peak memory low: dW2 frees h before dx is made."""
    config = layer_config(x_TD.device, x_TD.dtype)
    dgate_up_R2F, weighted_h_RF, dweight_RN = grouped_gemm.down_backward(
        dout_TD, w2_EDF, weights_TK, gate_up_R2F, plan, config.down_backward
    )
    dweights_TK = reduce_dweight(dweight_RN, plan, weights_TK.dtype)
    dw2_EDF = grouped_gemm.down_weight_grad(dout_TD, weighted_h_RF, plan, config.down_weight_grad)
    del weighted_h_RF
    dx = grouped_gemm.gate_up_backward(dgate_up_R2F, w1_EFD, w3_EFD, plan, config.gate_up_backward)
    if weights_TK.shape[1] == 1:
        fill_missing(dx, plan)
    else:
        dx = combine(dx, plan, None)
    dw1_EFD, dw3_EFD = grouped_gemm.gate_up_weight_grad(dgate_up_R2F, x_TD, plan, config.gate_up_weight_grad)
    return dx, dweights_TK, dw1_EFD, dw3_EFD, dw2_EDF
