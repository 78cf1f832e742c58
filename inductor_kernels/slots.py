"""The parts of a plan inside kernels, from its address: see `plan.Plan`, whose layout this repeats.

Shape suffixes: T tokens, K picks per token, E local experts, B blocks of picks, R slots, M row tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import plan

_MAX_BLOCKS = tl.constexpr(plan.MAX_BLOCKS)


@triton.jit
def segment_E1(plan_ptr):
    return plan_ptr


@triton.jit
def segments_by_size_E3(plan_ptr, E):
    return plan_ptr + E + 1


@triton.jit
def counts_BE(plan_ptr, E):
    return plan_ptr + (4 * E + 16) // 16 * 16


@triton.jit
def pick_of_slot_R(plan_ptr, E):
    return counts_BE(plan_ptr, E) + _MAX_BLOCKS * E


@triton.jit
def expert_of_tile_M(plan_ptr, E, R):
    return pick_of_slot_R(plan_ptr, E) + R


@triton.jit
def slot_of_pick_TK(plan_ptr, E, R, ROW_TILE: tl.constexpr):
    # Two steps: R + R / ROW_TILE can be more than an int32 holds.
    return expert_of_tile_M(plan_ptr, E, R) + R // ROW_TILE
