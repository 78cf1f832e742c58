"""Measures tile sizes for one expert size on this machine's device and keeps the fastest.

    python -m inductor_kernels.tune --dim 2048 --hidden 1024 --experts 64 --tokens 16384 --top-k 8

Writes `configs.tuned_file(device)`, which every later process reads before its first launch. Choices are never made in
the middle of a run: all ranks and restarts of a job compute with the same tiles, hence the same bits.

Shape suffixes: T tokens, K picks per token, D model width, F expert width, E experts, R slots.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import fields

import torch

from . import grouped_gemm, layer
from .configs import GemmConfig, LayerConfig, layer_config, load_tuned, problem_key, tuned_file
from .index import build_plan
from .permute import gather
from .plan import empty_plan

FAMILIES = tuple(f.name for f in fields(LayerConfig))


def candidates(start: GemmConfig) -> list[GemmConfig]:
    """Variations of a config, itself first; the row tile stays, since all row GEMMs share it."""
    found = [start]
    for stages, group_m, wide in itertools.product((2, 3, 4), (4, 8, 16), (1, 2)):
        config = start._replace(num_stages=stages, group_m=group_m, block_n=start.block_n // wide)
        if config not in found:
            found.append(config)
    return found


def launches(T: int, K: int, E: int, D: int, F: int, device: torch.device, dtype: torch.dtype) -> dict[str, Callable]:
    """One function of a GemmConfig per GEMM family, on random data and balanced routing."""
    ids_TK = torch.rand(T, E, device=device).topk(K, dim=1).indices
    plan = empty_plan(ids_TK, E, layer_config(device, dtype, D, F).row_tile, -1)
    build_plan(ids_TK, plan)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    x_TD, h_RF, gate_up_R2F = normal(T, D), normal(plan.R, F), normal(plan.R, 2 * F)
    w1_EFD, w3_EFD, w2_EDF = normal(E, F, D), normal(E, F, D), normal(E, D, F)
    weights_TK = torch.rand(T, K, device=device)
    x_RD = gather(x_TD, plan)

    def rows(config: GemmConfig) -> torch.Tensor:
        return x_TD if config.gather else x_RD

    gemm = grouped_gemm
    return {
        "gate_up": lambda c: gemm.gate_up(rows(c), w1_EFD, w3_EFD, plan, c, True),
        "down": lambda c: gemm.down(h_RF, w2_EDF, weights_TK, plan, c),
        "down_backward": lambda c: gemm.down_backward(rows(c), w2_EDF, plan, c),
        "gate_up_backward": lambda c: gemm.gate_up_backward(gate_up_R2F, w1_EFD, w3_EFD, plan, c),
        "gate_up_weight_grad": lambda c: gemm.gate_up_weight_grad(gate_up_R2F, rows(c), w1_EFD, w3_EFD, 0, plan, c),
        "down_weight_grad": lambda c: gemm.down_weight_grad(rows(c), h_RF, plan, c),
    }


def device_ms(run: Callable[[], object], repeats: int = 10) -> float:
    """Median device time of one call in ms."""
    device = torch.get_device_module()
    times = []
    for _ in range(repeats + 2):
        start, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        device.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def fastest(run: Callable[[GemmConfig], object], configs: list[GemmConfig]) -> tuple[GemmConfig, float]:
    """The config of least time; one that doesn't compile or fit the device is passed over."""
    best: tuple[GemmConfig, float] | None = None
    for config in configs:
        try:
            ms = device_ms(functools.partial(run, config))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            print(f"    passed over {config}: {type(error).__name__}")
            continue
        # A later candidate must win by more than the spread of the measurement.
        if best is None or ms < 0.99 * best[1]:
            best = config, ms
    if best is None:
        raise RuntimeError("no candidate runs on this device")
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("dim", "hidden", "experts", "tokens", "top-k"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    args = parser.parse_args()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise SystemExit("tuning needs a GPU: none is visible to torch")
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    dtype = getattr(torch, args.dtype)
    layer.provide_scratch(device)
    current = layer_config(device, dtype, args.dim, args.hidden)
    runs = launches(args.tokens, args.top_k, args.experts, args.dim, args.hidden, device, dtype)
    chosen = {}
    for family in args.families:
        config, ms = fastest(runs[family], candidates(getattr(current, family)))
        chosen[family] = config._asdict()
        print(f"{family:20s} {ms:8.3f} ms  {config}")
    path = tuned_file(device)
    tuned = load_tuned(device)
    tuned.setdefault(problem_key(dtype, args.dim, args.hidden), {}).update(chosen)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tuned, indent=1))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
