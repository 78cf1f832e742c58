"""Saved under so or epso, loaded under fsdp, and back: weights (the fp32 masters), moments and steps to the bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_parity import BATCH, EP, PER_LAYER, REPLICATE, TP, pipeline
from tests.distributed.training import Layout, reference, write_tokens
from tests.optimizer.runs import assemble, state_after, train_sharded

SHARDING, SMALL = "optimizer.sharding", {"optimizer.bucket_mib": 0.02}
BF16 = {"training.mixed_precision_param": "bfloat16"}
# name: (ranks, flags)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one_fsdp": (1, {SHARDING: "fsdp"}),
    "one_epso": (1, {SHARDING: "epso"}),
    "fsdp_ep2": (4, {SHARDING: "fsdp", EP: 2}),
    "epso_ep4": (4, {SHARDING: "epso", EP: 4} | SMALL),
    "epso_ep4_bf16": (4, {SHARDING: "epso", EP: 4, "checkpoint.async_mode": "async"} | SMALL | BF16),
    "so_ep2_offload": (4, {SHARDING: "so", EP: 2, REPLICATE: 2, "optimizer.offload_states": True} | SMALL),
    "epso_tp2_ep2": (4, {SHARDING: "epso", TP: 2, EP: 2} | SMALL),
    "epso_pp2": (4, {SHARDING: "epso"} | SMALL | pipeline("1F1B", **{BATCH: 4})),
}
SAVED_STEP = 2
# Saved by the first, loaded by the second.
MOVES = [
    ("epso_ep4", "fsdp_ep2"),
    ("epso_ep4", "epso_tp2_ep2"),
    ("epso_ep4_bf16", "fsdp_ep2"),
    ("epso_tp2_ep2", "epso_pp2"),
    ("epso_pp2", "so_ep2_offload"),
    ("so_ep2_offload", "epso_ep4"),
    ("one_fsdp", "epso_ep4"),
    ("fsdp_ep2", "epso_ep4_bf16"),
    ("epso_ep4", "one_fsdp"),
    ("epso_ep4_bf16", "one_fsdp"),
    ("epso_tp2_ep2", "one_epso"),
]
RESUMED = ("epso_ep4", "so_ep2_offload")


def _layout(name: str, data: str, folder: Path, **flags: Any) -> Layout:
    flags = {
        "checkpoint.enable": True,
        "checkpoint.interval": SAVED_STEP,
        "checkpoint.last_save_model_only": False,
        "training.steps": SAVED_STEP,
        **LAYOUTS[name][1],
        **flags,
    }
    return Layout(data=data, model=PER_LAYER, flags=flags, dump_folder=str(folder))


def _run(argument: tuple[str, Layout]) -> Any:
    kind, layout = argument
    if kind in ("save", "load"):
        return state_after(layout, loading=kind == "load")
    if torch.distributed.get_rank() == 0:
        shutil.copytree(kind, str(layout.dump_folder))  # goes on from a copy
    torch.distributed.barrier()
    return train_sharded(layout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, list[Any]]]:
    root = tmp_path_factory.mktemp("saved")
    data = write_tokens(root)
    sources = list(dict.fromkeys(source for source, _ in MOVES))

    def save(name: str) -> tuple[str, tuple[str, Layout]]:
        return name, ("save", _layout(name, data, root / name))

    def load(source: str, target: str) -> tuple[str, tuple[str, Layout]]:
        return f"{source}-{target}", ("load", _layout(target, data, root / source))

    def on(world: int, cases: list[tuple[str, Any]]) -> dict[str, list[Any]]:
        results = run_on_ranks(world, _run, cases, root / f"ranks-{world}-{len(cases)}")
        for name, ranks in results.items():
            for rank, result in enumerate(ranks):
                assert not isinstance(result, str), f"rank {rank} of {name}:\n{result}"
        return results

    results = on(1, [save("one_fsdp")])
    four = [save(name) for name in sources if LAYOUTS[name][0] == 4]
    four += [load(source, target) for source, target in MOVES if LAYOUTS[target][0] == 4]
    source, target = RESUMED
    resumed = _layout(target, data, root / "resumed", **{"training.steps": 3})
    four.append(("resume", (str(root / source), resumed)))
    results |= on(4, four)
    results |= on(1, [load(source, target) for source, target in MOVES if LAYOUTS[target][0] == 1])
    return data, root, results


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_loads_bit_for_bit(source: str, target: str, runs: Any) -> None:
    _, root, results = runs
    metadata = FileSystemReader(str(root / source / "checkpoint" / f"step-{SAVED_STEP}")).read_metadata()
    shapes = {
        key: value.size
        for key, value in metadata.state_dict_metadata.items()
        if hasattr(value, "size") and (key.endswith(("weight", "_EFD", "_EDF", ".exp_avg", ".exp_avg_sq", ".step")))
    }
    shapes = {key.removeprefix("optimizer."): size for key, size in shapes.items()}
    weights = {key for key in shapes if not key.startswith("state.")}
    assert sum(key.endswith(".exp_avg") for key in shapes) == len(weights) > 20
    want, got = (assemble(results[name], shapes) for name in (source, f"{source}-{target}"))
    assert not [key for key in shapes if not torch.equal(want[key], got[key])]
    assert all(float(got[key]) == SAVED_STEP for key in shapes if key.endswith(".step"))
    assert all(got[key].abs().sum() > 0 for key in shapes if key.endswith("exp_avg_sq"))
    if LAYOUTS[target][1][SHARDING] == "fsdp":
        return
    dtype = torch.bfloat16 if BF16.items() <= LAYOUTS[target][1].items() else torch.float32
    for rank in results[f"{source}-{target}"]:
        for key in rank:
            if key.startswith("parameter."):  # the modules follow the masters
                ((_, value),) = rank[key]
                assert torch.equal(value, got[key.removeprefix("parameter.")].to(dtype).float()), key


def test_all_ranks_have_the_same_keys(runs: Any) -> None:
    for source, target in MOVES:
        if "pp" not in target:
            keys = [rank.keys() for rank in runs[2][f"{source}-{target}"]]
            assert all(k == keys[0] for k in keys), target


def test_every_element_is_on_disk_once(runs: Any) -> None:
    for source in ("epso_ep4", "epso_ep4_bf16", "so_ep2_offload", "epso_tp2_ep2", "epso_pp2"):
        folder = runs[1] / source / "checkpoint" / f"step-{SAVED_STEP}"
        metadata = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
        for key, value in metadata.items():
            if not key.endswith(("weight", "_EFD", "_EDF", ".exp_avg", ".exp_avg_sq")):
                continue
            assert value.properties.dtype == torch.float32, key
            covered = torch.zeros(tuple(value.size), dtype=torch.int8)
            for chunk in value.chunks:
                covered[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
            assert (covered == 1).all(), key


def test_training_goes_on(runs: Any) -> None:
    data, _, results = runs
    want = reference(Layout(data=data, model=PER_LAYER)).losses[SAVED_STEP:]
    for result in results["resume"]:
        assert result.losses == pytest.approx(want, rel=1e-5)
