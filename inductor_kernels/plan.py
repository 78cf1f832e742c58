"""Where each (token, expert) pick lives: the tensors that every kernel and its reference share."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Plan(NamedTuple):
    """Slots of the picks of one batch, expert-major, every expert's segment padded to a multiple of `row_tile`.

    All tensors are int32 views of `memory_N` on the device; nothing in there was ever read by the host.
    """

    memory_N: torch.Tensor
    """All that follows, one behind the other: one allocation, and one tensor to keep for backward."""
    row_tile: int
    pick_of_slot_R: torch.Tensor
    """(R,) flat pick index t*K + k of each slot, -1 in padding. Undefined from segment_E1[E] on."""
    slot_of_pick_TK: torch.Tensor
    """(T, K) slot of each pick, token-major. -1: the id isn't a local expert. -2: more local picks than `max_rows`."""
    segment_E1: torch.Tensor
    """(E+1,) first slot of each expert's segment; the last entry is the number of slots in use."""
    expert_of_tile_M: torch.Tensor
    """(R / row_tile,) expert of each row tile; E in tiles that aren't in use."""
    segments_by_size_E3: torch.Tensor
    """(E, 3) expert, first slot and end of its picks (padding left out), the expert with the most picks first."""


def num_slots(num_picks: int, num_experts: int, row_tile: int, max_rows: int) -> int:
    """Static upper bound on the slots in use, a multiple of `row_tile`.

    Args:
        num_picks: T * K.
        max_rows: upper bound on the picks of local experts that the caller knows, or -1 for none.
    """
    rows = num_picks if max_rows < 0 else torch.sym_min(num_picks, max_rows)
    return (rows + num_experts * (row_tile - 1)) // row_tile * row_tile  # type: ignore[return-value]  # int, or traced


def _sizes(num_picks: int, num_experts: int, R: int, row_tile: int) -> tuple[int, int, int, int, int]:
    """Elements of the tensors of a plan, in the order in which they lie in its memory."""
    return R, num_picks, num_experts + 1, R // row_tile, 3 * num_experts


def plan_size(num_picks: int, num_experts: int, R: int, row_tile: int) -> int:
    """Elements of the memory of a plan with R slots."""
    return sum(_sizes(num_picks, num_experts, R, row_tile))


def plan_in(memory_N: torch.Tensor, T: int, K: int, E: int, R: int, row_tile: int) -> Plan:
    """The plan that lies in `memory_N`, of `plan_size` int32 elements."""
    pick_of_slot_R, slot_of_pick_P, segment_E1, expert_of_tile_M, by_size = memory_N.split_with_sizes(
        _sizes(T * K, E, R, row_tile)
    )
    return Plan(
        memory_N, row_tile, pick_of_slot_R, slot_of_pick_P.view(T, K), segment_E1, expert_of_tile_M, by_size.view(E, 3)
    )


def empty_plan(ids_TK: torch.Tensor, num_experts: int, row_tile: int, max_rows: int) -> Plan:
    """New memory for the plan of `ids_TK`, to be filled by `build_plan` of layer.py or reference.py."""
    T, K = ids_TK.shape
    R = num_slots(T * K, num_experts, row_tile, max_rows)
    size = plan_size(T * K, num_experts, R, row_tile)
    memory_N = torch.empty(size, dtype=torch.int32, device=ids_TK.device)
    return plan_in(memory_N, T, K, num_experts, R, row_tile)
