"""Where each (token, expert) pick lives: what every kernel and its reference share."""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_BLOCKS = 128
"""Blocks of picks whose experts are counted one by one."""


class Plan(NamedTuple):
    """Slots of the picks of one batch, expert-major, every expert's segment padded to a multiple of `row_tile`.

    All of it is int32 and lies in `memory_N`, in the order of the properties, which slots.py repeats for kernels:
    one allocation, one argument of a kernel, one tensor to keep for backward. The host reads nothing of it. Behind the
    first two, MAX_BLOCKS x E elements are scratch of the kernels that build it.
    """

    memory_N: torch.Tensor
    T: int
    K: int
    E: int
    R: int
    """Slots, a static upper bound on those in use."""
    row_tile: int

    @property
    def M(self) -> int:
        """Row tiles of the R slots."""
        return self.R // self.row_tile

    @property
    def segment_E1(self) -> torch.Tensor:
        """(E+1,) first slot of each expert's segment; the last entry is the number of slots in use."""
        return self.memory_N[: self.E + 1]

    @property
    def segments_by_size_E3(self) -> torch.Tensor:
        """(E, 3) expert, first slot and end of its picks (padding left out), the expert with the most picks first."""
        return self.memory_N[self.E + 1 : 4 * self.E + 1].view(self.E, 3)

    @property
    def pick_of_slot_R(self) -> torch.Tensor:
        """(R,) flat pick index t*K + k of each slot, -1 in padding. Undefined from segment_E1[E] on."""
        return self.memory_N[_head_size(self.E) :][: self.R]

    @property
    def expert_of_tile_M(self) -> torch.Tensor:
        """(M,) expert of each row tile; E in tiles that aren't in use."""
        return self.memory_N[_head_size(self.E) + self.R :][: self.M]

    @property
    def slot_of_pick_TK(self) -> torch.Tensor:
        """(T, K) slot of each pick, token-major. -1: the id isn't a local expert. -2: more picks than `max_rows`."""
        return self.memory_N[_head_size(self.E) + self.R + self.M :].view(self.T, self.K)


def num_slots(num_picks: int, num_experts: int, row_tile: int, max_rows: int) -> int:
    """Static upper bound on the slots in use, a multiple of `row_tile`.

    Args:
        num_picks: T * K.
        max_rows: upper bound on the picks of local experts that the caller knows, or -1 for none.
    """
    rows = num_picks if max_rows < 0 else torch.sym_min(num_picks, max_rows)
    return (rows + num_experts * (row_tile - 1)) // row_tile * row_tile  # type: ignore[return-value]  # int, or traced


def _head_size(num_experts: int) -> int:
    """Elements of the parts that depend on the experts alone, to a multiple of 16."""
    return (4 * num_experts + 16) // 16 * 16 + MAX_BLOCKS * num_experts


def plan_size(num_picks: int, num_experts: int, R: int, row_tile: int) -> int:
    """Elements of the memory of a plan with R slots."""
    return _head_size(num_experts) + R + R // row_tile + num_picks


def empty_plan(ids_TK: torch.Tensor, num_experts: int, row_tile: int, max_rows: int) -> Plan:
    """New memory for the plan of `ids_TK`, to be filled by `build_plan` of index.py or reference.py."""
    T, K = ids_TK.shape
    R = num_slots(T * K, num_experts, row_tile, max_rows)
    size = plan_size(T * K, num_experts, R, row_tile)
    return Plan(ids_TK.new_empty(size, dtype=torch.int32), T, K, num_experts, R, row_tile)
