"""Peak memory of each pipeline rank, by kind."""

from dataclasses import dataclass
from typing import Any

from mula_titan.planner.activations import Activations, Cost
from mula_titan.planner.layout import Layout
from mula_titan.planner.parameters import Inventory
from mula_titan.planner.pipeline import in_flight, orders, peak_bytes
from mula_titan.planner.sharded import BYTES, Held, Message, sharded


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank of a pipeline stage at the worst moment of a step."""

    pp_rank: int
    parameters: float
    gradients: float
    states: float
    buffers: float
    activations: float
    """Held for backward at that moment, over all micro-batches in flight."""
    working: float
    """What the running operation needs on top: recomputation, gradients of activations, logits, kernels' scratch."""
    in_flight: int
    """Micro-batches (times the rank's virtual stages) held at once."""

    @property
    def peak(self) -> float:
        """Sum of all."""
        return self.parameters + self.gradients + self.states + self.buffers + self.activations + self.working

    def kinds(self) -> dict[str, float]:
        """Bytes by kind, without what identifies the rank."""
        names = ("parameters", "gradients", "states", "buffers", "activations", "working")
        return {name: getattr(self, name) for name in names}


class MemoryModel:
    """Memory of layouts of one configuration; parts are counted once and kept."""

    def __init__(self, config: Any, *, device_type: str, imbalance: float = 1.0) -> None:
        """A model of a configuration's memory.

        Args:
            config: a ``MulaTrainer.Config``.
            device_type: ``cuda``, ``xpu`` or ``cpu``.
            imbalance: rows of the busiest expert rank over the mean.
        """
        self._config = config
        self.activations = Activations(config, device_type=device_type, imbalance=imbalance)
        self._inventories: dict[tuple[bool, bool], Inventory] = {}
        self._sharded: dict[Any, tuple[Held, list[Message]]] = {}

    def inventory(self, layout: Layout) -> Inventory:
        """The parameters, with the splits of this layout's kinds of parallelism."""
        key = (layout.ep > 1, layout.tp > 1)
        if key not in self._inventories:
            self._inventories[key] = Inventory(self._config, ep=key[0], tp=key[1])
        return self._inventories[key]

    def sharded(self, layout: Layout, pp_rank: int) -> tuple[Held, list[Message]]:
        """See :func:`mula_titan.planner.sharded.sharded`."""
        key = (
            layout.pp,
            layout.num_stages,
            layout.schedule == "ZBVZeroBubble",
            layout.dp_replicate,
            layout.dp_shard,
            layout.cp,
            layout.tp,
            layout.ep,
            layout.sharding,
            layout.grad_dtype,
            (layout.first_less, layout.last_less),
            pp_rank,
        )
        if key not in self._sharded:
            self._sharded[key] = sharded(self.inventory(layout), layout, pp_rank)
        return self._sharded[key]

    def rank(self, layout: Layout, pp_rank: int) -> RankMemory:
        """Peak of a pipeline rank.

        Raises:
            ValueError: a layout that cannot be built.
        """
        held, _ = self.sharded(layout, pp_rank)
        stages = layout.stages_of(pp_rank)
        costs = {stage: self.stage_cost(layout, stage) for stage in stages}
        if layout.pp == 1:
            (cost,) = costs.values()
            peak, live, flight = max(cost.forward_peak, cost.backward_peak), cost.held, 1
        else:
            per_pass = layout.micro_batches_per_pass
            actions = orders(layout.schedule, layout.pp, layout.stages_per_rank, per_pass)[pp_rank]
            peak = peak_bytes(
                actions,
                {s: c.held for s, c in costs.items()},
                {s: c.forward_peak for s, c in costs.items()},
                {s: c.backward_peak for s, c in costs.items()},
            )
            flight = in_flight(layout.schedule, layout.pp, layout.stages_per_rank, per_pass, pp_rank)
            bytes_held = {s: c.held for s, c in costs.items()}
            live = peak_bytes(actions, bytes_held, bytes_held, bytes_held)
        return RankMemory(
            pp_rank=pp_rank,
            parameters=held.parameters,
            gradients=held.gradients,
            states=held.states,
            buffers=held.buffers,
            activations=live,
            working=max(0.0, peak - live),
            in_flight=flight,
        )

    def stage_cost(self, layout: Layout, stage: int) -> Cost:
        """Activations of one micro-batch on a stage."""
        args, size = layout.args, BYTES[layout.param_dtype]
        blocks = layout.layers_of(stage)
        block = self.activations.block(layout)
        divisor = layout.tp if layout.sequence_parallel else 1
        hidden = layout.tokens * args.dim * size / divisor
        tokens = layout.tokens * (8 + 8 + 8 + 4)  # ids, labels, positions (int64), weights (float32)
        if args.document_mask and args.attention == "sdpa":
            tokens += layout.micro_batch * (layout.seq_len // layout.cp) ** 2
        held = blocks * block.held + hidden + tokens  # the first block's input: an embedding, or received
        first = (blocks - 1) * block.held + hidden + tokens if blocks else held
        forward, backward = first + block.forward_peak, first + block.backward_peak
        if layout.stages[stage][-1] == "lm_head":
            head = self.activations.head(layout)
            forward = max(forward, held + head.forward_peak)
            backward = max(backward, held + head.backward_peak)
            held += head.held
            backward = max(backward, held)
        # The gradient that comes from the next stage, or goes to the previous one.
        return Cost(held=held, forward_peak=forward, backward_peak=backward + hidden, moved=0.0)

    def fits(self, layout: Layout, usable: float) -> bool:
        """Whether no rank's peak exceeds so many bytes; stops at the first that does."""
        return all(self.rank(layout, r).peak <= usable for r in range(layout.pp))

    def worst(self, layout: Layout) -> RankMemory:
        """The pipeline rank with the highest peak."""
        return max((self.rank(layout, r) for r in range(layout.pp)), key=lambda m: m.peak)
