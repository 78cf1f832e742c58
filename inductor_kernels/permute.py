"""Moves between token order and slot order: gather, and un-permute with fp32 accumulation.

Each program owns its output rows and adds the slots of its picks in pick order: no atomics.

Shape suffixes: T tokens, K picks per token, D model width, R slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, constants, launch, next_power_of_2
from .plan import Plan
from .slots import pick_of_slot_R, segment_E1, slot_of_pick_TK


@triton.jit
def _gather_kernel(
    x_ptr,
    plan_ptr,
    out_ptr,
    E,
    R,
    stride,
    K: tl.constexpr,
    D: tl.constexpr,
    ROW_TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Programs [0, E) clear one segment's padding; each of the next T copies a token to its slots: x is read once."""
    program = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_D = cols < D
    if program < E:
        first = tl.load(segment_E1(plan_ptr) + program)
        last = tl.load(segment_E1(plan_ptr) + program + 1)
        pick_of_slot_ptr = pick_of_slot_R(plan_ptr, E)
        zeros = tl.zeros((8, BLOCK_D), out_ptr.dtype.element_ty)
        for start in range(tl.maximum(first, last - ROW_TILE), last, 8):
            slots = start + tl.arange(0, 8)
            is_pad = tl.load(pick_of_slot_ptr + slots) < 0
            tl.store(
                out_ptr + slots.to(tl.int64)[:, None] * D + cols[None, :], zeros, mask=is_pad[:, None] & in_D[None, :]
            )
    else:
        token = (program - E).to(tl.int64)
        row = tl.load(x_ptr + token * stride + cols, mask=in_D)
        slot_of_pick_ptr = slot_of_pick_TK(plan_ptr, E, R, ROW_TILE)
        for k in tl.static_range(K):
            slot = tl.load(slot_of_pick_ptr + token * K + k).to(tl.int64)
            tl.store(out_ptr + slot * D + cols, row, mask=in_D & (slot >= 0))


@triton.jit
def _combine_kernel(
    rows_ptr,
    plan_ptr,
    weights_ptr,
    out_ptr,
    E,
    R,
    K: tl.constexpr,
    D: tl.constexpr,
    ROW_TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_D = cols < D
    acc = tl.zeros((BLOCK_D,), tl.float32)
    slot_of_pick_ptr = slot_of_pick_TK(plan_ptr, E, R, ROW_TILE)
    for k in tl.static_range(K):
        slot = tl.load(slot_of_pick_ptr + token * K + k).to(tl.int64)
        row = tl.load(rows_ptr + slot * D + cols, mask=in_D & (slot >= 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_ptr + token * K + k).to(tl.float32)
        acc += tl.where(slot == -2, float("nan"), row)
    tl.store(out_ptr + token * D + cols, acc.to(out_ptr.dtype.element_ty), mask=in_D)


def _column_blocks(D: int) -> tuple[int, int]:
    """Block width and count: the widest power of two up to 2048 that divides D, else 1024 with a masked tail."""
    block = min(D & -D, 2048)
    if block < 512:
        block = min(1024, next_power_of_2(D))
    return block, cdiv(D, block)


def gather(x_TD: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Rows of x (rows may be strided) in slot order, zero in padding slots; slots that aren't in use stay unwritten."""
    D = x_TD.shape[1]
    out_RD = x_TD.new_empty(plan.R, D)
    block, num_blocks = _column_blocks(D)
    launch(
        _gather_kernel,
        (plan.T + plan.E, num_blocks),
        constants(K=plan.K, D=D, ROW_TILE=plan.row_tile, BLOCK_D=block, num_warps=4),
        x_TD,
        plan.memory_N,
        out_RD,
        plan.E,
        plan.R,
        x_TD.stride(0),
    )
    return out_RD


def combine(rows_RD: torch.Tensor, plan: Plan, weights_TK: torch.Tensor | None) -> torch.Tensor:
    """out[t] = sum over k of weights[t, k] * rows[slot[t, k]]; without weights, the plain sum."""
    D = rows_RD.shape[1]
    out_TD = rows_RD.new_empty(plan.T, D)
    block, num_blocks = _column_blocks(D)
    launch(
        _combine_kernel,
        (plan.T, num_blocks),
        constants(K=plan.K, D=D, ROW_TILE=plan.row_tile, BLOCK_D=block, WEIGHTED=weights_TK is not None, num_warps=4),
        rows_RD,
        plan.memory_N,
        rows_RD if weights_TK is None else weights_TK,
        out_TD,
        plan.E,
        plan.R,
    )
    return out_TD
