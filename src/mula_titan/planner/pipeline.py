"""Pipeline schedules, run with the time and memory of each stage."""

from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

Action = tuple[str, int, int]
"""(``F`` forward, ``B`` backward, ``I`` gradient of inputs, ``W`` gradient of weights; stage; micro-batch)"""

SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble")
"""Schedules that the planner knows."""


@lru_cache(maxsize=512)
def orders(schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int) -> list[list[Action]]:
    """What each pipeline rank does, in order: of torchtitan's ``pipeline_parallel_schedule``.

    Raises:
        ValueError: a schedule that the planner doesn't know, or that refuses this number of micro-batches.
    """
    n = num_micro_batches
    if schedule == "GPipe":
        return [[("F", r, m) for m in range(n)] + [("B", r, m) for m in range(n)] for r in range(pp)]
    if schedule == "1F1B":
        if n < pp:
            raise ValueError(f"schedule '1F1B' needs at least as many micro-batches as stages: {n} < {pp}")
        return [_one_f_one_b(r, pp, n) for r in range(pp)]
    if schedule == "Interleaved1F1B":
        rounds = max(1, n // pp)
        if n % rounds:
            raise ValueError(f"schedule 'Interleaved1F1B': {n} micro-batches don't divide into {rounds} rounds")
        # torch computes a rank's operations from these attributes alone.
        state: Any = SimpleNamespace(
            n_local_stages=stages_per_rank,
            microbatches_per_round=n // rounds,
            pp_group_size=pp,
            _n_microbatches=n,
        )
        return [_named(ScheduleInterleaved1F1B._calculate_single_rank_operations(state, r)) for r in range(pp)]
    if schedule == "ZBVZeroBubble":
        state = SimpleNamespace(pp_group_size=pp, _n_microbatches=n, num_stages=2 * pp)
        return [_named(ScheduleZBVZeroBubble._calculate_single_rank_operations(state, r)) for r in range(pp)]
    raise ValueError(
        f"parallelism.pipeline_parallel_schedule = {schedule!r}: the planner knows {', '.join(map(repr, SCHEDULES))}"
    )


def _one_f_one_b(rank: int, pp: int, n: int) -> list[Action]:
    warm_up = min(n, pp - rank)
    order: list[Action] = [("F", rank, m) for m in range(warm_up)]
    for m in range(n):
        order.append(("B", rank, m))
        if warm_up + m < n:
            order.append(("F", rank, warm_up + m))
    return order


def _named(actions: Any) -> list[Action]:
    return [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in actions if a is not None]


@dataclass(frozen=True)
class Run:
    """One run of a schedule."""

    seconds: float
    busy: tuple[float, ...]
    """Seconds of work of each rank."""

    @property
    def bubble(self) -> float:
        """Share of the ranks' time that is idle; for equal stages and 1F1B (PP-1) / (NMB+PP-1)."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def simulate(order: list[list[Action]], forward: list[float], backward: list[float], transfer: float = 0.0) -> Run:
    """Run a schedule.

    Args:
        order: actions of each rank.
        forward: seconds of each stage's forward of one micro-batch.
        backward: seconds of each stage's backward, recomputation included; ``I`` and ``W`` take half each.
        transfer: seconds from the end of a stage until the next rank's stage has the result.
    """
    last = len(forward) - 1
    rank_of = {stage: rank for rank, actions in enumerate(order) for _, stage, _ in actions}
    done: dict[Action, float] = {}
    clock, busy, position = [0.0] * len(order), [0.0] * len(order), [0] * len(order)
    waiting = set(range(len(order)))
    while waiting:
        progressed = False
        for rank in list(waiting):
            actions = order[rank]
            while position[rank] < len(actions):
                kind, stage, m = actions[position[rank]]
                ready = _ready(kind, stage, m, last, rank_of, rank, done, transfer)
                if ready is None:
                    break
                seconds = forward[stage] if kind == "F" else backward[stage] if kind == "B" else backward[stage] / 2
                clock[rank] = max(clock[rank], ready) + seconds
                busy[rank] += seconds
                done[("B" if kind == "I" else kind), stage, m] = clock[rank]
                position[rank] += 1
                progressed = True
            if position[rank] == len(actions):
                waiting.discard(rank)
        if not progressed and waiting:
            raise ValueError("the pipeline schedule waits for itself: its order of actions cannot be run")
    return Run(seconds=max(clock), busy=tuple(busy))


def _ready(
    kind: str, stage: int, m: int, last: int, rank_of: dict[int, int], rank: int, done: dict[Action, float], cost: float
) -> float | None:
    """When an action's inputs are there; None if not yet known."""
    if kind == "W":
        return done.get(("B", stage, m))
    if kind == "F":
        if stage == 0:
            return 0.0
        key: Action = ("F", stage - 1, m)
    elif stage == last:
        key = ("F", stage, m)
    else:
        key = ("B", stage + 1, m)
    if key not in done or (kind != "F" and ("F", stage, m) not in done):
        return None
    ready = done[key] + (cost if rank_of[key[1]] != rank else 0.0)
    return ready if kind == "F" else max(ready, done["F", stage, m])


def peak_bytes(
    actions: list[Action], held: dict[int, float], forward_peak: dict[int, float], backward_peak: dict[int, float]
) -> float:
    """Most activation memory of a rank over its schedule.

    Args:
        actions: the rank's order.
        held: bytes of a micro-batch on each of its stages, from forward to backward.
        forward_peak: bytes during a stage's forward, what it will hold included.
        backward_peak: bytes during a stage's backward, what it holds included.
    """
    live = peak = 0.0
    for kind, stage, _ in actions:
        top = live + forward_peak[stage] if kind == "F" else live - held[stage] + backward_peak[stage]
        if top > peak:
            peak = top
        if kind == "F":
            live += held[stage]
        elif kind != "I":
            live -= held[stage]
    return peak


@lru_cache(maxsize=4096)
def in_flight(schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, rank: int) -> int:
    """Most micro-batches (times stages) that a rank holds at once."""
    actions = orders(schedule, pp, stages_per_rank, num_micro_batches)[rank]
    ones = {stage: 1.0 for _, stage, _ in actions}
    return int(peak_bytes(actions, ones, ones, ones))
