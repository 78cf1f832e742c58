"""Backward of SwiGLU, fused with the routing weight and its gradient: one pass over rows in slot order.

A kernel of its own: as the epilogue of the GEMM before it, it needs more registers than a 128 x 256 tile leaves.

Shape suffixes: T tokens, K picks per token, F expert width, R slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import constants, launch, next_power_of_2
from .plan import Plan
from .slots import pick_of_slot_R, segment_E1, slot_of_pick_TK


@triton.jit
def _swiglu_backward_kernel(
    dh_ptr,
    gate_up_ptr,
    dgate_up_ptr,
    weights_ptr,
    dweights_ptr,
    plan_ptr,
    num_picks,
    E,
    R,
    F: tl.constexpr,
    ROW_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    # Picks without a slot get their zero from the first programs: no launch to clear the whole tensor.
    program = tl.program_id(0).to(tl.int64)
    for start in range(program * 128, num_picks, tl.num_programs(0).to(tl.int64) * 128):
        others = start + tl.arange(0, 128)
        slot = tl.load(slot_of_pick_TK(plan_ptr, E, R, ROW_TILE) + others, mask=others < num_picks, other=0)
        tl.store(dweights_ptr + others, tl.zeros((128,), dweights_ptr.dtype.element_ty), mask=slot < 0)
    slots = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_use = slots < tl.load(segment_E1(plan_ptr) + E)
    picks = tl.load(pick_of_slot_R(plan_ptr, E) + slots, mask=in_use, other=-1)
    is_pick = picks >= 0
    weight = tl.load(weights_ptr + picks, mask=is_pick, other=0.0).to(tl.float32)[:, None]
    cols = tl.arange(0, BLOCK_F)
    mask = in_use[:, None] & (cols < F)[None, :]
    offsets = slots.to(tl.int64)[:, None] * F + cols[None, :]
    double_offsets = slots.to(tl.int64)[:, None] * (2 * F) + cols[None, :]
    # Padding may be undefined: not read, but zero afterwards.
    known = is_pick[:, None] & (cols < F)[None, :]
    dh = tl.load(dh_ptr + offsets, mask=known, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + double_offsets, mask=known, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + double_offsets + F, mask=known, other=0.0).to(tl.float32)
    sig = tl.sigmoid(gate)
    silu = gate * sig
    dtype = dh_ptr.dtype.element_ty
    h = (silu * up).to(dtype).to(tl.float32)
    # A product that can't be fused into the sum: else the threads of a row could end with sums a rounding apart.
    products = tl.fma(h, dh, 0.0)
    tl.store(dweights_ptr + picks, tl.sum(products, axis=1).to(dweights_ptr.dtype.element_ty), mask=is_pick)
    tl.store(dh_ptr + offsets, (h * weight).to(dtype), mask=mask)
    dh *= weight
    tl.store(dgate_up_ptr + double_offsets, (dh * up * sig * (1 + gate * (1 - sig))).to(dtype), mask=mask)
    tl.store(dgate_up_ptr + double_offsets + F, (dh * silu).to(dtype), mask=mask)


def swiglu_backward(
    dh_RF: torch.Tensor, gate_up_R2F: torch.Tensor, weights_TK: torch.Tensor, plan: Plan, overwrite: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the pre-activations and of the routing weights from dh = W2^T dout.

    Overwrites `dh_RF` with routing weight times h, the operand of W2's gradient.

    Args:
        overwrite: write the gradients of the pre-activations over `gate_up_R2F`, the largest tensor of the layer.

    Returns:
        dgate_up_R2F, dweights_TK: dweights[t, k] = <h, W2^T dout[t]>, zero for picks without a slot.
    """
    R, F = dh_RF.shape
    dgate_up_R2F = gate_up_R2F if overwrite else torch.empty_like(gate_up_R2F)
    dweights_TK = torch.empty_like(weights_TK)
    block = next_power_of_2(F)
    rows = 1 if block >= 512 else min(8, 512 // block)
    launch(
        _swiglu_backward_kernel,
        (max(1, R // rows),),
        constants(F=F, ROW_TILE=plan.row_tile, ROWS=rows, BLOCK_F=block, num_warps=4 if block <= 4096 else 8),
        dh_RF,
        gate_up_R2F,
        dgate_up_R2F,
        weights_TK,
        dweights_TK,
        plan.memory_N,
        plan.T * plan.K,
        plan.E,
        R,
    )
    return dgate_up_R2F, dweights_TK
