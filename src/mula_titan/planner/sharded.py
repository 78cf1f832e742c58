"""What a rank holds and sends because of the optimizer's sharding: bytes by formula, equal to :mod:`.count`'s.

The planning of buckets is the optimizer's own (:func:`plan_buckets`); FSDP2's padded shards follow its rules.
"""

import math
from dataclasses import dataclass, replace

from mula_titan.components.optimizer_sharding.layout import BucketLayout, plan_buckets
from mula_titan.planner.layout import Layout
from mula_titan.planner.parameters import Inventory, Parameter

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP32 = 4


@dataclass(frozen=True)
class Held:
    """Bytes of one rank that stay allocated during a step."""

    parameters: float
    gradients: float
    states: float
    buffers: float
    """Optimizer buckets' shards; of FSDP: gathered parameters and unreduced gradients."""
    ideal_states: float
    """12 bytes an element over its owners, without padding; fsdp: 8, since its fp32 weights are parameters."""
    host: float = 0.0
    """In host memory instead of the device's."""

    @property
    def total(self) -> float:
        """Sum of all on the device."""
        return self.parameters + self.gradients + self.states + self.buffers

    def offloaded(self, *kinds: str) -> "Held":
        """The same with these kinds in host memory."""
        host = sum(getattr(self, kind) for kind in kinds)
        return replace(self, **dict.fromkeys(kinds, 0.0), host=host)


@dataclass(frozen=True)
class Message:
    """One kind of collective of the optimizer or of FSDP in a step."""

    kind: str
    """``reduce_scatter``, ``all_gather`` or ``all_reduce``."""
    axis: str
    """Group, as :meth:`Layout.group` names it."""
    bytes: float
    """What goes into the reduction or comes out of the gather, all ranks' parts together; of one step."""
    count: float
    """Collectives of one step."""
    per_pass: bool = False
    """Repeated for each micro-batch (FSDP without a pipeline)."""


def sharded(inventory: Inventory, layout: Layout, pp_rank: int) -> tuple[Held, list[Message]]:
    """Bytes held and messages of a pipeline rank.

    Raises:
        ValueError: FSDP2 cannot cut the experts evenly.
    """
    parts = [list(inventory.of_stage(layout.stages[stage])) for stage in layout.stages_of(pp_rank)]
    if layout.sharding == "fsdp":
        held, messages = fsdp_held(parts, inventory, layout)
        kinds = ["parameters", "gradients", "states"]
    else:
        held, messages = buckets_held(parts, inventory, layout)
        kinds = ["states"]
    return held.offloaded(*kinds) if layout.is_offloaded else held, messages


# -- so, epso ---------------------------------------------------------------------------------------------------------


def owners_axis(kind: str, layout: Layout) -> str:
    """The group over which parameters of a kind are split."""
    if kind == "expert" or (layout.sharding == "so" and layout.ep > 1):
        return "expert_data"
    return "data" if kind == "split" else "stage"


def bucket_layouts(parts: list[list[Parameter]], inventory: Inventory, layout: Layout) -> list[BucketLayout]:
    """The optimizer's buckets; their key is (kind of parameter, model part and parameter group)."""
    order = [(part, p) for part, params in enumerate(parts) for p in params][::-1]
    return plan_buckets(
        [
            (p.name, math.prod(p.local_shape(layout)), (p.kind(layout), (part, inventory.group_of(p))))
            for part, p in order
        ],
        lambda key: layout.group(owners_axis(key[0], layout), 1).size,
        int(layout.bucket_mib * 2**20) // BYTES[layout.param_dtype],
    )


def buckets_held(parts: list[list[Parameter]], inventory: Inventory, layout: Layout) -> tuple[Held, list[Message]]:
    """SO and EPSO: whole parameters and gradients, shards of the states."""
    param, grad = BYTES[layout.param_dtype], BYTES[layout.grad_dtype]
    held = dict.fromkeys(("parameters", "gradients", "states", "buffers", "ideal_states"), 0.0)
    sums: dict[tuple[str, str], list[float]] = {}

    def add(kind: str, axis: str, size: float) -> None:
        total = sums.setdefault((kind, axis), [0.0, 0])
        total[0] += size
        total[1] += 1

    for bucket in bucket_layouts(parts, inventory, layout):
        kind = bucket.key[0]
        axis, shards, size = owners_axis(kind, layout), bucket.num_shards, bucket.shard_numel
        is_sent = param == FP32 and not layout.is_offloaded  # the master weights themselves are
        master_is_param = shards == 1 and is_sent
        held["parameters"] += bucket.numel * param
        held["gradients"] += bucket.numel * grad
        held["states"] += size * FP32 * (2 if master_is_param else 3)
        held["ideal_states"] += 12 * sum(slot.numel for slot in bucket.slots) / shards
        if shards > 1:
            held["buffers"] += size * grad + (0 if is_sent else size * param)
            add("reduce_scatter", axis, bucket.numel * grad)
            add("all_gather", axis, bucket.numel * param)
        if kind == "replicated" and layout.sharding == "so" and layout.ep > 1:
            add("all_reduce", "ep", size * grad)
    add("all_reduce", "stage", FP32)  # the gradient norm
    messages = [Message(kind, axis, size, count) for (kind, axis), (size, count) in sums.items()]
    return Held(**held), messages


# -- fsdp -------------------------------------------------------------------------------------------------------------


def fsdp_held(parts: list[list[Parameter]], inventory: Inventory, layout: Layout) -> tuple[Held, list[Message]]:
    """FSDP2: fp32 shards; whole bf16 parameters and fp32 gradients while they are needed.

    Without a pipeline two blocks are whole at a time (one is prefetched), and one block's gradients, and parameters are
    gathered for the forward and for the backward; with a pipeline the stage stays whole over the micro-batches.
    """
    param, own = BYTES[layout.param_dtype], BYTES[layout.dtype]
    is_cast = layout.dtype != layout.param_dtype
    if layout.dp_replicate * layout.fsdp == 1 and not (is_cast or layout.ep > 1 or layout.is_offloaded):
        return _plain(parts, layout), []
    shard = whole = copies = 0
    ideal = 0.0
    blocks: dict[str, int] = {}
    by_axis: dict[str, list] = {}
    for p in (p for part in parts for p in part):
        axis = "efsdp" if p.kind(layout) == "expert" else "fsdp"
        ranks = layout.efsdp if axis == "efsdp" else layout.fsdp
        local = p.local_shape(layout)
        numel = fsdp_shard_numel(p, local, ranks, inventory, layout)
        shard += numel
        whole += numel * ranks
        ideal += 8 * math.prod(local) / ranks
        copies += numel if layout.dp_replicate > 1 else 0
        block = ".".join(p.name.split(".")[:2]) if p.name.startswith("layers.") else p.name
        blocks[block] = blocks.get(block, 0) + numel * ranks
        entry = by_axis.setdefault(axis, [0, set()])
        entry[0] += numel * ranks
        entry[1].add(block)
    largest = sorted(blocks.values())[-2:]
    live = whole if layout.pp > 1 else sum(largest)
    live_gradients = whole if layout.pp > 1 else largest[-1]
    gathers = 1 if layout.pp > 1 else 2
    messages = []
    for axis, (numel, names) in by_axis.items():
        per_pass = layout.pp == 1
        messages.append(Message("reduce_scatter", axis, numel * FP32, len(names), per_pass))
        messages.append(Message("all_gather", axis, gathers * numel * param, gathers * len(names), per_pass))
    if layout.dp_replicate > 1:
        count = sum(len(names) for _, names in by_axis.values())
        messages.append(Message("all_reduce", "dp_replicate", copies * FP32, count, layout.pp == 1))
    held = Held(
        parameters=shard * own,
        gradients=shard * own,
        states=shard * 2 * own,
        buffers=live * param + live_gradients * FP32,
        ideal_states=ideal * own / FP32,
    )
    return held, messages


def _plain(parts: list[list[Parameter]], layout: Layout) -> Held:
    """One data rank without a cast: plain parameters, as ``parallelize_mula`` leaves them."""
    size = sum(math.prod(p.local_shape(layout)) for part in parts for p in part) * BYTES[layout.dtype]
    return Held(parameters=size, gradients=size, states=2 * size, buffers=0.0, ideal_states=2.0 * size)


def fsdp_shard_numel(p: Parameter, local: tuple[int, ...], ranks: int, inventory: Inventory, layout: Layout) -> int:
    """Elements of the first rank's shard: ``ceil(dim / ranks)`` rows; experts' dimension by torchtitan's choice.

    Raises:
        ValueError: a dimension other than the first doesn't divide (FSDP2 refuses it too).
    """
    dim = 0
    if p.is_expert:
        ep_ranks = layout.efsdp * layout.ep if layout.ep > 1 else layout.dp_replicate * layout.fsdp
        dim = 1 if ep_ranks > inventory.num_experts else 0
        if dim == 1 and local[1] % ranks:
            raise ValueError(
                f"optimizer.sharding = 'fsdp' cuts the experts' width {local[1]} over {ranks} ranks, which doesn't "
                "divide; raise parallelism.data_parallel_replicate_degree or expert_parallel_degree, or set "
                "optimizer.sharding = 'epso'"
            )
    return -(-local[dim] // ranks) * math.prod(local) // local[dim]
