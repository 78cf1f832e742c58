"""Index building without sort, atomics or host synchronisation: three small Triton launches.

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

from .launch import launch
from .plan import Plan, num_slots


@triton.jit
def _count_kernel(ids_ptr, counts_EB_ptr, num_picks, num_blocks, E, E_PAD: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    picks = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + picks, mask=picks < num_picks, other=-1)
    experts = tl.arange(0, E_PAD)
    hits = (ids[:, None] == experts[None, :]).to(tl.int32)
    tl.store(counts_EB_ptr + experts * num_blocks + block, tl.sum(hits, axis=0), mask=experts < E)


@triton.jit
def _scan_kernel(counts_EB_ptr, totals_E_ptr, num_blocks, CHUNK: tl.constexpr):
    """Per expert: exclusive prefix sum over blocks, in place, and the total."""
    expert = tl.program_id(0)
    total = 0
    for start in range(0, num_blocks, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        ptrs = counts_EB_ptr + expert * num_blocks + blocks
        counts = tl.load(ptrs, mask=blocks < num_blocks, other=0)
        tl.store(ptrs, total + tl.cumsum(counts, axis=0) - counts, mask=blocks < num_blocks)
        total += tl.sum(counts, axis=0)
    tl.store(totals_E_ptr + expert, total)


@triton.jit
def _assign_kernel(
    ids_ptr,
    base_EB_ptr,
    totals_E_ptr,
    slot_of_pick_ptr,
    pick_of_slot_ptr,
    segment_ptr,
    expert_of_tile_ptr,
    num_picks,
    num_blocks,
    num_slots,
    E,
    ROW_TILE: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    block = tl.program_id(0)
    experts = tl.arange(0, E_PAD)
    is_expert = experts < E
    totals = tl.load(totals_E_ptr + experts, mask=is_expert, other=0)
    padded = (totals + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    ends = tl.cumsum(padded, axis=0)
    starts = ends - padded

    # Slots of this block's picks: segment start + picks of that expert in earlier blocks + rank inside the block.
    picks = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_pick = picks < num_picks
    ids = tl.load(ids_ptr + picks, mask=is_pick, other=-1)
    local = (ids >= 0) & (ids < E)
    hits = (ids[:, None] == experts[None, :]).to(tl.int32)
    base = starts + tl.load(base_EB_ptr + experts * num_blocks + block, mask=is_expert, other=0)
    rank = tl.cumsum(hits, axis=0) - 1
    slots = tl.sum(hits * (rank + base[None, :]), axis=1)
    fits = local & (slots < num_slots)
    slot_or_reason = tl.where(fits, slots, tl.where(local, -2, -1))
    tl.store(slot_of_pick_ptr + picks, slot_or_reason, mask=is_pick)
    tl.store(pick_of_slot_ptr + slots, picks.to(tl.int32), mask=fits)

    # The experts are dealt to the blocks for the padding slots, the row tiles likewise.
    for expert in range(block, E, num_blocks):
        mine = experts == expert
        first = tl.sum(tl.where(mine, starts + totals, 0), axis=0)
        last = tl.minimum(tl.sum(tl.where(mine, ends, 0), axis=0), num_slots)
        pads = first + tl.arange(0, ROW_TILE)
        tl.store(pick_of_slot_ptr + pads, tl.full((ROW_TILE,), -1, tl.int32), mask=pads < last)

    num_tiles = num_slots // ROW_TILE
    for start in range(block * TILES, num_tiles, num_blocks * TILES):
        tiles = start + tl.arange(0, TILES)
        owner = tl.sum((ends[None, :] <= (tiles * ROW_TILE)[:, None]).to(tl.int32) * is_expert[None, :], axis=1)
        tl.store(expert_of_tile_ptr + tiles, owner, mask=tiles < num_tiles)

    if block == 0:
        tl.store(segment_ptr, 0)
        tl.store(segment_ptr + 1 + experts, tl.minimum(ends, num_slots), mask=is_expert)


def build_plan(ids_TK: torch.Tensor, num_experts: int, row_tile: int, max_rows: int) -> Plan:
    """Slots of all picks. See `Plan` for the fields and `reference.build_plan` for the same in plain torch."""
    device = ids_TK.device
    num_picks = ids_TK.numel()
    R = num_slots(num_picks, num_experts, row_tile, max_rows)
    experts_padded = triton.next_power_of_2(num_experts)
    # One-hot tables of about 16 Ki entries a program fit in registers.
    block = max(16, min(512, 16384 // experts_padded))
    num_blocks = triton.cdiv(num_picks, block)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    counts_EB = empty(num_experts, num_blocks)
    totals_E = empty(num_experts)
    plan = Plan(
        slot_of_pick_TK=empty(*ids_TK.shape),
        pick_of_slot_R=empty(R),
        segment_E1=empty(num_experts + 1),
        expert_of_tile_M=empty(R // row_tile),
    )
    launch(
        _count_kernel,
        (num_blocks,),
        ids_TK,
        counts_EB,
        num_picks,
        num_blocks,
        num_experts,
        E_PAD=experts_padded,
        BLOCK=block,
        num_warps=8,
    )
    launch(_scan_kernel, (num_experts,), counts_EB, totals_E, num_blocks, CHUNK=1024, num_warps=4)
    launch(
        _assign_kernel,
        (num_blocks,),
        ids_TK,
        counts_EB,
        totals_E,
        plan.slot_of_pick_TK,
        plan.pick_of_slot_R,
        plan.segment_E1,
        plan.expert_of_tile_M,
        num_picks,
        num_blocks,
        R,
        num_experts,
        ROW_TILE=row_tile,
        E_PAD=experts_padded,
        BLOCK=block,
        TILES=16,
        num_warps=8,
    )
    return plan
