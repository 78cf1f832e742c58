"""All layouts of a configuration on a number of ranks, best first, and the nearest one that works."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mula_titan.planner.hardware import Hardware
from mula_titan.planner.layout import SINGLE_STAGE, Layout
from mula_titan.planner.memory import MemoryModel, RankMemory
from mula_titan.planner.pipeline import orders
from mula_titan.planner.step_time import BlockTime, StepTime, block_time, data_messages, head_time, step_time

MICRO_BATCHES = (1, 2, 4)
"""Sequences a micro-batch that the search tries."""
VIRTUAL_STAGES = (2, 4)
"""Stages a rank of interleaved schedules that the search tries."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout with its memory and step time."""

    layout: Layout
    memory: RankMemory
    """Of the pipeline rank with the highest peak."""
    time: StepTime

    def fits(self, hardware: Hardware) -> bool:
        """Whether the highest peak is within what tensors can have."""
        return self.memory.peak <= hardware.usable_bytes


class Planner:
    """Plans for one configuration on one machine; what is counted once is kept."""

    def __init__(self, config: Any, hardware: Hardware, *, imbalance: float = 1.0) -> None:
        """A planner.

        Args:
            config: a ``MulaTrainer.Config``.
            hardware: the machine.
            imbalance: rows of the busiest expert rank over the mean, at least 1.

        Raises:
            ValueError: imbalance below 1.
        """
        if imbalance < 1:
            raise ValueError(f"--imbalance {imbalance}: the busiest rank has at least the mean; set 1 or more")
        self.config, self.hardware, self.imbalance = config, hardware, imbalance
        self.memory = MemoryModel(config, device_type=hardware.device, imbalance=imbalance)
        self._blocks: dict[tuple[int, int, int], tuple[BlockTime, float]] = {}

    def layout(self, world_size: int) -> Layout:
        """The configuration's own layout."""
        return Layout.from_config(self.config, world_size, self.hardware.device)

    def plan(self, layout: Layout) -> Plan:
        """Memory and time of a layout.

        Raises:
            ValueError: it cannot be built or run.
        """
        time = step_time(self.memory, layout, self.hardware, imbalance=self.imbalance)
        return Plan(layout=layout, memory=self.memory.worst(layout), time=time)

    # -- all layouts --------------------------------------------------------------------------------------------------

    def candidates(self, world_size: int) -> Iterator[Layout]:
        """Layouts whose degrees and batches divide, at the configuration's tokens a step."""
        base = self.layout(world_size)
        args = base.args
        sequences = self.config.training.global_batch_size
        sequences = base.sequences_per_step if sequences == -1 else sequences
        for pp in _divisors(world_size, args.n_layers):
            for tp in (d for d in _divisors(args.n_heads, self.hardware.ranks_per_node) if args.n_kv_heads % d == 0):
                if world_size % (pp * tp * base.cp) or args.ffn_dim % tp or base.seq_len % (tp * base.cp):
                    continue
                data = world_size // (pp * tp * base.cp)
                for ep in _divisors(args.num_experts, args.num_experts) if args.num_experts else (1,):
                    if (data * base.cp * tp) % ep or sequences % data:
                        continue
                    degrees = base.changed(pp=pp, tp=tp, ep=ep)
                    yield from self._variants(degrees, data, sequences // data)

    def _variants(self, degrees: Layout, data: int, per_rank: int) -> Iterator[Layout]:
        """Micro-batches, schedules, shardings and checkpointing for given degrees."""
        for size in MICRO_BATCHES:
            if per_rank % size:
                continue
            count = per_rank // size
            for schedule, virtual in self._schedules(degrees, count):
                for sharding, replicate in self._shardings(degrees, data):
                    for ac in ("none", "selective", "full"):
                        layout = degrees.changed(
                            micro_batch=size,
                            num_micro_batches=count,
                            passes=1 if degrees.pp > 1 else count,
                            schedule=schedule,
                            stages_per_rank=virtual,
                            sharding=sharding,
                            dp_replicate=replicate,
                            dp_shard=data // replicate,
                            ac=ac,
                        )
                        if degrees.pp == 1 or _fills(layout):
                            yield layout

    def _schedules(self, degrees: Layout, count: int) -> Iterator[tuple[str, int]]:
        if degrees.pp == 1:
            yield degrees.schedule, 1
            return
        if count < degrees.pp:  # the trainer refuses fewer micro-batches than stages
            return
        for schedule in SINGLE_STAGE:
            yield schedule, 1
        if count % max(1, count // degrees.pp) == 0:
            for virtual in VIRTUAL_STAGES:
                if degrees.pp * virtual <= degrees.args.n_layers:
                    yield "Interleaved1F1B", virtual
        if not degrees.args.num_experts and not degrees.compiled:
            yield "ZBVZeroBubble", 2

    def _shardings(self, degrees: Layout, data: int) -> Iterator[tuple[str, int]]:
        yield "epso", 1
        if degrees.ep > 1 and degrees.tp == 1:
            yield "so", 1
        for replicate in _divisors(data, data):
            shard = data // replicate
            inside = shard * degrees.cp * degrees.tp
            # All ranks, or copies of one to eight nodes.
            if inside % degrees.ep == 0 and (replicate == 1 or inside in _node_sizes(self.hardware)):
                yield "fsdp", replicate

    def estimate(self, layout: Layout) -> float:
        """Seconds of a step, roughly and fast: even stages, the pipeline's fill, one rank's data messages."""
        key = (layout.ep, layout.tp, layout.micro_batch)
        if key not in self._blocks:
            block = block_time(self.memory, layout, self.hardware, self.imbalance)
            self._blocks[key] = (block, head_time(self.memory, layout, self.hardware))
        block, head = self._blocks[key]
        forward, backward = block.compute + block.messages, block.backward(layout.ac)
        blocks = layout.args.n_layers / layout.pp
        # The last stage has the head and fewer blocks.
        less = layout.last_less if layout.pp > 1 else 0
        slowest = max(blocks * (forward + backward), (blocks - less) * (forward + backward) + head)
        # The last rank starts after, and ends before, one micro-batch's pass through the other ranks' stages.
        fill = (layout.pp - 1) / layout.stages_per_rank * blocks * (forward + backward)
        windows = (blocks * forward, blocks * backward)
        exposed, _ = data_messages(self.memory, layout, self.hardware, layout.pp // 2, windows, True)
        return slowest * layout.num_micro_batches + fill + exposed

    def search(
        self, world_size: int, keep: int, progress: Callable[[int, int], None] | None = None
    ) -> tuple[list[Plan], int]:
        """The fastest layouts that fit.

        Layouts are planned in the order of :meth:`estimate`, until the estimates of the rest exceed the slowest one
        found; estimates are nearly always below what the plan then says.

        Args:
            world_size: ranks.
            keep: layouts to return.
            progress: called with (layouts looked at, all layouts).

        Returns:
            Plans, fastest first; and the number of layouts that were considered.
        """
        found: list[Plan] = []
        estimated: list[tuple[float, int, Layout]] = []
        for layout in self.candidates(world_size):
            with suppress(ValueError):  # experts that FSDP cannot cut
                estimated.append((self.estimate(layout), len(estimated), layout))
        estimated.sort()
        for position, (seconds, _, layout) in enumerate(estimated):
            if progress is not None:
                progress(position, len(estimated))
            if len(found) == keep and seconds > found[-1].time.seconds:
                break
            try:
                if not self.memory.fits(layout, self.hardware.usable_bytes):
                    continue
                found.append(self.plan(layout))
            except ValueError:  # experts that FSDP cannot cut on one of the stages
                continue
            found = sorted(found, key=lambda p: p.time.seconds)[:keep]
        return found, len(estimated)

    def nearest(self, world_size: int, wanted: Layout) -> Plan | None:
        """The layout most like ``wanted`` that divides and fits; None if there is none."""
        for layout in sorted(self.candidates(world_size), key=lambda other: _distance(wanted, other)):
            try:
                if self.memory.fits(layout, self.hardware.usable_bytes):
                    return self.plan(layout)
            except ValueError:
                continue
        return None


def _divisors(n: int, largest: int) -> list[int]:
    return [d for d in range(1, min(n, largest) + 1) if n % d == 0]


def _node_sizes(hardware: Hardware) -> set[int]:
    return {hardware.ranks_per_node * 2**i for i in range(4)}


def _fills(layout: Layout) -> bool:
    """Whether torchtitan makes these stages, each has a layer, and the schedule takes so many micro-batches."""
    layers = layout.args.n_layers + layout.first_less + layout.last_less
    if layout.layers_per_stage and math.ceil(layers / layout.layers_per_stage) != layout.num_stages:
        return False
    try:
        orders(layout.schedule, layout.pp, layout.stages_per_rank, layout.num_micro_batches)
        return all(layout.layers_of(stage) for stage in range(layout.num_stages))
    except ValueError:
        return False


def _distance(wanted: Layout, other: Layout) -> float:
    """How much two layouts differ: factors between degrees, and settings that change."""
    degrees = ("pp", "ep", "tp", "micro_batch")
    far = sum(abs(math.log2(getattr(other, d) / max(1, getattr(wanted, d)))) for d in degrees)
    far += 0.5 * (other.ac != wanted.ac) + 0.75 * (other.sharding != wanted.sharding)
    replicas = 0.1 * abs(math.log2(other.dp_replicate / max(1, wanted.dp_replicate)))
    same_schedule = other.pp == 1 or (other.schedule, other.stages_per_rank) == (
        wanted.schedule,
        wanted.stages_per_rank,
    )
    return far + replicas + 0.5 * (not same_schedule)
