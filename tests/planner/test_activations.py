"""Activations and peaks, against peaks that were measured: on an H200, and on this CPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torchtitan.components.loss import IGNORE_INDEX

from mula_titan.planner.activations import Activations, LiveBytes, kernel_scratch, padding_bytes
from mula_titan.planner.layout import Layout
from mula_titan.planner.memory import MemoryModel
from tests.planner.cases import make_config

GIB = 2**30


def test_the_counting_gives_the_peak_measured_on_an_h200() -> None:
    """transformers' OLMoE, 8 layers, 16384 tokens, bf16 throughout, uncompiled: 54.5 GiB were measured."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(num_hidden_layers=8, num_key_value_heads=16, vocab_size=50304, use_cache=False)
    assert (config.hidden_size, config.intermediate_size, config.num_experts) == (2048, 2048, 64)
    config.intermediate_size, config.num_experts_per_tok = 1024, 8
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = OlmoeForCausalLM._from_config(
                config, attn_implementation="sdpa", experts_implementation="grouped_mm"
            )
        finally:
            torch.set_default_dtype(torch.float32)
        model.train()
        numel = sum(p.numel() for p in model.parameters())
        assert numel == pytest.approx(3.563e9, rel=1e-3)
        mode = LiveBytes()
        mode.ignore([*model.parameters(), *model.buffers()])
        tokens = torch.zeros(4, 4096, dtype=torch.int64)
        with mode:
            model(input_ids=tokens, labels=tokens).loss.backward()
    peak = mode.peak + 2 * numel * 3  # beside the weights two moments
    assert peak / GIB == pytest.approx(54.5, rel=0.05)


@pytest.mark.parametrize(
    ("tokens", "dim", "ffn", "experts", "top_k", "measured_gib"),
    [(16384, 2048, 1024, 64, 8, 1.67), (8192, 2048, 1024, 96, 8, 1.78), (8192, 3072, 1536, 12, 1, 0.52),
     (8192, 3072, 1536, 20, 1, 0.74)],
)  # fmt: skip
def test_scratch_of_the_expert_kernels(tokens, dim, ffn, experts, top_k, measured_gib) -> None:
    """docs/benchmarks.md: peaks above the inputs of the expert layer, weight gradients included."""
    config = make_config(
        "mula_7b_a1b",
        model__dim=dim,
        model__ffn_dim=ffn,
        model__num_experts=experts,
        model__top_k=top_k,
        training__local_batch_size=tokens // 2048,
        training__seq_len=2048,
    )
    layout = Layout.from_config(config, 1, "cuda")
    rows = tokens * top_k
    weights = 3 * experts * ffn * dim * 2
    saved = rows * 2 * ffn * 2 + padding_bytes(layout, "cuda") + experts * 15 * 2 * ffn * 2
    outputs = 2 * tokens * dim * 2  # the layer's output, or its gradient, and that of its input
    peak = saved + outputs + weights + kernel_scratch(layout, "cuda")
    assert peak / GIB == pytest.approx(measured_gib, rel=0.10)


@pytest.mark.parametrize(
    ("flavor", "mode"), [("mula_debug", "none"), ("mula_debug", "full"), ("mula_debug_dense", "none")]
)
def test_peak_of_a_real_step_on_this_cpu(flavor, mode) -> None:
    """The whole model trained on real tensors under torch's memory tracker, against the planner's sum of parts."""
    config = make_config(flavor, training__seq_len=128, training__local_batch_size=8, model__document_mask=True)
    config.model.load_balance_per_layer = False
    layout = Layout.from_config(config, 1, "cpu").changed(ac=mode)
    expected = MemoryModel(config, device_type="cpu").worst(layout)

    config = layout.applied_to(config)
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    model = spec.model.build()
    model.init_states(buffer_device=None)
    if config.activation_checkpoint is not None:
        config.activation_checkpoint.build(dump_folder="").apply(model)
    loss_fn = config.loss.build(compile_config=config.compile)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, 2048, (8, 128))
    positions = torch.arange(128).expand(8, -1)

    def step() -> None:
        weights = (tokens != IGNORE_INDEX).float() / tokens.numel()
        # The trainer too lets go of the logits before the backward.
        loss = loss_fn(model(tokens, positions=positions, token_weights=weights), tokens, torch.tensor(1024.0))[0]
        loss.backward()

    step()
    optimizer.step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer, tokens, positions)
    optimizer.zero_grad(set_to_none=False)  # as the trainer's accumulation: gradients stay
    with tracker:
        step()
    (measured,) = (device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
    assert expected.peak == pytest.approx(measured, rel=0.10)


def test_checkpointing_keeps_the_block_s_input_and_the_choice_of_experts() -> None:
    config = make_config(training__seq_len=128, training__local_batch_size=8)
    layout = Layout.from_config(config, 1, "cpu")
    activations = Activations(config, device_type="cpu")
    held = {mode: activations.block(layout.changed(ac=mode)).held for mode in ("none", "selective", "full")}
    assert held["full"] < held["selective"] < held["none"]
    tokens, args = 1024, config.model
    hidden, choices = tokens * args.dim * 4, tokens * args.top_k * (8 + 4)  # top-k: ids and values
    assert held["full"] == pytest.approx(hidden + choices, rel=0.02)


def test_expert_parallelism_by_dispatch() -> None:
    config = make_config(
        parallelism__expert_parallel_degree=4, training__seq_len=128, training__local_batch_size=8,
        training__mixed_precision_param="bfloat16",
    )  # fmt: skip
    held = {}
    for dispatch in ("all_gather", "all_to_all"):
        layout = Layout.from_config(config, 4, "cpu").changed(dispatch=dispatch)
        held[dispatch] = Activations(config, device_type="cpu").block(layout).held
    args, tokens = config.model, 1024
    # The gathered tokens' kernels must be ready for all choices of the group: 3 times more rows of gate and up.
    more = 3 * tokens * args.top_k * 2 * args.ffn_dim * 2
    assert held["all_gather"] - held["all_to_all"] == pytest.approx(more, rel=0.35)
    busy = Activations(config, device_type="cpu", imbalance=2.0)
    layout = Layout.from_config(config, 4, "cpu").changed(dispatch="all_to_all")
    assert busy.block(layout).held > held["all_to_all"] + tokens * args.top_k * 2 * args.ffn_dim * 2
