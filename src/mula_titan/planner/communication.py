"""Messages of a training step: which collective, over which ranks and links, how many bytes."""

from dataclasses import dataclass

from mula_titan.planner.hardware import Hardware
from mula_titan.planner.layout import Group, Layout
from mula_titan.planner.memory import MemoryModel
from mula_titan.planner.sharded import BYTES, Message


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One kind of collective of a rank in a whole step."""

    purpose: str
    """``gradients``, ``parameters``, ``norm``, ``experts``, ``tensor`` or ``pipeline``."""
    kind: str
    group: Group
    bytes: float
    """Bytes that come out of gathers or go into reductions; that the rank sends in the others."""
    count: float
    seconds: float
    """If nothing else ran at the same time."""


def purpose_of(message: Message) -> str:
    """What a message of the optimizer or of FSDP is for."""
    if message.kind == "all_gather":
        return "parameters"
    return "norm" if message.kind == "all_reduce" and message.axis == "stage" else "gradients"


def boundary_bytes(layout: Layout) -> float:
    """What a rank sends to the next pipeline stage for one micro-batch."""
    parts = layout.tp if layout.sequence_parallel else 1
    return layout.tokens * layout.args.dim * BYTES[layout.param_dtype] / parts


def block_messages(layout: Layout, imbalance: float) -> list[tuple[str, str, str, float, float]]:
    """(purpose, kind, axis, bytes, count) of one block's forward for one micro-batch.

    The backward has the same, with gathers and reductions in each other's place.
    """
    args, size = layout.args, BYTES[layout.param_dtype]
    found: list[tuple[str, str, str, float, float]] = []
    hidden = layout.tokens * args.dim * size
    if layout.tp > 1:
        # Attention and the feed-forward each gather the sequence and reduce it; experts of an expert group don't.
        times = 1 if layout.ep > 1 else 2
        if layout.sequence_parallel:
            found += [("tensor", kind, "tp", times * hidden, times) for kind in ("all_gather", "reduce_scatter")]
        else:
            found.append(("tensor", "all_reduce", "tp", times * hidden, times))
    if layout.ep > 1:
        tokens = layout.tokens // layout.tp
        hidden = tokens * args.dim * size
        if layout.dispatch == "all_gather":
            choices = tokens * layout.ep * args.top_k * (8 + 4)  # ids int64, scores float32
            found.append(("experts", "all_gather", "ep", hidden * layout.ep + choices, 3))
            found.append(("experts", "reduce_scatter", "ep", hidden * layout.ep, 1))
        else:
            found.append(("experts", "all_to_all", "ep", 2 * hidden * args.top_k * imbalance, 2))
    return found


def step_traffic(
    model: MemoryModel, layout: Layout, hardware: Hardware, pp_rank: int, imbalance: float = 1.0
) -> list[Traffic]:
    """All messages of a pipeline rank in a step."""
    found = []

    def add(purpose: str, kind: str, axis: str, size: float, count: float) -> None:
        group = layout.group(axis, hardware.ranks_per_node)
        if group.size > 1:
            seconds = hardware.collective(kind, size, group, count)
            found.append(Traffic(purpose=purpose, kind=kind, group=group, bytes=size, count=count, seconds=seconds))

    _, messages = model.sharded(layout, pp_rank)
    for m in messages:
        times = layout.num_micro_batches if m.per_pass else 1
        add(purpose_of(m), m.kind, m.axis, m.bytes * times, m.count * times)
    blocks = sum(layout.layers_of(stage) for stage in layout.stages_of(pp_rank))
    # Forward and backward; full recomputation runs the forward's again.
    passes = (3 if layout.ac == "full" else 2) * blocks * layout.num_micro_batches
    for purpose, kind, axis, size, count in block_messages(layout, imbalance):
        add(purpose, kind, axis, size * passes, count * passes)
    if layout.pp > 1:
        sent = sum((s > 0) + (s < layout.num_stages - 1) for s in layout.stages_of(pp_rank)) * layout.num_micro_batches
        add("pipeline", "send", "pp", sent * boundary_bytes(layout), sent)
    return found
