"""The sharded optimizers: bytes a rank holds and moves (counted), step time on gloo, bandwidth of the update on a GPU.

    python benchmarks/optimizer.py count                    # tables of docs/optimizer.md; needs no accelerator
    python benchmarks/optimizer.py count --picture docs/images/optimizer_memory.png
    python benchmarks/optimizer.py owners --picture docs/images/optimizer_owners.png
    python benchmarks/optimizer.py gloo --ranks 4           # epso, so, ZeroRedundancyOptimizer, replicated AdamW
    python benchmarks/optimizer.py update --device cuda     # one GPU; torch alone is enough; --offload: states on host

``count`` builds each model on the meta device as the trainer would, in a fake process group of all ranks, and adds up
the sizes of the buffers of the rank of each pipeline stage (mula_titan.planner); the largest stage is shown. ``gloo``
takes the four optimizers in turns, round by round, and compares medians. ``update`` compares with a copy of as many
bytes, after a few steps have been compared with torch.optim.AdamW on float32 parameters.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from mula_titan.components.optimizer_sharding import OptimizerMeshes, Owners, ShardedAdamW
from mula_titan.components.optimizer_sharding.buckets import kernel_rates

if TYPE_CHECKING:
    from mula_titan.planner.sharded import Held

# (pipeline, expert) degrees of arXiv 2604.00785's jobs.
LAYOUTS = {
    "mula_1b": (1, 1),
    "mula_7b_a1b": (1, 1),
    "mula_20b_a2b": (1, 12),
    "mula_100b_a7b": (4, 12),
    "mula_220b_a10b": (8, 12),
}
# FSDP2 refuses to split 64 experts of width 1024 over 384 ranks, so fsdp's 7B is replicated: 64 ranks share each copy.
FSDP_SHARDS = {"mula_7b_a1b": 64}
WORLDS = (384, 3072, 12288)
SHARDINGS = ("fsdp", "so", "epso")
TILE = 64e9  # bytes of one tile's memory


# -- count ------------------------------------------------------------------------------------------------------------


@dataclass
class Count:
    """One rank's bytes. Messages: what goes into reductions and comes out of gathers, all ranks' parts included."""

    held: "Held"
    reduced: float
    gathered: float
    collectives: float


def _layout(flavor: str, world: int, sharding: str) -> tuple[Any, Any]:
    """Configuration and layout of one of the paper's jobs."""
    from mula_titan import config_registry
    from mula_titan.planner.layout import Layout

    pp, ep = LAYOUTS[flavor]
    config = getattr(config_registry, flavor)()
    config.optimizer.sharding = sharding
    p = config.parallelism
    p.pipeline_parallel_degree, p.pipeline_parallel_schedule, p.expert_parallel_degree = pp, "1F1B", ep
    if sharding == "fsdp" and flavor in FSDP_SHARDS:
        p.data_parallel_shard_degree = FSDP_SHARDS[flavor]
        p.data_parallel_replicate_degree = world // FSDP_SHARDS[flavor]
    config.training.local_batch_size, config.training.seq_len = pp, 2048
    return config, Layout.from_config(config, world, "xpu")


def count(flavor: str, world: int, sharding: str) -> Count:
    """The largest pipeline stage: buffers counted on the real model, messages of the planner, which equal its."""
    from mula_titan.planner.count import counted
    from mula_titan.planner.parameters import Inventory
    from mula_titan.planner.sharded import sharded

    config, layout = _layout(flavor, world, sharding)
    inventory = Inventory(config, ep=layout.ep > 1, tp=False)
    results = []
    for pp_rank in range(layout.pp):
        held, _ = counted(config, layout, pp_rank)
        _, messages = sharded(inventory, layout, pp_rank)
        gathered = sum(m.bytes for m in messages if m.kind == "all_gather")
        reduced = sum(m.bytes for m in messages if m.kind != "all_gather")
        results.append(Count(held, reduced, gathered, sum(m.count for m in messages)))
    return max(results, key=lambda c: c.held.total)


def run_count(args: argparse.Namespace) -> None:
    """Print the table; draw the picture."""
    import logging

    logging.disable(logging.WARNING)
    rows = {}
    print(
        "| model | ranks | sharding | states GB | formula GB | parameters | gradients | buffers | all GB | of 64 GB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for flavor in LAYOUTS:
        for world in WORLDS:
            for sharding in SHARDINGS:
                c = rows[flavor, world, sharding] = count(flavor, world, sharding)
                h = c.held
                gb = [f"{x / 1e9:.3f}" for x in (h.states, h.ideal_states)]
                gb += [f"{x / 1e9:.2f}" for x in (h.parameters, h.gradients, h.buffers, h.total)]
                share = f"{100 * h.total / TILE:.0f} %"
                print(f"| {flavor} | {world} | {sharding} | {' | '.join(gb)} | {share} |", flush=True)
    print("\n| model | ranks | sharding | into reductions GB | out of gathers GB | collectives |")
    print("|---|---|---|---|---|---|")
    for (flavor, world, sharding), c in rows.items():
        moved = f"{c.reduced / 1e9:.2f} | {c.gathered / 1e9:.2f} | {c.collectives:.0f}"
        print(f"| {flavor} | {world} | {sharding} | {moved} |")
    if args.picture:
        _draw(rows, args.picture)


def _draw(rows: dict[tuple[str, int, str], Count], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(LAYOUTS), figsize=(15, 3.6), sharey=True)
    kinds = ("parameters", "gradients", "states", "buffers")
    for axis, flavor in zip(axes, LAYOUTS, strict=True):
        for i, sharding in enumerate(SHARDINGS):
            bottom = 0.0
            for kind, color in zip(kinds, ("#4c72b0", "#dd8452", "#55a868", "#b0b0b0"), strict=True):
                value = getattr(rows[flavor, 384, sharding].held, kind) / 1e9
                axis.bar(i, value, bottom=bottom, color=color, label=kind if i == 0 else None)
                bottom += value
        axis.set_xticks(range(len(SHARDINGS)), SHARDINGS)
        axis.set_title(flavor)
        axis.axhline(TILE / 1e9, color="black", linewidth=0.8, linestyle="--")
    axes[0].set_ylabel("GB a rank, 384 ranks")
    axes[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def run_owners(args: argparse.Namespace) -> None:
    """Draw who owns what on 8 ranks: 4 data x 2 expert ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from mula_titan.components.optimizer_sharding.layout import ALIGN, plan_buckets

    data, ep = 4, 2
    numel = {"all but experts": 16 * ALIGN, "experts 0-3": 16 * ALIGN, "experts 4-7": 16 * ALIGN}
    figure, axes = plt.subplots(1, 2, figsize=(12, 3.4), sharey=True)
    for axis, sharding in zip(axes, ("so", "epso"), strict=True):
        left = 0
        for kind, size in numel.items():
            dense = kind == "all but experts"
            shards = data * ep if dense and sharding == "epso" else data
            (layout,) = plan_buckets([(kind, size, kind)], lambda _, n=shards: n, size)
            for rank in range(data * ep):
                if not dense and rank % ep != int(kind == "experts 4-7"):
                    continue
                axis.barh(rank, size, left=left, height=0.8, color="#d8e0ee")
                start, stop = layout.slots[0].owned(rank if shards == data * ep else rank // ep, layout.shard_numel)
                axis.barh(rank, stop - start, left=left + start, height=0.8, color="#dd8452")
            axis.text(left + size / 2, -0.8, kind, ha="center", fontsize=9)
            left += size + ALIGN
        axis.set_title(f"optimizer.sharding = {sharding}", pad=14)
        axis.set_xticks([])
        axis.set_yticks(range(data * ep), [f"rank {r}: data {r // ep}, expert {r % ep}" for r in range(data * ep)])
        axis.set_frame_on(False)
    axes[0].set_ylim(data * ep - 0.4, -1.3)
    figure.text(0.5, 0.02, "light: parameters and gradients held; dark: master weights and moments owned", ha="center")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(args.picture, dpi=120)


# -- gloo -------------------------------------------------------------------------------------------------------------

DENSE = [(512, 512)] * 8 + [(2048, 256), (256,), (256,)]  # 2.6 M elements, on all ranks
EXPERTS = [(4, 256, 512)] * 6  # 3.1 M elements on each expert rank


def _toy(ep_rank: int) -> tuple[nn.ParameterList, nn.ParameterList]:
    torch.manual_seed(0)
    dense = nn.ParameterList([nn.Parameter(torch.randn(s)) for s in DENSE])
    torch.manual_seed(1 + ep_rank)
    return dense, nn.ParameterList([nn.Parameter(torch.randn(s)) for s in EXPERTS])


def _groups(modules: dict[str, nn.ParameterList]) -> list[dict[str, Any]]:
    params = [(f"{k}.{n}", p) for k, module in modules.items() for n, p in module.named_parameters()]
    names, values = [n for n, _ in params], [p for _, p in params]
    return [{"params": values, "param_names": names, "lr": 1e-3, "weight_decay": 0.1, "fused": True}]


def _gloo_rank(rank: int, ranks: int, rounds: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "ep"))
    stage = mesh._flatten("stage")
    expert = Owners(mesh["data"])
    subjects: dict[str, Callable[[], None]] = {}

    def add_sharded(name: str, replicated: Owners) -> None:
        dense, experts = _toy(mesh["ep"].get_local_rank())
        whole = nn.ModuleDict({"dense": dense, "experts": experts})
        own = frozenset(id(p) for p in experts)
        meshes = _ByIdentity(
            stage=stage, expert=expert, split=replicated, replicated=replicated, tp_rank=0, experts=own
        )
        optimizer = ShardedAdamW(
            _groups({"dense": dense, "experts": experts}),
            parts=[whole],
            meshes=meshes,
            param_dtype=torch.float32,
            bucket_mib=4,
        )

        def step() -> None:
            optimizer.zero_grad()
            for gradient in optimizer._gradients:
                gradient.view.fill_(1e-3)
                gradient.count = 1
            optimizer.finish_backward()
            optimizer.step()
            optimizer.wait()

        subjects[name] = step

    add_sharded("epso", Owners(stage))
    add_sharded("so", Owners(mesh["data"], copies=mesh["ep"]))

    def add_replicated(
        name: str, make: Callable[[list[nn.Parameter], dist.ProcessGroup], torch.optim.Optimizer]
    ) -> None:
        dense, experts = _toy(mesh["ep"].get_local_rank())
        parts = [(list(dense), stage.get_group()), (list(experts), mesh["data"].get_group())]
        flat = [torch.zeros(sum(p.numel() for p in params)) for params, _ in parts]
        optimizers = [make(params, group) for params, group in parts]
        for (params, _), grads in zip(parts, flat, strict=True):
            for p, g in zip(params, grads.split([p.numel() for p in params]), strict=True):
                p.grad = g.view_as(p)

        def step() -> None:
            square = torch.zeros(())
            for (_, group), grads in zip(parts, flat, strict=True):
                grads.fill_(1e-3)
                dist.all_reduce(grads, group=group)
                square += grads.square().sum()
            dist.all_reduce(square, group=mesh["ep"].get_group())
            for optimizer in optimizers:
                optimizer.step()

        subjects[name] = step

    from torch.distributed.optim import ZeroRedundancyOptimizer

    hyper: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}
    add_replicated("adamw", lambda params, group: torch.optim.AdamW(params, **hyper))
    add_replicated(
        "zero",
        lambda params, group: ZeroRedundancyOptimizer(
            params, torch.optim.AdamW, process_group=group, parameters_as_bucket_view=True, **hyper
        ),
    )
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for i in range(rounds + 2):
        for name, step in subjects.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            if i >= 2:
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        Path(out).write_text(json.dumps(times))
    dist.destroy_process_group()


@dataclass(frozen=True)
class _ByIdentity(OptimizerMeshes):
    """Owners of plain tensors."""

    experts: frozenset[int]

    def of(self, param: torch.Tensor) -> Owners:
        return self.expert if id(param) in self.experts else self.replicated


def run_gloo(args: argparse.Namespace) -> None:
    """Print medians and ratios."""
    import tempfile

    import torch.multiprocessing as mp

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # takes a free port and holds it
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/times.json"
        mp.start_processes(
            _gloo_rank, args=(args.ranks, args.rounds, store.port, out), nprocs=args.ranks, start_method="spawn"
        )
        times = json.loads(Path(out).read_text())
    base = statistics.median(times["epso"])
    print(
        f"{args.ranks} gloo ranks on {os.cpu_count()} cores, EP 2, {args.rounds} rounds; load {os.getloadavg()[0]:.1f}"
    )
    print("| optimizer | median ms | ratio to epso | quartiles ms |\n|---|---|---|---|")
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        print(f"| {name} | {1e3 * median:.1f} | {median / base:.2f} | {1e3 * low:.1f} to {1e3 * high:.1f} |")


# -- update -----------------------------------------------------------------------------------------------------------


def _check(device: torch.device, mesh: Any, offload: bool) -> float:
    """Largest difference to torch.optim.AdamW on float32 parameters after three steps, relative to the largest."""
    torch.manual_seed(0)
    start = [torch.randn(999, 1001, device=device) for _ in range(3)]
    mine, plain = (nn.ParameterList([nn.Parameter(t.clone()) for t in start]) for _ in range(2))
    optimizer = ShardedAdamW(
        _groups({"": mine}), parts=[mine], meshes=OptimizerMeshes.from_mesh(mesh), bucket_mib=2, offload=offload
    )
    peer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        for p, q in zip(mine, plain, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        optimizer.finish_backward()
        norm = torch.nn.utils.clip_grad_norm_(mine.parameters(), 1.0)
        want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert torch.allclose(norm.to_local() if isinstance(norm, DTensor) else norm, want, rtol=1e-4)
        optimizer.step()
        peer.step()
    masters = [mine.state_dict()[str(i)].values.to(device) for i in range(len(start))]
    for p, master in zip(mine, masters, strict=True):
        assert torch.equal(p.flatten(), master.bfloat16())
    pairs = zip(masters, plain, strict=True)
    return max(float((m - q.detach().flatten()).abs().max() / q.detach().abs().max()) for m, q in pairs)


def run_update(args: argparse.Namespace) -> None:
    """Print the update's bandwidth against a copy's."""
    device = torch.device(args.device)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29513")
    dist.init_process_group("gloo" if device.type == "cpu" else None)  # None: gloo for hosts, the device's for devices
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("data",))
    difference = _check(device, mesh, args.offload)
    print(f"difference to torch.optim.AdamW after 3 clipped steps: {difference:.1e} of the largest weight")
    assert difference < 1e-5
    numel = int(args.millions * 1e6)
    width = 4096
    shapes = [(numel // 8 // width, width)] * 8
    net = nn.ParameterList([nn.Parameter(torch.randn(s, device=device)) for s in shapes])
    optimizer = ShardedAdamW(
        _groups({"dense": net}),
        parts=[nn.ModuleDict({"dense": net})],
        meshes=OptimizerMeshes.from_mesh(mesh),
        offload=args.offload,
    )
    total = sum(bucket.layout.numel for bucket in optimizer.buckets)
    group = optimizer.param_groups[0]
    steps = torch.zeros((), device="cpu" if args.offload else device)
    factor = torch.ones((), device=device)

    fused = optimizer.buckets[0].has_kernels

    def update() -> None:
        rates_4 = kernel_rates(steps, group) if fused else None
        for bucket in optimizer.buckets:
            bucket.update(steps, group, rates_4)

    def whole_step() -> None:
        optimizer.zero_grad()
        for gradient in optimizer._gradients:
            gradient.count = 1
        optimizer.finish_backward()
        optimizer.step()

    a, b = (torch.empty(total, device=device) for _ in range(2))
    # Bytes an element: gradient, master and two moments read, the last three written, bf16 parameters written; the norm
    # reads the gradient. Without kernels the gradient is also scaled in place and the master read again for the cast.
    subjects: dict[str, tuple[Callable[[], Any], float]] = {
        "copy": (lambda: b.copy_(a), 8),
        "update": (update, 30 if fused else 28),
        "step (norm, clip, update, parameters)": (whole_step, 4 + 30 if fused else 4 + 8 + 28 + 6),
        "norm": (lambda: [bucket.norm() for bucket in optimizer.buckets], 4),
    }
    if not fused:
        subjects["clip"] = (lambda: [bucket.clip(factor) for bucket in optimizer.buckets], 8)
    synchronize = getattr(torch, device.type).synchronize if device.type != "cpu" else lambda: None
    bandwidth = {}
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for i in range(args.rounds + 3):
        for name, (work, _) in subjects.items():
            synchronize()
            start = time.perf_counter()
            work()
            synchronize()
            if i >= 3:
                times[name].append(time.perf_counter() - start)
    for name, (_, size) in subjects.items():
        bandwidth[name] = size * total / statistics.median(times[name])
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    print(f"{what}, torch {torch.__version__}, {total / 1e6:.0f} M elements in {len(optimizer.buckets)} buckets")
    print("| | median ms | GB/s | of the copy |\n|---|---|---|---|")
    for name, values in times.items():
        share = bandwidth[name] / bandwidth["copy"]
        print(f"| {name} | {1e3 * statistics.median(values):.3f} | {bandwidth[name] / 1e9:.0f} | {100 * share:.0f} % |")
    dist.destroy_process_group()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("count", help="bytes held and moved")
    command.add_argument("--picture", help="write a bar chart of the memory here")
    command.set_defaults(run=run_count)
    command = commands.add_parser("owners", help="picture of who owns what")
    command.add_argument("--picture", required=True)
    command.set_defaults(run=run_owners)
    command = commands.add_parser("gloo", help="step time on CPU ranks")
    command.add_argument("--ranks", type=int, default=4)
    command.add_argument("--rounds", type=int, default=30)
    command.set_defaults(run=run_gloo)
    command = commands.add_parser("update", help="bandwidth of the update on one device")
    command.add_argument("--device", default="cuda")
    command.add_argument("--millions", type=float, default=1000, help="million elements")
    command.add_argument("--rounds", type=int, default=20)
    command.add_argument("--offload", action="store_true", help="master weights and moments in host memory")
    command.set_defaults(run=run_update)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
