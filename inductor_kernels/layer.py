"""One MoE layer out of the Triton kernels: `forward` and `backward`, twins of those in reference.py.

Importing this module imports triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton

from . import grouped_gemm
from .configs import GemmConfig, layer_config
from .index import build_plan
from .launch import cdiv
from .permute import combine, gather
from .plan import Plan
from .swiglu import swiglu_backward

_MAX_COPY_BYTES = 320 * 2**20
"""Bound on the gathered copy that is alive beside all weight gradients, where the layer's memory peaks."""


@functools.cache
def _scratch(device: torch.device) -> Callable[[int, int, int | None], torch.Tensor]:
    empty = torch.empty(0, dtype=torch.int8, device=device)
    return lambda size, alignment, stream: empty.new_empty(size)


def provide_scratch(device: torch.device) -> None:
    """Let kernels take memory for the tensor descriptors they make from torch's caching allocator.

    Triton keeps its allocator in a context variable, which autograd's own threads don't inherit: set it per call.
    """
    triton.set_allocator(_scratch(device))


def _rows(x_TD: torch.Tensor, plan: Plan, config: GemmConfig) -> torch.Tensor:
    """What the GEMM of `config` reads: the tokens themselves, or a gathered copy in slot order."""
    return x_TD if config.gather else gather(x_TD, plan)


def _gate_up_weight_grad(
    dgate_up_R2F: torch.Tensor,
    x_TD: torch.Tensor,
    dw1_EFD: torch.Tensor,
    dw3_EFD: torch.Tensor,
    plan: Plan,
    config: GemmConfig,
) -> None:
    """dW1 and dW3, from gathered copies of some columns of x at a time: this is where the layer's memory peaks."""
    D = x_TD.shape[1]
    width = D
    if not config.gather:
        chunks = max(1, cdiv(plan.R * D * x_TD.element_size(), _MAX_COPY_BYTES))
        width = cdiv(cdiv(D, chunks), config.block_n) * config.block_n
    for column in range(0, D, width):
        x = _rows(x_TD[:, column : column + width], plan, config)
        grouped_gemm.gate_up_weight_grad(dgate_up_R2F, x, dw1_EFD, dw3_EFD, column, plan, config)
        del x  # before the next copy is made


def forward(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w1_EFD: torch.Tensor,
    w3_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    plan: Plan,
    save: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.forward`. Without `save`, gate_up_R2F is empty."""
    build_plan(ids_TK, plan)
    provide_scratch(x_TD.device)
    config = layer_config(x_TD.device, x_TD.dtype, w2_EDF.shape[1], w2_EDF.shape[2])
    x = _rows(x_TD, plan, config.gate_up)
    h_RF, gate_up_R2F = grouped_gemm.gate_up(x, w1_EFD, w3_EFD, plan, config.gate_up, save)
    out = grouped_gemm.down(h_RF, w2_EDF, weights_TK, plan, config.down)
    if weights_TK.shape[1] > 1:
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
    overwrite: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference.backward`. The order of the steps keeps few row tensors alive at once."""
    provide_scratch(x_TD.device)
    config = layer_config(x_TD.device, x_TD.dtype, w2_EDF.shape[1], w2_EDF.shape[2])
    dout = _rows(dout_TD, plan, config.down_backward)
    dh_RF = grouped_gemm.down_backward(dout, w2_EDF, plan, config.down_backward)
    dgate_up_R2F, dweights_TK = swiglu_backward(dh_RF, gate_up_R2F, weights_TK, plan, overwrite)
    if overwrite:
        torch.autograd.graph.increment_version(gate_up_R2F)
    weighted_h_RF = dh_RF
    if config.down_weight_grad.gather != config.down_backward.gather:
        dout = _rows(dout_TD, plan, config.down_weight_grad)
    dw2_EDF = grouped_gemm.down_weight_grad(dout, weighted_h_RF, plan, config.down_weight_grad)
    del dout, dh_RF, weighted_h_RF
    dx = grouped_gemm.gate_up_backward(dgate_up_R2F, w1_EFD, w3_EFD, plan, config.gate_up_backward)
    if weights_TK.shape[1] > 1:
        dx = combine(dx, plan, None)
    dw1_EFD, dw3_EFD = torch.empty_like(w1_EFD), torch.empty_like(w3_EFD)
    _gate_up_weight_grad(dgate_up_R2F, x_TD, dw1_EFD, dw3_EFD, plan, config.gate_up_weight_grad)
    return dx, dweights_TK, dw1_EFD, dw3_EFD, dw2_EDF
