"""Seconds of a training step: compute by measured curves, messages by the link model, overlap, pipeline."""

from dataclasses import dataclass, field

from mula_titan.planner.communication import block_messages, boundary_bytes, purpose_of
from mula_titan.planner.hardware import Hardware
from mula_titan.planner.layout import Layout
from mula_titan.planner.memory import MemoryModel
from mula_titan.planner.pipeline import orders, simulate
from mula_titan.planner.sharded import FP32


@dataclass(frozen=True, kw_only=True)
class BlockTime:
    """Seconds of one transformer block for one micro-batch, forward."""

    dense: float
    attention: float
    experts: float
    elementwise: float
    expert_messages: float
    tensor_messages: float

    @property
    def compute(self) -> float:
        """All but messages."""
        return self.dense + self.attention + self.experts + self.elementwise

    @property
    def messages(self) -> float:
        """What nothing runs beside: the next operation needs it."""
        return self.expert_messages + self.tensor_messages

    def backward(self, ac: str) -> float:
        """Backward, recomputation included; attention's is 2.5 forwards (FlashAttention-2, arXiv 2307.08691)."""
        seconds = 2 * (self.dense + self.experts + self.elementwise) + 2.5 * self.attention + self.messages
        if ac == "full":
            seconds += self.compute + self.messages
        elif ac == "selective":
            seconds += self.elementwise  # products are saved
        return seconds


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step and what they consist of, for the slowest pipeline rank."""

    seconds: float
    pipeline: float
    """Forward and backward of all micro-batches, bubble included."""
    bubble: float
    """Idle share of the pipeline."""
    exposed_data: float
    """Gradients, parameters and FSDP's gathers that nothing hides."""
    update: float
    """The optimizer's arithmetic."""
    hidden_data: float
    """Seconds of messages that run beside compute."""
    tokens_per_second: float
    """All ranks together."""
    mfu: float
    """Model FLOPs (no recomputation) over the peak of the hardware file."""
    block: BlockTime
    parts: dict[str, float] = field(default_factory=dict)
    """The step by kind of work, for the busiest pipeline rank; they add up to ``seconds``."""


def block_time(model: MemoryModel, layout: Layout, hardware: Hardware, imbalance: float = 1.0) -> BlockTime:
    """Forward seconds of a block.

    Args:
        model: for the memory traffic of elementwise operations, counted.
        layout: the layout.
        hardware: the machine.
        imbalance: rows of the busiest expert rank over the mean; all ranks of the group wait for it.
    """
    args, tokens, tp = layout.args, layout.tokens, layout.tp
    head_width = args.n_heads * args.head_dim
    kv_width = args.n_kv_heads * args.head_dim
    projections = args.dim * (2 * head_width + 2 * kv_width)
    smallest = min(tokens, args.dim, head_width // tp)
    if not args.num_experts:
        projections += 3 * args.dim * args.ffn_dim
        smallest = min(smallest, args.ffn_dim // tp)
    dense = hardware.product(2 * tokens * projections / tp, smallest)
    experts = 0.0
    if args.num_experts:
        dense += hardware.product(2 * tokens * args.dim * args.num_experts, min(args.num_experts, tokens))
        rows = tokens * args.top_k / (tp if layout.ep > 1 else 1)  # arriving on this rank when balanced
        local = args.num_experts // layout.ep
        slowest = imbalance if layout.ep > 1 else 1.0
        width = args.ffn_dim / (1 if layout.ep > 1 else tp)
        experts = hardware.expert_products(6 * rows * slowest * args.dim * width, rows / local)
    causal = 2 * layout.micro_batch * (layout.seq_len**2 / layout.cp) * head_width / tp  # half of both products
    moved = model.activations.block(layout.changed(ac="none")).moved * (hardware.fused if layout.compiled else 1.0)
    messages = {"experts": 0.0, "tensor": 0.0}
    for purpose, kind, axis, size, count in block_messages(layout, imbalance):
        group = layout.group(axis, hardware.ranks_per_node)
        messages[purpose] += hardware.collective(kind, size, group, count)
    return BlockTime(
        dense=dense,
        attention=hardware.attention_products(causal),
        experts=experts,
        elementwise=hardware.memory(moved / 3),
        expert_messages=messages["experts"],
        tensor_messages=messages["tensor"],
    )


def head_time(model: MemoryModel, layout: Layout, hardware: Hardware) -> float:
    """Seconds of norm, output head and loss for one micro-batch, forward and backward."""
    args = layout.args
    flops = 6 * layout.tokens * args.dim * args.vocab_size / layout.tp
    chunk = max(1, layout.tokens // layout.loss_chunks)
    return hardware.product(flops, min(chunk, args.dim)) + hardware.memory(model.activations.head(layout).moved)


def step_time(
    model: MemoryModel,
    layout: Layout,
    hardware: Hardware,
    *,
    imbalance: float = 1.0,
    overlap: bool = True,
) -> StepTime:
    """Seconds of an optimizer step.

    Overlap: FSDP's gathers and reductions run beside neighbouring blocks' compute; the optimizer's reductions beside
    the last micro-batch's backward but for the last bucket, its gathers beside the update and the next forward but for
    the first bucket. Messages of expert and tensor parallelism and of the pipeline hide behind nothing.

    Args:
        model: of the configuration.
        layout: the layout.
        hardware: the machine.
        imbalance: rows of the busiest expert rank over the mean.
        overlap: False: the optimizer's messages hide behind nothing, as in the paper's library.
    """
    block = block_time(model, layout, hardware, imbalance)
    head = head_time(model, layout, hardware)
    forward, backward = [], []
    for stage in range(layout.num_stages):
        blocks, last = layout.layers_of(stage), layout.stages[stage][-1] == "lm_head"
        # The chunked loss runs its backward inside the forward; either way a third is the forward's.
        forward.append(blocks * (block.compute + block.messages) + (head / 3 if last else 0.0))
        backward.append(blocks * block.backward(layout.ac) + (2 * head / 3 if last else 0.0))
    if layout.pp > 1:
        group = layout.group("pp", hardware.ranks_per_node)
        per_pass = layout.micro_batches_per_pass
        order = orders(layout.schedule, layout.pp, layout.stages_per_rank, per_pass)
        run = simulate(order, forward, backward, hardware.collective("send", boundary_bytes(layout), group))
        pipeline, bubble = run.seconds * layout.passes, run.bubble
        busiest = max(range(layout.pp), key=run.busy.__getitem__)
    else:
        pipeline, bubble, busiest = layout.num_micro_batches * (forward[0] + backward[0]), 0.0, 0
    exposed = hidden_data = update = 0.0
    for rank in range(layout.pp):
        stages = layout.stages_of(rank)
        windows = (sum(forward[s] for s in stages), sum(backward[s] for s in stages))
        shown, covered = data_messages(model, layout, hardware, rank, windows, overlap)
        seconds = _update_seconds(model, layout, hardware, rank)
        if shown + seconds >= exposed + update:
            exposed, hidden_data, update = shown, covered, seconds
    total = pipeline + exposed + update
    flops = model_flops(layout) * layout.tokens_per_step
    parts = _parts(layout, block, head, layout.stages_of(busiest))
    parts["bubble"] = pipeline - sum(parts.values())
    parts["data messages, exposed"], parts["update"] = exposed, update
    return StepTime(
        seconds=total,
        pipeline=pipeline,
        bubble=bubble,
        exposed_data=exposed,
        update=update,
        hidden_data=hidden_data,
        tokens_per_second=layout.tokens_per_step / total,
        mfu=flops / total / (layout.world_size * hardware.peak_tflops * 1e12),
        block=block,
        parts=parts,
    )


def _parts(layout: Layout, block: BlockTime, head: float, stages: tuple[int, ...]) -> dict[str, float]:
    """Seconds of a rank's work in all micro-batches, by kind."""
    times = layout.num_micro_batches * sum(layout.layers_of(stage) for stage in stages)
    again = layout.ac == "full"
    has_head = any(layout.stages[stage][-1] == "lm_head" for stage in stages)
    return {
        "dense products": times * (3 + again) * block.dense,
        "attention": times * (3.5 + again) * block.attention,
        "experts": times * (3 + again) * block.experts,
        "elementwise": times * (3 + (layout.ac != "none")) * block.elementwise,
        "expert messages": times * (2 + again) * block.expert_messages,
        "tensor messages": times * (2 + again) * block.tensor_messages,
        "head and loss": layout.num_micro_batches * head * has_head,
    }


def model_flops(layout: Layout) -> float:
    """Forward and backward FLOPs a token, as ``MulaModel.Config.get_nparams_and_flops`` counts them."""
    args = layout.args
    width, kv_width = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    block = args.dim * (2 * width + 2 * kv_width)
    ffn = 3 * args.dim * args.ffn_dim
    block += args.top_k * ffn + args.dim * args.num_experts if args.num_experts else ffn
    return 6 * (args.n_layers * block + args.dim * args.vocab_size) + 6 * args.n_layers * args.dim * layout.seq_len


def data_messages(
    model: MemoryModel,
    layout: Layout,
    hardware: Hardware,
    pp_rank: int,
    windows: tuple[float, float],
    overlap: bool,
) -> tuple[float, float]:
    """(exposed, hidden) seconds of data-parallel messages in a step; windows: a micro-batch's forward and backward."""
    _, messages = model.sharded(layout, pp_rank)
    exposed = total = 0.0
    for m in messages:
        group = layout.group(m.axis, hardware.ranks_per_node)
        seconds = hardware.collective(m.kind, m.bytes, group, m.count)
        purpose, times = purpose_of(m), layout.num_micro_batches if m.per_pass else 1
        total += seconds * times
        if not overlap or purpose == "norm" or (m.kind == "all_reduce" and layout.sharding == "so"):
            exposed += seconds * times
    if not overlap:
        return exposed, 0.0
    kinds = {"gradients": windows[1], "parameters": windows[0]}
    for purpose, window in kinds.items():
        own = [m for m in messages if purpose_of(m) == purpose and not (m.kind == "all_reduce" and m.axis == "ep")]
        if not own:
            continue
        times = layout.num_micro_batches if own[0].per_pass else 1
        each = [
            hardware.collective(m.kind, m.bytes, layout.group(m.axis, hardware.ranks_per_node), m.count) for m in own
        ]
        seconds, largest = sum(each), max(t / max(1.0, m.count) for t, m in zip(each, own, strict=True))
        if own[0].per_pass and purpose == "parameters":
            window = windows[0] + windows[1]  # gathered for the forward and again for the backward
        exposed += times * max(min(largest, seconds), seconds - window)
    return exposed, max(0.0, total - exposed)


def _update_seconds(model: MemoryModel, layout: Layout, hardware: Hardware, pp_rank: int) -> float:
    """Norm, clipping, AdamW and cast on this rank's shard: 46 bytes an element (benchmarks/optimizer.py ``update``)."""
    held, _ = model.sharded(layout, pp_rank)
    if layout.sharding == "fsdp":
        return hardware.memory(held.states / (2 * FP32) * 40)
    return hardware.memory(held.states / (3 * FP32) * 46)
