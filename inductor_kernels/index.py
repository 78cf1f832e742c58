"""Index building without sort, atomics or host synchronisation: two small Triton launches, one for few picks.

Every local pick (a token together with one of its chosen experts) gets a slot. Slots are expert-major; each expert's
segment starts at a multiple of `row_tile`, so one row tile of a GEMM never holds two experts. Inside a segment picks
keep their token order, which makes every later reduction deterministic.

Shape suffixes: T tokens, K picks per token, P = T*K picks, E local experts, B blocks of picks, R slots (static upper
bound), M = R / row_tile row tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, constants, launch, next_power_of_2
from .plan import MAX_BLOCKS, Plan
from .slots import counts_BE, expert_of_tile_M, pick_of_slot_R, segment_E1, segments_by_size_E3, slot_of_pick_TK


@triton.jit
def _load_ids(ids_ptr, first_pick, num_picks, STEP: tl.constexpr):
    """Expert ids of STEP picks from `first_pick` on; -1 past the last pick."""
    picks = first_pick + tl.arange(0, STEP)
    return tl.load(ids_ptr + picks, mask=picks < num_picks, other=-1)


@triton.jit
def _hits(ids, experts):
    """(picks, experts) 1 where a pick chose the expert."""
    return (ids[:, None] == experts[None, :]).to(tl.int32)


@triton.jit
def _count_kernel(ids_ptr, plan_ptr, num_picks, steps, E, E_PAD: tl.constexpr, STEP: tl.constexpr):
    block = tl.program_id(0)
    experts = tl.arange(0, E_PAD)
    counts = tl.zeros((E_PAD,), tl.int32)
    first = block.to(tl.int64) * steps * STEP
    for step in range(steps):
        counts += tl.sum(_hits(_load_ids(ids_ptr, first + step * STEP, num_picks, STEP), experts), axis=0)
    tl.store(counts_BE(plan_ptr, E) + block * E + experts, counts, mask=experts < E)


@triton.jit
def _assign_kernel(
    ids_ptr,
    plan_ptr,
    num_picks,
    steps,
    num_slots,
    E,
    ROW_TILE: tl.constexpr,
    E_PAD: tl.constexpr,
    B_PAD: tl.constexpr,
    STEP: tl.constexpr,
    TILES: tl.constexpr,
):
    """B_PAD: blocks counted beforehand, to a power of two; 0 if no kernel has counted the picks."""
    segment_ptr = segment_E1(plan_ptr)
    segments_by_size_ptr = segments_by_size_E3(plan_ptr, E)
    pick_of_slot_ptr = pick_of_slot_R(plan_ptr, E)
    expert_of_tile_ptr = expert_of_tile_M(plan_ptr, E, num_slots)
    slot_of_pick_ptr = slot_of_pick_TK(plan_ptr, E, num_slots, ROW_TILE)
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0)
    experts = tl.arange(0, E_PAD)
    is_expert = experts < E
    first_pick = block.to(tl.int64) * steps * STEP
    # Every program adds up the counts itself: cheaper than another launch that does it once.
    if B_PAD > 0:
        blocks = tl.arange(0, B_PAD)
        counts = tl.load(
            counts_BE(plan_ptr, E) + blocks[:, None] * E + experts[None, :],
            mask=(blocks < num_blocks)[:, None] & is_expert[None, :],
            other=0,
        )
        earlier = tl.sum(tl.where((blocks < block)[:, None], counts, 0), axis=0)
        totals = tl.sum(counts, axis=0)
    else:
        hits = tl.zeros((STEP, E_PAD), tl.int32)
        for start in range(0, first_pick, STEP):
            hits += _hits(_load_ids(ids_ptr, start, num_picks, STEP), experts)
        earlier = tl.sum(hits, axis=0)
        for start in range(first_pick, num_picks, STEP):
            hits += _hits(_load_ids(ids_ptr, start, num_picks, STEP), experts)
        totals = tl.sum(hits, axis=0)
    padded = (totals + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    ends = tl.cumsum(padded, axis=0)
    starts = ends - padded

    # Slots of this block's picks: segment start + picks of that expert before them.
    base = starts + earlier
    for step in range(steps):
        picks = first_pick + step * STEP + tl.arange(0, STEP)
        ids = _load_ids(ids_ptr, first_pick + step * STEP, num_picks, STEP)
        local = (ids >= 0) & (ids < E)
        hits = _hits(ids, experts)
        rank = tl.cumsum(hits, axis=0) - 1
        slots = tl.sum(hits * (rank + base[None, :]), axis=1)
        fits = local & (slots < num_slots)
        slot_or_reason = tl.where(fits, slots, tl.where(local, -2, -1))
        tl.store(slot_of_pick_ptr + picks, slot_or_reason, mask=picks < num_picks)
        tl.store(pick_of_slot_ptr + slots, picks.to(tl.int32), mask=fits)
        base += tl.sum(hits, axis=0)

    # The experts are dealt to the blocks for padding slots and rank by size, the row tiles likewise.
    sizes = tl.minimum(starts + totals, num_slots) - tl.minimum(starts, num_slots)
    for expert in range(block, E, num_blocks):
        mine = experts == expert
        picks_end = tl.minimum(tl.sum(tl.where(mine, starts + totals, 0), axis=0), num_slots)
        end = tl.minimum(tl.sum(tl.where(mine, ends, 0), axis=0), num_slots)
        pads = picks_end + tl.arange(0, ROW_TILE)
        tl.store(pick_of_slot_ptr + pads, tl.full((ROW_TILE,), -1, tl.int32), mask=pads < end)
        size = tl.sum(tl.where(mine, sizes, 0), axis=0)
        before = (sizes > size) | ((sizes == size) & (experts < expert))
        entry = segments_by_size_ptr + 3 * tl.sum((before & is_expert).to(tl.int32), axis=0)
        tl.store(entry, expert)
        tl.store(entry + 1, picks_end - size)
        tl.store(entry + 2, picks_end)

    num_tiles = num_slots // ROW_TILE
    for start in range(block * TILES, num_tiles, num_blocks * TILES):
        tiles = start + tl.arange(0, TILES)
        owner = tl.sum((ends[None, :] <= (tiles * ROW_TILE)[:, None]).to(tl.int32) * is_expert[None, :], axis=1)
        tl.store(expert_of_tile_ptr + tiles, owner, mask=tiles < num_tiles)

    if block == 0:
        tl.store(segment_ptr, 0)
        tl.store(segment_ptr + 1 + experts, tl.minimum(ends, num_slots), mask=is_expert)


_TABLE = 16384
"""Entries of a table (picks x experts, blocks x experts) that fit in the registers of a program."""
_MAX_TABLES = 16
"""Tables of picks x experts that each program counts itself, sooner than another kernel could be launched for it."""


def build_plan(ids_TK: torch.Tensor, plan: Plan) -> None:
    """Fill `plan` for these expert ids. See `reference.build_plan` for the same in plain torch."""
    num_picks = plan.T * plan.K
    experts_padded = next_power_of_2(plan.E)
    step = max(16, min(512, _TABLE // experts_padded))
    steps = cdiv(cdiv(num_picks, step), min(MAX_BLOCKS, step))
    num_blocks = cdiv(num_picks, step * steps)
    counted = num_picks > _MAX_TABLES * step
    if counted:
        launch(
            _count_kernel,
            (num_blocks,),
            constants(E_PAD=experts_padded, STEP=step, num_warps=8),
            ids_TK,
            plan.memory_N,
            num_picks,
            steps,
            plan.E,
        )
    launch(
        _assign_kernel,
        (num_blocks,),
        constants(
            ROW_TILE=plan.row_tile,
            E_PAD=experts_padded,
            B_PAD=next_power_of_2(num_blocks) if counted else 0,
            STEP=step,
            TILES=16,
            num_warps=8,
        ),
        ids_TK,
        plan.memory_N,
        num_picks,
        steps,
        plan.R,
        plan.E,
    )
