"""Several devices of one host: expert dispatch, sharded optimizers, pipeline bubble, scaling; the same on CPU ranks.

    python benchmarks/several_gpus.py dispatch --ranks 8 --json dispatch.json   # all_to_all and all_gather, EP 2, 4, 8
    python benchmarks/several_gpus.py optimizer --ranks 8                       # fsdp, so, epso on a shallow Mula-20B
    python benchmarks/several_gpus.py pipeline --ranks 8                        # bubble against (P - 1) / (M + P - 1)
    python benchmarks/several_gpus.py scaling --ranks 8                         # Mula-7B-A1B on 1, 2, 4, 8; torchtitan
    python benchmarks/several_gpus.py all --ranks 4 --tiny                      # gloo, in minutes: that everything runs

A row is a run of the program's own trainer under torchrun on random tokens, a process group of its own. ``step`` is the
median of steps that each end with a synchronisation, on the slowest rank; ``backward`` and ``update`` are its parts up
to and after the last micro-batch's backward, in steps that are synchronised between the two. The bubble is that of the
line ``a + b M`` through the step times of two numbers M of micro-batches: a / (a + b M).
Parity on the same devices, in fp32: ``pytest tests/distributed/test_parity.py``, which takes NCCL where there are GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
EP, PP = "parallelism.expert_parallel_degree", "parallelism.pipeline_parallel_degree"
SCHEDULE, MICRO = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_microbatch_size"
BATCH, LAYERS = "training.local_batch_size", "model.n_layers"
TINY = {
    "model.dim": 64,
    "model.n_heads": 4,
    "model.n_kv_heads": 4,
    "model.ffn_dim": 32,
    "model.num_experts": 8,
    "model.top_k": 2,
    "model.vocab_size": 512,
    "training.seq_len": 64,
    "compile.enable": False,
}


@dataclass
class Row:
    """A run: flags that differ from the common ones."""

    text: str
    ranks: int
    model: str = "mula_7b_a1b"
    flags: dict[str, Any] = field(default_factory=dict)
    stack: str = "ours"
    group: str = ""
    """Rows of a group are compared with each other."""


def dispatch(ranks: int) -> Iterator[Row]:
    """Two blocks of the 7B and the 20B under both dispatchers."""
    for model in ("mula_7b_a1b", "mula_20b_a2b"):
        for degree in (2, 4, 8):
            if degree > ranks:
                continue
            for kind in ("all_to_all", "all_gather"):
                flags = {LAYERS: 2, EP: degree, "model.expert_dispatch": kind, BATCH: 4}
                yield Row(f"{model} EP {degree} {kind}", ranks, model, flags, group=f"{model} EP {degree}")


def optimizer(ranks: int) -> Iterator[Row]:
    """Four blocks of the 20B; EP over half of the ranks, so that both kinds of owners differ."""
    for sharding in ("epso", "so", "fsdp"):
        flags = {LAYERS: 4, EP: max(2, ranks // 2), "optimizer.sharding": sharding, BATCH: 2}
        yield Row(f"20B, 4 layers, {sharding}", ranks, "mula_20b_a2b", flags, group="optimizer")


def pipeline(ranks: int) -> Iterator[Row]:
    """Stages on all ranks, each of two blocks; two numbers of micro-batches a schedule."""
    for schedule in ("1F1B", "Interleaved1F1B"):
        for micro_batches in (2 * ranks, 4 * ranks):
            flags = {LAYERS: 2 * ranks, PP: ranks, SCHEDULE: schedule, BATCH: micro_batches, MICRO: 1}
            flags["model.load_balance_per_layer"] = True
            yield Row(f"{schedule}, {micro_batches} micro-batches", ranks, flags=flags, group=schedule)


def scaling(ranks: int) -> Iterator[Row]:
    """Mula-7B-A1B as it is, beside torchtitan's model of these dimensions with 8 layers and ours with 8."""
    for size in (1, 2, 4, 8):
        if size > ranks:
            continue
        yield Row(
            f"ours, 16 layers, {size} ranks", size, flags={BATCH: 4, "optimizer.sharding": "epso"}, group="ours 16"
        )
        yield Row(f"ours, 8 layers, {size} ranks", size, flags={LAYERS: 8, BATCH: 4}, group="ours 8")
        if size == 1 or device_type() != "cpu":  # its FSDP averages, which gloo refuses
            yield Row(f"torchtitan, 8 layers, {size} ranks", size, stack="titan", group="torchtitan 8")


KINDS = {"dispatch": dispatch, "optimizer": optimizer, "pipeline": pipeline, "scaling": scaling}


def device_type() -> str:
    """``cuda`` or ``xpu`` if there is one, else ``cpu``."""
    return os.environ.get("MULA_TITAN_DEVICE") or (
        torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    )


def synchronize() -> None:
    """Wait for the device."""
    if device_type() != "cpu":
        torch.accelerator.synchronize()


def write_tokens(path: Path, vocab_size: int) -> None:
    """Random tokens, enough for every row."""
    import numpy as np

    np.save(path, np.random.default_rng(0).integers(1, vocab_size, size=2**23, dtype=np.int32))


def our_trainer(row: Row, folder: Path, tiny: bool) -> Any:
    """The program's trainer, with the time of each part of a step in ``parts`` while ``parts`` is a list."""
    from mula_titan.toml_config import load_config
    from mula_titan.trainer import MulaTrainer
    from mula_titan.validate import validate

    values = {
        "config": row.model,
        "dump_folder": folder / "run",
        "hf_assets_path": ROOT / "assets/tokenizer",
        "dataloader.sources": f'[{{path = "{folder}/tokens.npy", eos_id = 0}}]',
        "model.document_mask": False,
        "training.seq_len": 4096,
        "training.steps": 10**6,
        "training.global_batch_size": -1,
        "metrics.log_freq": 10**6,
        "metrics.enable_tensorboard": False,
        "metrics.enable_plot": False,
        "validator.enable": False,
        "checkpoint.enable": False,
        **row.flags,
        **(TINY if tiny else {}),
    }
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    config, given = load_config(None, words)
    validate(config, given, row.ranks)

    class Timed(MulaTrainer):
        parts: list[float] | None = None

        def forward_backward(self, data: Any) -> torch.Tensor:
            start = time.perf_counter()
            loss = super().forward_backward(data)
            if self.parts is not None:
                synchronize()
                self.parts.append(time.perf_counter() - start)
            return loss

    return Timed(config)


def run_rank(row: Row, folder: Path, steps: int, tiny: bool) -> None:
    """One rank of a row; rank 0 writes the result."""
    import train_step

    from mula_titan.runtime import select_device

    train_step.stand_in_for_newer_torch()
    select_device()
    torch.manual_seed(0)
    if row.stack == "titan":
        stepper = train_step.titan(train_step.SIZES["tiny" if tiny else "main"], folder)
        trainer, batches = stepper.trainer, stepper.batches
    else:
        trainer = our_trainer(row, folder, tiny)
        trainer.step = 1
        batches = trainer.batch_generator(trainer.dataloader)
    import torch.distributed as dist

    def timed() -> float:
        dist.barrier()
        start = time.perf_counter()
        trainer.step += 1
        trainer.train_step(batches)
        if row.stack == "ours":
            trainer.optimizers.wait()
        synchronize()
        return (time.perf_counter() - start) * 1e3

    for _ in range(3):
        timed()
    if device_type() != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    whole = statistics.median(timed() for _ in range(steps))
    backward = float("nan")
    update = float("nan")
    if row.stack == "ours":
        trainer.parts = []
        totals = [timed() for _ in range(steps)]
        parts = [1e3 * part for part in trainer.parts]
        backward = statistics.median(parts)
        update = statistics.median(t - p for t, p in zip(totals, parts, strict=True))
    peak = torch.accelerator.max_memory_allocated() / 2**30 if device_type() != "cpu" else float("nan")
    numbers = torch.tensor([whole, backward, update, peak], dtype=torch.float64)
    everyone = [torch.zeros_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, numbers)
    if dist.get_rank() == 0:
        largest = torch.stack(everyone).max(dim=0).values.tolist()
        training = trainer.config.training
        # A step's tokens: every rank but those of other pipeline stages has its own batch.
        data_ranks = trainer.parallel_dims.dp_replicate * trainer.parallel_dims.dp_shard
        tokens = training.local_batch_size * training.seq_len * data_ranks
        names = ("step_ms", "backward_ms", "update_ms", "peak_gib")
        result = {**asdict(row), **dict(zip(names, largest, strict=True)), "tokens": tokens}
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)


def run_row(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """Start a row's ranks; its result, or the end of what they wrote."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if row.stack == "titan":
            import train_step

            train_step.make_tokens(folder)
        else:
            write_tokens(folder / "tokens.npy", TINY["model.vocab_size"] if args.tiny else 50000)
        (folder / "row.json").write_text(json.dumps(asdict(row)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.ranks)]
        command += [__file__, "rank", "--folder", name, "--steps", str(args.steps), *(["--tiny"] if args.tiny else [])]
        env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
        env["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast stays off
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        path = folder / "result.json"
        if not path.exists():
            return {**asdict(row), "error": done.stdout[-2000:]}
        return json.loads(path.read_text())


def show(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A line of the table; ratio to the first row of the same group."""
    if "error" in row:
        return f"| {row['text']} | failed | | | | | |\n{row['error']}"
    base = next(r for r in rows if r["group"] == row["group"] and "error" not in r)
    rate = row["tokens"] / row["step_ms"] * 1e3
    ratio = rate / (base["tokens"] / base["step_ms"] * 1e3)
    times = " | ".join(f"{row[key]:.1f}" for key in ("step_ms", "backward_ms", "update_ms"))
    return f"| {row['text']} | {times} | {rate:,.0f} | {ratio:.2f} | {row['peak_gib']:.1f} |"


def bubbles(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Measured bubble of each schedule against the closed formula (arXiv 2104.04473, section 2.2)."""
    for schedule in ("1F1B", "Interleaved1F1B"):
        found = [r for r in rows if r["group"] == schedule and "error" not in r]
        if len(found) < 2:
            continue
        few, many = ((r["flags"][BATCH], r["step_ms"]) for r in found)
        slope = (many[1] - few[1]) / (many[0] - few[0])
        measured = 1 - slope * few[0] / few[1]
        stages = found[0]["ranks"]
        chunks = 2 if schedule.startswith("Inter") else 1
        wait = (stages - 1) / chunks
        yield f"{schedule}, {few[0]} micro-batches: bubble {measured:.1%}, formula {wait / (few[0] + wait):.1%}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS, "all", "rank"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="a size for CPU ranks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind == "rank":
        row = Row(**json.loads((args.folder / "row.json").read_text()))
        run_rank(row, args.folder, args.steps, args.tiny)
    rows: list[dict[str, Any]] = []
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else device_type()
    print(f"{args.ranks} x {where}, torch {torch.__version__}")
    print(
        "| row | step ms | backward ms | update ms | tokens/s | of the group's first | peak GiB |\n" + "|---" * 7 + "|"
    )
    for kind in KINDS if args.kind == "all" else [args.kind]:
        for row in KINDS[kind](args.ranks):
            rows.append(run_row(row, args))
            print(show(rows[-1], rows), flush=True)
            if args.json:
                args.json.write_text(json.dumps({"device": where, "torch": torch.__version__, "rows": rows}, indent=1))
    print("\n".join(bubbles(rows)))
    if failed := [row["text"] for row in rows if "error" in row]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
