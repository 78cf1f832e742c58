"""Where each (token, expert) pick lives: the tensors that every kernel and its reference share."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Plan(NamedTuple):
    """Slots of the picks of one batch, expert-major, every expert's segment padded to a multiple of `row_tile`.

    All tensors are int32 and live on the device; nothing in here was ever read by the host.
    """

    slot_of_pick_TK: torch.Tensor
    """(T, K) slot of each pick, token-major. -1: the id isn't a local expert. -2: more local picks than `max_rows`."""
    pick_of_slot_R: torch.Tensor
    """(R,) flat pick index t*K + k of each slot, -1 in padding. Undefined from segment_E1[E] on."""
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
