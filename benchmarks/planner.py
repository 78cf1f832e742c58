"""The planner against what was measured: on an H200 (our numbers) and on Aurora (the paper's).

    python benchmarks/planner.py h200      # step times of peers, one of which the constant `fused` is calibrated on
    python benchmarks/planner.py paper     # scaling, EPSO against SO, kernels: arXiv 2604.00785

No constant is tuned for a row of ``paper``. ``h200`` prints the one calibration: the share of elementwise traffic that
torch.compile leaves is what makes the transformers row come out; the other rows are then predictions.
"""

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from mula_titan import config_registry
from mula_titan.planner.hardware import Hardware, load_hardware
from mula_titan.planner.layout import Layout
from mula_titan.planner.memory import MemoryModel
from mula_titan.planner.sharded import Message
from mula_titan.planner.step_time import StepTime, step_time

# Milliseconds of a step and of one expert layer (CUDA graph), 8 layers, 16384 tokens, one run each, 2026-12-02;
# torch 2.11, transformers 5.17, torchtitan 0.3.0.
PEERS = {
    "transformers, grouped_mm, compiled (calibration)": (207.2, 11.94, True),
    "torchtitan 0.3.0, compiled": (215.2, 12.37, True),
    "transformers, grouped_mm, uncompiled": (300.8, 20.03, False),
}
OURS = 149.3  # benchmarks/train_step.py, 2026-12-03
# (pipeline, expert) degrees, sequences of 2048 tokens a rank, checkpointing: the paper's jobs.
JOBS = {
    "mula_20b_a2b": (1, 12, 1, "none"),
    "mula_100b_a7b": (4, 12, 4, "full"),
    "mula_220b_a10b": (8, 12, 8, "full"),
}
EPSO_STEP = {"mula_20b_a2b": 1.19, "mula_100b_a7b": 1.06, "mula_220b_a10b": 1.01}
EPSO_OPTIMIZER = {"mula_20b_a2b": 1.36, "mula_100b_a7b": 1.23, "mula_220b_a10b": 1.07}
WITH_KERNELS = {"mula_20b_a2b": 1.35, "mula_100b_a7b": 1.41, "mula_220b_a10b": 1.51}


def _one_gpu() -> Any:
    config = config_registry.mula_7b_a1b()
    config.model.n_layers, config.model.document_mask = 8, False
    config.training.local_batch_size, config.training.seq_len, config.training.global_batch_size = 4, 4096, -1
    config.training.dtype = "bfloat16"  # weights, gradients and moments, as the peers have them
    return replace(config)


def run_h200(_: argparse.Namespace) -> None:
    """Print predicted and measured step times of the peers, and ours."""
    hardware = load_hardware("h200")
    config = _one_gpu()
    layout, model = Layout.from_config(config, 1, "cuda"), MemoryModel(config, device_type="cuda")
    print("| stack | measured ms | predicted ms | ratio |\n|---|---|---|---|")
    for name, (measured, expert_ms, compiled) in PEERS.items():
        time = step_time(model, layout.changed(compiled=compiled), hardware)
        # The peer's own expert layer in place of ours.
        own = time.parts["experts"]
        predicted = 1e3 * (time.seconds - own) + 8 * expert_ms
        print(f"| {name} | {measured} | {predicted:.1f} | {predicted / measured:.3f} |")
        if "calibration" in name:
            rest = predicted - 1e3 * time.parts["elementwise"]
            print(f"  fused that makes this row exact: {hardware.fused * (measured - rest) / (predicted - rest):.3f}")
    time = step_time(model, layout, hardware)
    predicted = 1e3 * time.seconds
    print(f"| ours, compiled | {OURS} | {predicted:.1f} | {predicted / OURS:.3f} |")
    print(", ".join(f"{name} {1e3 * value:.1f}" for name, value in time.parts.items() if value))
    peak = model.worst(layout)
    print(f"peak of ours, uncompiled: {peak.peak / 2**30:.1f} GiB")


def _job(flavor: str, sharding: str) -> Any:
    pp, ep, batch, _ = JOBS[flavor]
    config = getattr(config_registry, flavor)()
    config.model.document_mask, config.model.load_balance_per_layer = False, True
    config.optimizer.sharding, config.optimizer.grad_dtype = sharding, "bfloat16"  # the paper sums in bf16
    config.parallelism.pipeline_parallel_degree, config.parallelism.expert_parallel_degree = pp, ep
    config.training.local_batch_size, config.training.seq_len = batch, 2048
    return replace(config)


class _PaperSO(MemoryModel):
    """The paper's SO sums all of the replicated gradients over the expert ranks, before the data ranks' reduction."""

    def sharded(self, layout: Layout, pp_rank: int) -> Any:
        held, messages = super().sharded(layout, pp_rank)
        if layout.sharding != "so":
            return held, messages
        _, whole = super().sharded(layout.changed(sharding="epso"), pp_rank)
        replicated = next(m for m in whole if m.kind == "reduce_scatter" and m.axis == "stage")
        rest = [m for m in messages if not (m.kind == "all_reduce" and m.axis == "ep")]
        # One collective a parameter: about nine a layer.
        count = 9 * sum(layout.layers_of(stage) for stage in layout.stages_of(pp_rank))
        return held, [*rest, Message("all_reduce", "ep", replicated.bytes, count)]


def _paper_step(flavor: str, ranks: int, sharding: str, hardware: Hardware, **changes: Any) -> StepTime:
    config = _job(flavor, sharding)
    layout = Layout.from_config(config, ranks, "xpu").changed(ac=JOBS[flavor][3], **changes)
    return step_time(_PaperSO(config, device_type="xpu"), layout, hardware, overlap=False)


def run_paper(_: argparse.Namespace) -> None:
    """Print the sanity tables."""
    hardware = load_hardware("aurora_pvc")
    print("220B, ranks 384 to 12288, messages exposed as in the paper's library (paper: about 0.90)")
    print("| ranks | step ms | efficiency |\n|---|---|---|")
    first = None
    for ranks in (384, 768, 1536, 3072, 6144, 12288):
        time = _paper_step("mula_220b_a10b", ranks, "epso", hardware)
        first = first or time.seconds
        print(f"| {ranks} | {1e3 * time.seconds:.0f} | {first / time.seconds:.3f} |")
    print("\nEPSO against SO on 3072 ranks\n| model | optimizer, plan | paper | whole step, plan | paper |")
    print("|---|---|---|---|---|")
    for flavor in JOBS:
        so, epso = (_paper_step(flavor, 3072, sharding, hardware) for sharding in ("so", "epso"))
        optimizer = (so.exposed_data + so.update) / (epso.exposed_data + epso.update)
        print(
            f"| {flavor} | {optimizer:.2f} | {EPSO_OPTIMIZER[flavor]} | {so.seconds / epso.seconds:.2f} "
            f"| {EPSO_STEP[flavor]} |"
        )
    print("\nKernels: what the paper's 'kernels and EPSO' over 'EPSO' says about its former kernels")
    print("| model | paper, kernels alone | experts' share of the step, plan | implied slowness of former kernels |")
    print("|---|---|---|---|")
    for flavor in JOBS:
        time = _paper_step(flavor, 3072, "epso", hardware)
        gain = WITH_KERNELS[flavor] / EPSO_STEP[flavor]
        # Idle pipeline time grows with the work.
        share = time.parts["experts"] / (1 - time.bubble) / time.seconds
        print(f"| {flavor} | {gain:.2f} | {100 * share:.0f} % | {1 + (gain - 1) / share:.1f}x |")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("h200").set_defaults(run=run_h200)
    commands.add_parser("paper").set_defaults(run=run_paper)
    logging.disable(logging.WARNING)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
