"""Training steps on one device: this project against transformers and stock torchtitan, every row in one run.

    python benchmarks/train_step.py --json steps.json --picture docs/images/train_step.png    # docs/benchmarks.md
    python benchmarks/train_step.py --rows ours hf_compiled --trace traces --memory traces    # where time and memory go
    python benchmarks/train_step.py --full                                                   # all 16 layers of Mula-7B
    python benchmarks/train_step.py --tiny                                                   # a CPU, in minutes

Model: OLMoE's dimensions with 8 layers, 3.56 B parameters; 4 sequences of 4096 tokens a step. Parameters, gradients and
moments are bf16 in all rows but those with "master" in their name. A row is a process of its own. It makes the weights
from the same (seed, name, index), reads the same tokens (the bundled text) through this project's loader, and takes
fused AdamW steps at a constant rate. Ours and torchtitan run their own Trainer's ``train_step``: checks, clipping and
balancing included, which transformers' rows lack. ``ours_plain`` leaves out the auxiliary loss and takes transformers'
weight decay, so that its losses must follow theirs; the run fails if they don't. torchtitan's row is its Qwen3 MoE of
these dimensions (normalised top-k, QK-norm per head), with the attention that is fastest here, so its losses differ.

``step`` is the median over steps that each end with a synchronisation; ``stream`` is the mean of steps in a row without
one. MFU counts 6 FLOPs per active matrix parameter and 6 L S H for causal attention, against the rate of an 8192^3 bf16
product in the same run. Peak memory is what tensors occupied.

Peers need transformers. A machine with torch 2.11, Triton 3.6 and transformers 5.17 is enough for all rows (see
``stand_in_for_newer_torch``) once it has torchtitan==0.3.0 spmd_types==0.2.3 tyro typeguard docstring_parser torchdata
datasets dill multiprocess grain array_record portpicker: 8 MB of wheels.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
TEXT, TOKENIZER = ROOT / "assets/austen/train.jsonl", ROOT / "assets/tokenizer"
LEARNING_RATE = 1e-4
ADAM = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Size:
    """Model and batch."""

    layers: int
    batch: int
    seq_len: int
    changes: dict[str, Any] = field(default_factory=dict)
    backend: str = "inductor"


SIZES = {
    "main": Size(8, 4, 4096),
    "full": Size(16, 4, 4096),
    "tiny": Size(
        2,
        2,
        64,
        {"dim": 64, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 32, "num_experts": 8, "top_k": 2, "vocab_size": 2048},
        backend="aot_eager",
    ),
}


@dataclass(frozen=True)
class Row:
    """One way to train."""

    stack: str
    """ours, hf or titan."""
    text: str
    options: dict[str, Any] = field(default_factory=dict)


MASTER = {"dtype": "float32", "sharding": "so"}
ROWS = {
    "ours": Row("ours", "ours"),
    "ours_plain": Row("ours", "ours, no auxiliary loss", {"plain": True}),
    "ours_master": Row("ours", "ours, fp32 master weights", MASTER),
    "titan": Row("titan", "torchtitan 0.3.0, compiled"),
    "hf_compiled": Row("hf", "transformers grouped_mm, compiled", {"experts": "grouped_mm", "compile": True}),
    "hf_grouped": Row("hf", "transformers grouped_mm", {"experts": "grouped_mm", "compile": False}),
    "hf_loop": Row("hf", "transformers loop", {"experts": "eager", "compile": False}),
    # Choices that "ours" has made, one changed at a time; not run unless named.
    "ours_eager": Row("ours", "ours, not compiled", {"compile": False}),
    "ours_chunked": Row("ours", "ours, cross-entropy in 8 chunks", {"chunked": True}),
    "ours_flex": Row("ours", "ours, FlexAttention", {"attention": "flex"}),
    "ours_graphs": Row("ours", "ours, CUDA graph", {"graphs": True}),
    "ours_master_fsdp": Row("ours", "ours, fp32 weights under FSDP", {"dtype": "float32"}),
    "ours_master_ac": Row("ours", "ours, fp32 master weights, full recomputation", MASTER | {"ac": True}),
}
DEFAULT_ROWS = [name for name in ROWS if not name.startswith("ours_") or name in ("ours_plain", "ours_master")]
FULL_ROWS = ["ours_master", "ours_master_ac"]


def stand_in_for_newer_torch() -> None:
    """What torchtitan 0.3.0 and this project import from torch 2.14 but never call on one rank, in an older torch."""
    import torch.distributed._functional_collectives as collectives
    import torch.distributed.fsdp as fsdp

    if not hasattr(fsdp, "DataParallelMeshDims"):
        fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
    for name in ("all_gather_single", "all_gather_single_autograd", "reduce_scatter_single_autograd"):
        if not hasattr(collectives, name):
            setattr(collectives, name, getattr(collectives, name.replace("single", "tensor")))


def model_args(size: Size, **changes: Any) -> Any:
    from mula_titan.model.args import make_args

    return make_args("mula_7b_a1b", n_layers=size.layers, document_mask=False, **(size.changes | changes))


def flops_per_token(size: Size) -> float:
    a = model_args(size)
    per_layer = 4 * a.dim**2 + a.dim * a.num_experts + 3 * a.top_k * a.dim * a.ffn_dim
    return 6 * (a.n_layers * per_layer + a.dim * a.vocab_size) + 6 * a.n_layers * size.seq_len * a.dim


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


class Stepper:
    """One optimizer step at a time; losses stay on the device."""

    losses: list[torch.Tensor]

    def step(self) -> None:
        raise NotImplementedError


class TrainerStepper(Stepper):
    """``train_step`` of a torchtitan Trainer, as its own loop calls it."""

    def __init__(self, trainer_class: type, config: Any):
        losses: list[torch.Tensor] = []

        class Recording(trainer_class):
            def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
                loss = super().forward_backward_step(**kwargs)
                losses.append(loss.detach().clone())
                return loss

        self.losses = losses
        self.trainer = Recording(config)
        self.trainer.step = 1  # the first step would be logged
        self.batches = self.trainer.batch_generator(self.trainer.dataloader)

    def step(self) -> None:
        self.trainer.step += 1
        self.trainer.gc_handler.run(self.trainer.step)
        self.trainer.train_step(self.batches)


class HFStepper(Stepper):
    """A plain loop around transformers' OlmoeForCausalLM."""

    def __init__(self, size: Size, tokens: Path, experts: str, compile: bool):
        self.model = hf_model(size, experts).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **ADAM)
        self.forward = torch.compile(self.model, backend=size.backend) if compile else self.model
        self.batches = hf_batches(size, tokens)
        self.losses = []

    def step(self) -> None:
        tokens, labels = next(self.batches)
        loss = self.forward(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())


def hf_model(size: Size, experts: str) -> Any:
    """OlmoeForCausalLM in bf16 with the values that ``mula_titan.model.init`` gives a model of ours."""
    from transformers import AutoModelForCausalLM, OlmoeConfig

    from mula_titan.hf.hf_config import to_hf_config
    from mula_titan.hf.names import native_name
    from mula_titan.model.init import fill_normal

    args = model_args(size)
    values = {k: v for k, v in to_hf_config(args).items() if k not in ("architectures", "model_type")}
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(
            OlmoeConfig(**values), dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation=experts
        )

    def fill(param: torch.Tensor, name: str) -> None:
        fill_normal(param, std=args.init_std, seed=42, name=name)

    with torch.no_grad():
        for name, param in model.named_parameters():
            layer, _, kind = name.partition(".mlp.experts.")
            ours = f"{layer.removeprefix('model.')}.moe.routed_experts.inner_experts."
            if kind == "gate_up_proj":
                fill(param[:, : args.ffn_dim], f"{ours}w1_EFD")
                fill(param[:, args.ffn_dim :], f"{ours}w3_EFD")
            elif kind == "down_proj":
                fill(param, f"{ours}w2_EDF")
            elif param.ndim == 1:
                param.fill_(1.0)
            else:
                fill(param, native_name(name)[0])
    return model


def loader_config(size: Size, tokens: Path) -> Any:
    from mula_titan.data.loader import TokenDataLoader

    return TokenDataLoader.Config(dataset_path=str(tokens), document_mask=False, vocab_size=model_args(size).vocab_size)


def hf_batches(size: Size, tokens: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    from mula_titan.data.loader import TokenDataLoader

    loader = TokenDataLoader(
        loader_config(size, tokens),
        dp_world_size=1,
        dp_rank=0,
        tokenizer=None,
        seq_len=size.seq_len,
        local_batch_size=size.batch,
    )
    for batch, labels in loader:
        pair = (batch["input"], labels)
        if device().type == "cuda":
            pair = tuple(t.pin_memory().to(device(), non_blocking=True) for t in pair)
        yield pair


def shared_sections(size: Size, folder: Path, dtype: str, compile: bool, graphs: bool) -> dict[str, Any]:
    """Sections of a Trainer's configuration that are the same for ours and torchtitan's."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer
    from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig

    return {
        "dump_folder": str(folder),
        "hf_assets_path": str(TOKENIZER),
        "dataloader": loader_config(size, folder / "tokens"),
        "debug": DebugConfig(seed=42, enable_structured_logging=False),
        "parallelism": ParallelismConfig(spmd_backend="partial_dtensor"),
        "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        "training": TrainingConfig(
            local_batch_size=size.batch,
            seq_len=size.seq_len,
            steps=10**6,
            dtype=dtype,
            mixed_precision_param="bfloat16",
            disable_cuda_graphs=not graphs,
        ),
        "compile": CompileConfig(enable=compile, backend=size.backend),
        "loss": CrossEntropyLoss.Config(),
        "activation_checkpoint": None,
    }


def ours(
    size: Size,
    folder: Path,
    *,
    plain: bool = False,
    compile: bool = True,
    chunked: bool = False,
    attention: str = "sdpa",
    graphs: bool = False,
    dtype: str = "bfloat16",
    sharding: str = "fsdp",
    ac: bool = False,
) -> Stepper:
    from torchtitan.components.loss import ChunkedLossWrapper

    from mula_titan.components.activation_checkpoint import FullAC
    from mula_titan.components.metrics import MulaMetricsProcessor
    from mula_titan.components.optimizer import AdamWContainer
    from mula_titan.config_registry import mula_7b_a1b
    from mula_titan.trainer import MulaTrainer

    changes: dict[str, Any] = {"load_balance_loss": 0.0} if plain else {}
    sections = shared_sections(size, folder, dtype, compile, graphs)
    if chunked:
        sections["loss"] = ChunkedLossWrapper.Config(loss_fn=sections["loss"])
    if ac:
        sections["activation_checkpoint"] = FullAC.Config()
    config = replace(
        mula_7b_a1b(),
        model=model_args(size, attention=attention, **changes),
        # A step has one backward and the run one rank: bf16 gradients are summed over nothing, so fp32 adds no bit.
        optimizer=AdamWContainer.Config(lr=LEARNING_RATE, decay_all=plain, sharding=sharding, grad_dtype="bfloat16"),
        metrics=MulaMetricsProcessor.Config(log_freq=10**6, enable_tensorboard=False, enable_plot=False),
        **sections,
    )
    if plain:
        config.training.max_norm = 1e9
    return TrainerStepper(MulaTrainer, config)


def titan(size: Size, folder: Path) -> Stepper:
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import default_adamw, register_moe_load_balancing_hook
    from torchtitan.models import qwen3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.rope import CosSinRoPE
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

    args = model_args(size)
    base = qwen3.qwen3_configs["debugmodel_moe"](attn_backend="varlen")
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=args.n_layers,
        dim=args.dim,
        n_heads=args.n_heads,
        n_kv_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        moe_hidden_dim=args.ffn_dim,
        num_experts=args.num_experts,
        top_k=args.top_k,
        attn_backend="varlen",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=args.head_dim, max_seq_len=size.seq_len, theta=args.rope_theta),
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = replace(
        base,
        dim=args.dim,
        vocab_size=args.vocab_size,
        norm=replace(base.norm, normalized_shape=args.dim),
        tok_embeddings=replace(base.tok_embeddings, num_embeddings=args.vocab_size, embedding_dim=args.dim),
        lm_head=replace(base.lm_head, in_features=args.dim, out_features=args.vocab_size),
        layers=layers,
    )
    spec = ModelSpec(
        name="qwen3",
        flavor="olmoe",
        model=model,
        parallelize_fn=qwen3.parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=None,
    )
    config = Trainer.Config(
        model_spec=spec,
        optimizer=default_adamw(LEARNING_RATE),
        metrics=MetricsProcessor.Config(log_freq=10**6),
        **shared_sections(size, folder, "bfloat16", compile=True, graphs=False),
    )
    return TrainerStepper(Trainer, config)


def build(row: Row, size: Size, folder: Path) -> Stepper:
    if row.stack == "hf":
        return HFStepper(size, folder / "tokens", **row.options)
    return (ours if row.stack == "ours" else titan)(size, folder, **row.options)


def run_row(name: str, size: Size, folder: Path, warmup: int, steps: int, trace: Path | None, memory: Path | None):
    """All numbers of one row."""
    started = time.perf_counter()
    stepper = build(ROWS[name], size, folder)
    built = time.perf_counter()
    stepper.step()
    synchronize()
    first = time.perf_counter()
    for _ in range(warmup - 1):
        stepper.step()
    synchronize()
    cuda = device().type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        stepper.step()
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    start = time.perf_counter()
    for _ in range(steps):
        stepper.step()
    synchronize()
    stream = (time.perf_counter() - start) * 1e3 / steps
    result = {
        "name": name,
        "text": ROWS[name].text,
        "step_ms": statistics.median(times),
        "min_ms": min(times),
        "max_ms": max(times),
        "steps": steps,
        "stream_ms": stream,
        "flops_per_token": flops_per_token(size),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else None,
        "build_s": built - started,
        "first_step_s": first - built,
        "losses": [float(x) for x in stepper.losses],
    }
    if trace:
        result["kernels_ms"] = profile(stepper, trace / f"{name}.txt", trace / f"{name}.json.gz")
    if memory and cuda:
        snapshot(stepper, memory / f"{name}.pickle.gz")
    return result


KINDS = {
    "fused elementwise": ("triton_",),
    "experts": (
        *("_gate_up", "_down", "_weight_grad", "_combine_kernel", "_gather_kernel", "_swiglu", "_count", "_assign"),
        "enable_3x_kernel_for_sm9x",  # torch._grouped_mm
    ),
    "attention": ("flash", "fmha", "sdpa", "flex", "cudnn_generated"),
    "optimizer": ("Adam", "adam", "multi_tensor", "lpnorm", "_square_sum"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "sm90_xmma"),
    "copies": ("Memcpy", "Memset", "copy"),
}
"""Kinds of kernels by parts of their names; the first that fits counts."""


def profile(stepper: Stepper, table: Path, trace: Path) -> dict[str, float]:
    """Milliseconds a step in each kind of kernel, a table of all kernels, and a trace for a browser."""
    from torch.profiler import ProfilerActivity

    cuda = device().type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    count = 2
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(count):
            stepper.step()
        synchronize()
    table.parent.mkdir(parents=True, exist_ok=True)
    sums: dict[str, float] = {}
    lines = []
    kernels = [e for e in profiler.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e for e in kernels if not e.key.startswith("Optimizer.")]  # spans of the host's code
    for event in sorted(kernels, key=lambda e: -e.self_device_time_total):
        ms = event.self_device_time_total / 1e3 / count
        kind = next((k for k, parts in KINDS.items() if any(part in event.key for part in parts)), "other")
        sums[kind] = sums.get(kind, 0.0) + ms
        lines.append(f"{ms:9.3f} ms {event.count / count:7.1f} x  {kind:18s} {event.key[:150]}")
    summary = [f"{ms:9.3f} ms  {kind}" for kind, ms in sorted(sums.items(), key=lambda item: -item[1])]
    slowest = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=80)
    table.write_text("\n".join([*summary, "", *waits(stepper), "", *lines, "", slowest]))
    plain = trace.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(trace, "wb") as target:
        shutil.copyfileobj(source, target)
    plain.unlink()
    return sums


def waits(stepper: Stepper) -> list[str]:
    """Places where the host waits for the device in one step."""
    if device().type != "cuda":
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        stepper.step()
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))
    return [f"{count:4d} x  host waits at {place}" for place, count in places.most_common()]


def snapshot(stepper: Stepper, path: Path) -> None:
    """History of allocations over one step, for torch's memory viewer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._record_memory_history(max_entries=50_000, stacks="python")
    stepper.step()
    synchronize()
    plain = path.with_suffix("")
    torch.cuda.memory._dump_snapshot(str(plain))
    torch.cuda.memory._record_memory_history(enabled=None)
    with plain.open("rb") as source, gzip.open(path, "wb") as target:
        shutil.copyfileobj(source, target)
    plain.unlink()


def calibrate() -> float:
    """TFLOP/s of an 8192^3 bf16 product of random matrices (256^3 on a CPU)."""
    n = 8192 if device().type == "cuda" else 256
    a, b = (torch.randn(n, n, device=device(), dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(13):
        synchronize()
        start = time.perf_counter()
        a @ b
        synchronize()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / statistics.median(times[3:]) / 1e12


def make_tokens(folder: Path) -> None:
    from mula_titan.data.tokenize import TokenizeOptions, tokenize

    tokenize(TokenizeOptions(inputs=[str(TEXT)], output=folder / "tokens", tokenizer=TOKENIZER))


def child(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a row, or the calibration, in a process of its own; its result, or the end of what it wrote."""
    out = folder / f"{name}.json"
    command = [sys.executable, __file__, "--child", name, "--folder", str(folder), "--size", args.size]
    command += ["--warmup", str(args.warmup), "--steps", str(args.steps)]
    for flag in ("trace", "memory"):
        if value := getattr(args, flag):
            command += [f"--{flag}", str(value.resolve())]
    port = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    env = {**os.environ, **port, **ranks, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    env.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        done = subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT, cwd=folder)
    if done.returncode or not out.exists():
        return {
            "name": name,
            "text": ROWS[name].text if name in ROWS else name,
            "error": log.read_text()[-args.errors :],
        }
    return json.loads(out.read_text())


def show(row: dict[str, Any], size: Size, rate: float) -> str:
    if "error" in row:
        return f"{row['text']:46s} FAILED\n{row['error']}"
    tokens = size.batch * size.seq_len
    row["tokens_per_s"] = tokens / row["step_ms"] * 1e3
    row["mfu"] = row["flops_per_token"] * row["tokens_per_s"] / rate / 1e12
    peak = f"{row['peak_gib']:6.1f}" if row["peak_gib"] else "     -"
    return (
        f"{row['text']:46s} {row['step_ms']:8.1f} ({row['min_ms']:.1f}-{row['max_ms']:.1f}) "
        f"stream {row['stream_ms']:8.1f} {row['tokens_per_s']:9,.0f} tok/s  MFU {row['mfu']:6.1%}  peak {peak} GiB  "
        f"loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}  first step {row['first_step_s']:.0f} s"
    )


def compare_losses(rows: list[dict[str, Any]], tolerance: float) -> list[str]:
    """Largest difference of each transformers row's losses from those of ours_plain, and those that are too far."""
    found = {row["name"]: row["losses"] for row in rows if "losses" in row}
    wrong = []
    for name in ("hf_compiled", "hf_grouped", "hf_loop"):
        if name not in found or "ours_plain" not in found:
            continue
        pairs = list(zip(found["ours_plain"], found[name], strict=False))
        largest = max(abs(a - b) for a, b in pairs)
        print(
            f"losses of ours_plain and {name}: first {pairs[0][0]:.5f} and {pairs[0][1]:.5f}, "
            f"largest difference {largest:.4f} over {len(pairs)} steps"
        )
        if not largest <= tolerance or not math.isfinite(largest):
            wrong.append(name)
    return wrong


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Step times as bars, losses as curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    good = [row for row in rows if "error" not in row]
    figure, (bars, curves) = plt.subplots(1, 2, figsize=(11, 0.45 * len(good) + 2), layout="constrained")
    colors = ["tab:blue" if row["name"].startswith("ours") else "tab:gray" for row in good]
    drawn = bars.barh([row["text"] for row in good], [row["step_ms"] for row in good], color=colors)
    bars.bar_label(drawn, fmt=" %.0f")
    bars.set(xlabel="ms per step of 16,384 tokens, one H200")
    bars.margins(x=0.2)
    bars.invert_yaxis()
    for row in good:
        if row["name"] in ("ours_plain", "hf_compiled", "hf_loop"):
            curves.plot(row["losses"], label=row["text"], linestyle="-" if row["name"] == "ours_plain" else "--")
    curves.set(xlabel="step", ylabel="loss, nats per token")
    curves.legend()
    figure.savefig(path, dpi=130)


def run_child(args: argparse.Namespace) -> None:
    size = SIZES[args.size]
    stand_in_for_newer_torch()
    torch.manual_seed(0)
    if args.child == "calibrate":
        result: dict[str, Any] = {"tflops": calibrate()}
    elif args.child == "tokens":
        make_tokens(args.folder)
        result = {}
    else:
        # Trainers keep their own state in the folder; the tokens are shared.
        folder = args.folder / f"run_{args.child}"
        folder.mkdir(exist_ok=True)
        if not (folder / "tokens").exists():
            (folder / "tokens").symlink_to(args.folder / "tokens")
        result = run_row(args.child, size, folder, args.warmup, args.steps, args.trace, args.memory)
    (args.folder / f"{args.child}.json").write_text(json.dumps(result))
    os._exit(0)  # no need to wait for process groups and threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, "all"], help=f"default: {' '.join(DEFAULT_ROWS)}")
    # The default stands where the first of the three does: argparse takes a destination's first one.
    parser.add_argument("--size", choices=list(SIZES), default="main", help=argparse.SUPPRESS)
    parser.add_argument("--full", action="store_const", const="full", dest="size", help="16 layers: Mula-7B-A1B")
    parser.add_argument("--tiny", action="store_const", const="tiny", dest="size", help="a size for a CPU")
    parser.add_argument("--warmup", type=int, default=6, help="steps before timing")
    parser.add_argument("--steps", type=int, default=12, help="timed steps, once each synchronised and once in a row")
    parser.add_argument("--tolerance", type=float, default=0.05, help="largest difference of losses from transformers'")
    parser.add_argument("--trace", type=Path, help="folder for kernel tables and traces")
    parser.add_argument("--memory", type=Path, help="folder for snapshots of the allocator")
    parser.add_argument("--json", type=Path, help="write all numbers here, after each row")
    parser.add_argument("--picture", type=Path, help="write bars and loss curves here")
    parser.add_argument("--errors", type=int, default=1500, help="characters shown of a failed row's output")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(args)
    names = args.rows or (FULL_ROWS if args.size == "full" else DEFAULT_ROWS)
    names = list(ROWS) if "all" in names else names
    size, rows = SIZES[args.size], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepared = child("tokens", args, folder)
        if "error" in prepared:
            raise SystemExit(prepared["error"])
        rate = child("calibrate", args, folder)["tflops"]
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        print(f"{where}, torch {torch.__version__}: matrix product {rate:.1f} TFLOP/s", flush=True)
        for name in names:
            rows.append(child(name, args, folder))
            print(show(rows[-1], size, rate), flush=True)
            if args.json:
                head = {"device": where, "torch": torch.__version__, "tflops": rate, "size": args.size}
                args.json.write_text(json.dumps({**head, "rows": rows}, indent=1))
        rate_after = child("calibrate", args, folder)["tflops"]
        print(f"matrix product after the rows: {rate_after:.1f} TFLOP/s")
    wrong = compare_losses(rows, args.tolerance)
    if args.picture:
        draw(rows, args.picture)
    failed = [row["name"] for row in rows if "error" in row]
    if wrong or failed:
        raise SystemExit(f"losses differ: {wrong}; failed: {failed}")


if __name__ == "__main__":
    main()
