"""Routed-experts layer, forward + backward, against its peers in one run on one GPU.

    python benchmarks/moe_layer.py                     # the table of docs/benchmarks.md, and its picture
    python benchmarks/moe_layer.py --shapes 7B --imbalanced

Routing is given; index building or sorting, gather, experts and combine are inside the timing, the router is not. bf16.
Every implementation is checked against a float32 per-expert loop (TF32 off) on the same inputs before it is timed: the
output and the gradients of x, routing weights and all expert weights. Wall time is the median over synchronised
iterations, so launch gaps count; graph time is the median of CUDA-graph replays; peak memory is above what the inputs
take and includes the output and all gradients.

Peers: a per-expert loop; torch._grouped_mm on sorted rows, eager and compiled; transformers' OlmoeExperts, compiled.

Shape suffixes: T tokens, K picks per token, D model width, F expert width, E experts, N = T*K.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from inductor_kernels import moe_experts


class Shape(NamedTuple):
    T: int
    D: int
    F: int
    E: int
    K: int


SHAPES = {
    "7B": Shape(16384, 2048, 1024, 64, 8),
    "20B": Shape(8192, 2048, 1024, 96, 8),
    "100B/EP12": Shape(8192, 3072, 1536, 12, 1),
    "220B/EP12": Shape(8192, 3072, 1536, 20, 1),
}
GRADIENTS = ("dx", "dweights", "dw1", "dw3", "dw2")


class Inputs(NamedTuple):
    x_TD: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    w1_EFD: torch.Tensor
    w3_EFD: torch.Tensor
    w2_EDF: torch.Tensor

    def leaves(self) -> list[torch.Tensor]:
        return [t for t in self if t.requires_grad]


def make_inputs(shape: Shape, imbalanced: bool) -> Inputs:
    """Random tokens and weights; balanced routing, or max/mean load 5 with an eighth of the experts empty."""
    T, D, Fdim, E, K = shape
    popularity_E = torch.ones(E, device="cuda")
    if imbalanced:
        popularity_E[0] = 0.0 if K > 1 else 5 / (1 - 5 / E) * (E - E // 8 - 1) / E
        popularity_E[E - E // 8 :] = 0.0
    if imbalanced and K > 1:
        # K distinct experts a token: expert 0 is taken by a fixed share of tokens, the rest is even.
        ids_TK = torch.multinomial(popularity_E.expand(T, E), K)
        takers_T = torch.rand(T, device="cuda") < 5 * K / E
        ids_TK[takers_T, 0] = 0
    else:
        ids_TK = torch.multinomial(popularity_E.expand(T, E), K)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, device="cuda") * scale).bfloat16().requires_grad_()

    return Inputs(
        normal(T, D),
        ids_TK,
        torch.rand(T, K, device="cuda").requires_grad_(),
        normal(E, Fdim, D, scale=D**-0.5),
        normal(E, Fdim, D, scale=D**-0.5),
        normal(E, D, Fdim, scale=Fdim**-0.5),
    )


def per_expert_loop(inputs: Inputs) -> torch.Tensor:
    x_TD, ids_TK, weights_TK, w1_EFD, w3_EFD, w2_EDF = inputs
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for e in range(w1_EFD.shape[0]):
        tokens, picks = torch.where(ids_TK == e)
        x = x_TD[tokens]
        y = (F.silu(x @ w1_EFD[e].T) * (x @ w3_EFD[e].T)) @ w2_EDF[e].T
        out_TD = out_TD.index_add(0, tokens, y.float() * weights_TK[tokens, picks, None])
    return out_TD.to(x_TD.dtype)


def sorted_grouped_mm(inputs: Inputs) -> torch.Tensor:
    """The layer as torchtitan 0.3.0 computes it: argsort, gather, three grouped GEMMs, weighted scatter-add."""
    x_TD, ids_TK, weights_TK, w1_EFD, w3_EFD, w2_EDF = inputs
    K, E = ids_TK.shape[1], w1_EFD.shape[0]
    ids_N = ids_TK.reshape(-1)
    order_N = torch.argsort(ids_N, stable=True)
    counts_E = torch.zeros(E, device=ids_N.device, dtype=torch.int32).scatter_add(
        0, ids_N, torch.ones_like(ids_N, dtype=torch.int32)
    )
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    tokens_N = order_N // K
    x_ND = x_TD[tokens_N]
    h_NF = F.silu(torch._grouped_mm(x_ND, w1_EFD.transpose(1, 2), offs=ends_E))
    h_NF = h_NF * torch._grouped_mm(x_ND, w3_EFD.transpose(1, 2), offs=ends_E)
    y_ND = torch._grouped_mm(h_NF, w2_EDF.transpose(1, 2), offs=ends_E)
    y_ND = (y_ND.float() * weights_TK.reshape(-1)[order_N, None]).to(x_TD.dtype)
    return torch.zeros_like(x_TD).index_add(0, tokens_N, y_ND)


def hf_olmoe(inputs: Inputs) -> Callable[[Inputs], torch.Tensor]:
    """transformers' OlmoeExperts holding the same weights, gate and up concatenated as it wants them."""
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    E, Fdim, D = inputs.w1_EFD.shape
    config = OlmoeConfig(
        hidden_size=D, intermediate_size=Fdim, num_experts=E, num_experts_per_tok=inputs.ids_TK.shape[1]
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = OlmoeExperts(config)
    experts.gate_up_proj = torch.nn.Parameter(torch.cat([inputs.w1_EFD, inputs.w3_EFD], dim=1).detach())
    experts.down_proj = torch.nn.Parameter(inputs.w2_EDF.detach())

    def run(inputs: Inputs) -> torch.Tensor:
        return experts(inputs.x_TD, inputs.ids_TK, inputs.weights_TK.to(inputs.x_TD.dtype))

    run.parameters = [experts.gate_up_proj, experts.down_proj]
    return run


def gradients(function, inputs: Inputs, dout_TD: torch.Tensor) -> dict[str, torch.Tensor]:
    out_TD = function(inputs)
    parameters = getattr(function, "parameters", None)
    if parameters is None:
        grads = torch.autograd.grad(out_TD, inputs.leaves(), dout_TD.to(out_TD.dtype))
    else:
        dx, dweights, dgate_up, ddown = torch.autograd.grad(
            out_TD, [inputs.x_TD, inputs.weights_TK, *parameters], dout_TD.to(out_TD.dtype)
        )
        grads = (dx, dweights, *dgate_up.chunk(2, dim=1), ddown)
    return {"out": out_TD.detach(), **dict(zip(GRADIENTS, grads, strict=True))}


def step(function, inputs: Inputs, dout_TD: torch.Tensor) -> None:
    """What is timed: forward and backward, gradients returned and dropped."""
    leaves = [inputs.x_TD, inputs.weights_TK, *getattr(function, "parameters", inputs[3:])]
    torch.autograd.grad(function(inputs), leaves, dout_TD)


def wall_ms(run: Callable[[], None], iterations: int) -> float:
    times = []
    for _ in range(iterations):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def graph_ms(run: Callable[[], None], iterations: int) -> float | None:
    """Median time of graph replays, or None for what can't be captured (host synchronisation)."""
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return wall_ms(graph.replay, iterations)
    except (RuntimeError, torch.AcceleratorError) as error:
        print(f"    no CUDA graph: {str(error).splitlines()[0][:100]}")
        return None


def measure(name: str, function, inputs: Inputs, dout_TD, truth: dict[str, torch.Tensor], tolerance: float) -> dict:
    values = gradients(function, inputs, dout_TD)
    error = max(float((values[k].float() - truth[k]).norm() / truth[k].norm()) for k in truth)
    if not error <= tolerance:
        raise SystemExit(f"{name} disagrees with the float32 loop: relative error {error:.2e} > {tolerance:.0e}")
    del values

    def run() -> None:
        step(function, inputs, dout_TD)

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - resident) / 2**30
    is_loop = name == "loop"
    medians = [wall_ms(run, 5 if is_loop else 20) for _ in range(2)]
    graph = None if is_loop else graph_ms(run, 20)
    return {
        "name": name,
        "wall_ms": sum(medians) / 2,
        "spread": abs(medians[0] - medians[1]) / min(medians),
        "graph_ms": graph,
        "peak_gib": peak,
        "error": error,
    }


def calibrate() -> float:
    """TFLOP/s of an 8192^3 bf16 product of random matrices: the floor's rate, measured in this run."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * 8192**3 / wall_ms(lambda: a @ b, 10) / 1e9


def run_shape(label: str, shape: Shape, imbalanced: bool, only: list[str], rate: float) -> list[dict]:
    torch.manual_seed(0)
    inputs = make_inputs(shape, imbalanced)
    dout_TD = torch.randn_like(inputs.x_TD)
    truth_inputs = Inputs(*(t.detach().float().requires_grad_() if t.is_floating_point() else t for t in inputs))
    truth = gradients(per_expert_loop, truth_inputs, dout_TD.float())
    del truth_inputs
    load_E = torch.bincount(inputs.ids_TK.flatten(), minlength=shape.E).float()
    floor = 18 * shape.T * shape.K * shape.F * shape.D / rate / 1e9
    print(
        f"\n{label} {'imbalanced' if imbalanced else 'balanced'}: load max/mean {load_E.max() / load_E.mean():.2f}, "
        f"{int((load_E == 0).sum())} empty experts, FLOP floor {floor:.2f} ms at {rate:.0f} TFLOP/s"
    )

    def ours(inputs: Inputs) -> torch.Tensor:
        return moe_experts(*inputs)

    candidates: dict[str, Callable[[], Callable]] = {
        "ours": lambda: ours,
        "ours + compile": lambda: torch.compile(ours, fullgraph=True),
        "grouped_mm": lambda: sorted_grouped_mm,
        "grouped_mm + compile": lambda: torch.compile(sorted_grouped_mm, fullgraph=True),
        "HF OlmoeExperts + compile": lambda: _compiled_hf(inputs),
        "loop": lambda: per_expert_loop,
    }
    rows = []
    for name, build in candidates.items():
        if only and name not in only:
            continue
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        try:
            row = measure(name, build(), inputs, dout_TD, truth, tolerance=1e-2)
        except ImportError as error:
            print(f"  {name:28s} not run: {error}")
            continue
        row |= {"shape": label, "imbalanced": imbalanced, "floor_ms": floor}
        rows.append(row)
        graph = f"{row['graph_ms']:8.2f}" if row["graph_ms"] else "       -"
        print(
            f"  {name:28s} wall {row['wall_ms']:8.2f} ms (+-{row['spread']:.1%})  graph {graph} ms  "
            f"{floor / row['wall_ms']:5.1%} of floor rate  peak {row['peak_gib']:.2f} GiB  error {row['error']:.1e}",
            flush=True,
        )
    return rows


def _compiled_hf(inputs: Inputs) -> Callable:
    run = hf_olmoe(inputs)
    compiled = torch.compile(run)
    compiled.parameters = run.parameters
    return compiled


def draw(rows: list[dict], path: Path) -> None:
    """Bars of wall and graph time per shape and implementation, with the FLOP floor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    balanced = [r for r in rows if not r["imbalanced"] and r["name"] != "loop"]
    labels = list(dict.fromkeys(r["shape"] for r in balanced))
    figure, axes = plt.subplots(1, len(labels), figsize=(3.2 * len(labels), 3.6), layout="constrained")
    for axis, label in zip([axes] if len(labels) == 1 else axes, labels, strict=True):
        mine = [r for r in balanced if r["shape"] == label]
        colors = ["tab:blue" if r["name"].startswith("ours") else "tab:gray" for r in mine]
        names = [r["name"].replace(" + ", "\n+ ") for r in mine]
        bars = axis.bar(names, [r["wall_ms"] for r in mine], color=colors, alpha=0.45)
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
        axis.bar(names, [r["graph_ms"] or 0.0 for r in mine], color=colors, width=0.5)
        axis.margins(y=0.12)
        axis.axhline(mine[0]["floor_ms"], color="black", linestyle=":", linewidth=1)
        axis.set_title(label)
        axis.tick_params(axis="x", labelrotation=90, labelsize=8)
    figure.supylabel("forward + backward, ms", fontsize=9)
    figure.supxlabel("wide: wall time, eager launches; narrow: CUDA-graph replay; dotted: FLOP floor", fontsize=9)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--only", nargs="+", default=[], help="names of implementations to run; default all")
    parser.add_argument("--imbalanced", action="store_true", help="also time routing with max/mean load 5")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--picture", type=Path, help="write the bar chart here")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    rate = calibrate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, 8192^3 bf16 product {rate:.0f} TFLOP/s")
    rows = []
    for label in args.shapes:
        for imbalanced in (False, True) if args.imbalanced else (False,):
            rows += run_shape(label, SHAPES[label], imbalanced, args.only, rate)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
