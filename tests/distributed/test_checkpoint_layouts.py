"""A checkpoint saved under one layout loads under every other, bit for bit: weights, Adam moments, biases.

And training goes on from there with the batches and losses of a run that never stopped.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.distributed.ranks import run_on_ranks
from tests.distributed.training import Layout, load_state, reference, train, write_tokens

P = "parallelism."
TP, EP, PP = (P + f"{kind}_parallel_degree" for kind in ("tensor", "expert", "pipeline"))
REPLICATE = P + "data_parallel_replicate_degree"
PIPELINE = {PP: 2, P + "pipeline_parallel_microbatch_size": 2, "training.local_batch_size": 4}

# name: (ranks, flags)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2": (2, {EP: 2}),
    "tp2": (2, {TP: 2}),
    "pp2": (2, PIPELINE),
    "fsdp4": (4, {}),
    "hsdp4": (4, {REPLICATE: 2}),
    "ep4": (4, {EP: 4}),
    "ep2_tp2": (4, {EP: 2, TP: 2}),
}
MODEL = {"load_balance_per_layer": True}
SAVED_STEP = 2


def _layout(name: str, data: str, folder: Path) -> Layout:
    flags = {
        "checkpoint.enable": True,
        "checkpoint.interval": SAVED_STEP,
        "checkpoint.last_save_model_only": False,
        **LAYOUTS[name][1],
    }
    return Layout(data=data, model=MODEL, flags=flags, dump_folder=str(folder))


def _by_world(function: Any, cases: dict[str, Layout], folder: Path) -> dict[str, list[Any]]:
    """Run every case on its number of ranks, each number started once."""
    results: dict[str, list[Any]] = {}
    for world in (1, 2, 4):
        chosen = [(name, layout) for name, layout in cases.items() if LAYOUTS[name.split("-")[-1]][0] == world]
        if chosen:
            results |= run_on_ranks(world, function, chosen, folder / str(world))
    for name, ranks in results.items():
        for rank, result in enumerate(ranks):
            assert not isinstance(result, str), f"rank {rank} of {name}:\n{result}"
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Path], dict[str, list[Any]]]:
    """Every layout trains and saves; the folders, and what each run held when it saved."""
    root = tmp_path_factory.mktemp("saved")
    data = write_tokens(root)
    cases = {name: _layout(name, data, root / name) for name in LAYOUTS}
    _by_world(train, cases, root / "train")
    for name in LAYOUTS:  # go back to the step in the middle
        shutil.rmtree(root / name / "checkpoint" / "step-3")
    states = _by_world(load_state, cases, root / "load")
    return data, {name: root / name for name in LAYOUTS}, states


@pytest.fixture(scope="module")
def loaded(saved: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Every saved checkpoint, loaded under every layout."""
    data, folders, _ = saved
    cases = {f"{source}-{name}": _layout(name, data, folders[source]) for source in LAYOUTS for name in LAYOUTS}
    return _by_world(load_state, cases, tmp_path_factory.mktemp("cross"))


def _union(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for state in ranks for name, tensor in state.items()}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_loads_bit_for_bit(source: str, name: str, saved: Any, loaded: Any) -> None:
    want, got = _union(saved[2][source]), _union(loaded[f"{source}-{name}"])
    assert got.keys() == want.keys()
    assert sum(key.endswith(".exp_avg") for key in want) == sum(not key.startswith(("state.", "bias.")) for key in want)
    different = [key for key in want if not torch.equal(got[key], want[key])]
    assert not different


@pytest.mark.parametrize("source", LAYOUTS)
def test_all_layouts_save_the_same_weights(source: str, saved: Any) -> None:
    want, got = _union(saved[2]["one"]), _union(saved[2][source])
    assert got.keys() == want.keys()
    for key in want:
        if not key.startswith("state."):
            # By norm: Adam's first steps turn the rounding of a tiny gradient into a whole step.
            assert float((got[key] - want[key]).norm()) <= 1e-3 * float(want[key].norm()) + 1e-6, key


@pytest.mark.parametrize("source", ["ep2", "ep4", "ep2_tp2", "pp2"])
def test_every_expert_is_on_disk(source: str, saved: Any) -> None:
    metadata = FileSystemReader(str(saved[1][source] / "checkpoint" / "step-2")).read_metadata().state_dict_metadata
    experts = {key: value for key, value in metadata.items() if key.endswith("w1_EFD") and key.startswith("layers.")}
    assert len(experts) == 4
    for value in experts.values():
        assert tuple(value.size) == (8, 24, 32)
        covered = torch.zeros(tuple(value.size), dtype=torch.int8)
        for chunk in value.chunks:
            covered[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
        assert (covered == 1).all()


def test_training_goes_on_at_another_size(saved: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    data, folders, _ = saved
    root = tmp_path_factory.mktemp("resume")
    cases = {}
    for source, name in (("ep2", "fsdp4"), ("ep4", "one"), ("pp2", "ep2_tp2"), ("hsdp4", "pp2")):
        folder = root / f"{source}-{name}"
        shutil.copytree(folders[source], folder)
        cases[f"{source}-{name}"] = _layout(name, data, folder)
    want = reference(replace(_layout("one", data, root), flags={})).losses[SAVED_STEP:]
    for name, ranks in _by_world(train, cases, root / "ranks").items():
        losses = [r.losses for r in ranks if r.losses[0] > 0]
        assert losses, name
        for got in losses:
            assert got == pytest.approx(want, rel=1e-5), name
