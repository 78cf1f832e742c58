"""Checkpoints: only complete ones count, damage is found and told, nothing good is deleted, failures cost nothing."""

import errno
import json
import logging
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mula_titan.components.checkpoint import ModelOnly
from mula_titan.components.manifest import DELETING, UNFINISHED
from mula_titan.exit_codes import STORAGE, FatalFault
from tests.distributed.ranks import run_on_ranks
from tests.reliability.kill_trials import run_trials
from tests.reliability.small_run import SmallRun, alone

pytestmark = pytest.mark.usefixtures("process_group")


def _flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _saved(folder: Path, steps: int, **config: Any) -> tuple[SmallRun, list[float]]:
    run = SmallRun(folder, **config)
    losses = []
    for _ in range(steps):
        losses.append(run.train())
        run.checkpointer.save(run.step)
    run.close()
    return run, losses


def _names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoint").iterdir()}


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "bit flip in the tensors": (lambda f: _flip_bit(f / "__0_0.distcp"), "__0_0.distcp doesn't have the checksum"),
    "truncated tensors": (lambda f: _truncate(f / "__0_0.distcp"), "__0_0.distcp has"),
    "bit flip in the metadata": (lambda f: _flip_bit(f / ".metadata"), ".metadata doesn't have the checksum"),
    "tensors missing": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp: No such file"),
    "manifest truncated": (lambda f: _truncate(f / "manifest.json"), "manifest.json cannot be read"),
    "unfinished, from another program": (
        lambda f: [(f / name).unlink() for name in ("manifest.json", ".metadata")],
        "unfinished: neither manifest.json nor .metadata",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_and_the_next_older_one_is_loaded(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage, reason = DAMAGE[kind]
    _, losses = _saved(tmp_path, 4)
    damage(tmp_path / "checkpoint" / "step-4")
    run = SmallRun(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert run.checkpointer.load()
    assert run.step == 3
    assert run.train() == losses[3]
    (message,) = [r.getMessage() for r in caplog.records if "Not resuming from" in r.getMessage()]
    assert "step-4" in message and reason in message


def test_nothing_good_left_is_refused_rather_than_started_over(tmp_path: Path) -> None:
    _saved(tmp_path, 2)
    for step in (1, 2):
        _flip_bit(tmp_path / "checkpoint" / f"step-{step}" / "__0_0.distcp")
    with pytest.raises(FatalFault, match=r"No checkpoint in .* can be resumed from \(step-2: .*\| step-1: .*move the"):
        SmallRun(tmp_path).checkpointer.load()
    with pytest.raises(FatalFault, match=r"load_step = 2: .*step-2 is damaged: __0_0"):
        SmallRun(tmp_path).checkpointer.load(2)


def test_sizes_only(tmp_path: Path) -> None:
    _saved(tmp_path, 2)
    path = tmp_path / "checkpoint" / "step-2" / "__0_0.distcp"
    content = path.read_bytes()
    _truncate(path)
    run = SmallRun(tmp_path, verify="size")
    assert run.checkpointer.load() and run.step == 1
    path.write_bytes(content)
    assert run.checkpointer.load() and run.step == 2


def test_rotation_counts_complete_ones_and_leaves_foreign_folders(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    for name in ("step-7-old", "notes", "step-90"):
        (root / name).mkdir(parents=True)
        (root / name / "file").touch()
    _saved(tmp_path, 5, keep_latest_k=2)
    assert _names(tmp_path) == {"step-7-old", "notes", "step-90", "step-4", "step-5"}
    (
        root / "step-5" / "manifest.json"
    ).unlink()  # no longer complete: it doesn't count, and step-4 is the last good one
    run = SmallRun(tmp_path, keep_latest_k=2)
    assert run.checkpointer.load(4)
    run.train()
    run.train()
    run.checkpointer.save(run.step)
    run.close()
    assert _names(tmp_path) == {"step-7-old", "notes", "step-90", "step-4", "step-5", "step-6"}
    assert SmallRun(tmp_path).checkpointer.newest() == root / "step-6"


def test_a_foreign_folder_of_the_same_name_is_not_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    foreign = tmp_path / "checkpoint" / "step-1"
    foreign.mkdir(parents=True)
    (foreign / "file").write_text("mine")
    run = SmallRun(tmp_path)
    run.train()
    assert not run.checkpointer.save(1)
    assert "has no manifest.json, so it isn't ours" in caplog.text
    assert [path.name for path in foreign.iterdir()] == ["file"]
    run.close()


def test_leftovers_of_killed_runs_are_removed(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    for prefix in (UNFINISHED, DELETING):
        (tmp_path / "checkpoint" / f"{prefix}9").mkdir()
    run = SmallRun(tmp_path)
    assert run.checkpointer.load() and run.step == 1
    assert _names(tmp_path) == {"step-1"}


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_is_saved_is_the_state_of_the_call(mode: str, tmp_path: Path) -> None:
    run = SmallRun(tmp_path, async_mode=mode)
    run.train()
    want = {key: value.clone() for key, value in run.model.state_dict().items()}
    moments = {k: v.clone() for k, v in run.optimizers.state_dict().items() if isinstance(v, torch.Tensor)}
    run.checkpointer.save(1)
    with torch.no_grad():  # as the next steps would, while the save is under way
        for parameter in run.model.parameters():
            parameter.fill_(7)
        for state in next(iter(run.optimizers)).state.values():
            state["exp_avg"].fill_(7)
    run.data.index = run.step = 99
    run.close()
    again = SmallRun(tmp_path)
    assert again.checkpointer.load()
    assert (again.step, again.data.index) == (1, 1)
    for key, value in again.model.state_dict().items():
        assert torch.equal(value, want[key]), key
    for key, value in again.optimizers.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, moments[key]), key


@contextmanager
def _files_no_larger_than(size: int) -> Iterator[None]:
    """The operating system refuses to write more into a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_failed_save_costs_nothing_and_the_next_one_counts(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, want = _saved(tmp_path / "good", 4)
    run = SmallRun(tmp_path, async_mode=mode)
    losses = [run.train()]
    run.checkpointer.save(1)
    run.checkpointer.maybe_wait_for_saving()
    losses.append(run.train())
    with _files_no_larger_than(20_000):
        run.checkpointer.save(2)
        run.checkpointer.maybe_wait_for_saving()
    assert _names(tmp_path) == {"step-1"}
    text = caplog.text
    assert "The checkpoint of step 2 could not be saved in" in text and "File too large" in text
    assert "Training goes on and tries again at the next interval; 2 more failures stop it." in text
    losses.append(run.train())
    run.checkpointer.save(3)
    losses.append(run.train())
    run.close()
    assert losses == want
    again = SmallRun(tmp_path)
    assert again.checkpointer.load() and again.step == 3
    assert again.train() == want[3]


FAULTS = {
    "full disk": OSError(errno.ENOSPC, "No space left on device"),
    "read-only": OSError(errno.EROFS, "Read-only file system"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_too_many_failures_in_a_row_stop(kind: str, tmp_path: Path) -> None:
    run = SmallRun(tmp_path, max_failed_saves=2)

    def fail(folder: Path) -> None:
        raise FAULTS[kind]

    run.train()
    run.checkpointer.save(1)
    run.checkpointer.before_write = fail
    run.train()
    assert not run.checkpointer.save(2)
    run.checkpointer.before_write = None
    run.train()
    assert run.checkpointer.save(3)  # the count starts anew
    run.checkpointer.before_write = fail
    run.train()
    assert not run.checkpointer.save(4)
    run.train()
    with pytest.raises(FatalFault, match=f"step 5 could not be saved .* rank 0: .*{FAULTS[kind].strerror}") as caught:
        run.checkpointer.save(5)
    assert caught.value.exit_code == STORAGE
    assert _names(tmp_path) == {"step-1", "step-3"}


def test_the_last_save_must_succeed(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    run.train()
    with _files_no_larger_than(1000), pytest.raises(FatalFault, match="step 1 could not be saved"):
        run.checkpointer.save(1, last_step=True)
    with _files_no_larger_than(1000), pytest.raises(FatalFault, match="step 1 could not be saved"):
        run.checkpointer.save_now(1)


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    run.train()
    run.checkpointer.save(1)
    shutil.rmtree(tmp_path / "checkpoint")
    run.train()
    assert run.checkpointer.save(2)
    run.close()
    shutil.rmtree(tmp_path / "checkpoint")
    (tmp_path / "checkpoint").write_text("a file in its place")
    run.train()
    assert not run.checkpointer.save(3)


def test_save_now_saves_once(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, interval=10)
    run.train()
    assert not run.checkpointer.save(1)
    run.checkpointer.save_now(1)
    manifest = tmp_path / "checkpoint" / "step-1" / "manifest.json"
    assert json.loads(manifest.read_text())["content"] == "full"
    written = manifest.stat().st_mtime_ns
    run.checkpointer.save_now(1)
    run.close()
    assert manifest.stat().st_mtime_ns == written


def test_a_step_is_replaced_when_an_older_one_is_resumed(tmp_path: Path) -> None:
    _saved(tmp_path, 2)
    run = SmallRun(tmp_path)
    run.checkpointer.load(1)
    run.data.index = 50
    losses = []
    for _ in range(2):
        losses.append(run.train())
        if run.step == 2:
            assert run.checkpointer.save(2)
    run.close()
    assert _names(tmp_path) == {"step-1", "step-2"}
    again = SmallRun(tmp_path)
    assert again.checkpointer.load() and again.data.index == 51
    assert again.train() == losses[1]


def test_model_only_checkpoints_have_their_own_rhythm(tmp_path: Path) -> None:
    config = {"interval": 4, "export_dtype": "bfloat16"}
    run, _ = _saved(tmp_path, 9, **config, model_only=ModelOnly(interval=2, steps=[3], keep_every=4))
    assert _names(tmp_path) == {"step-4", "step-8"}
    assert {path.name for path in (tmp_path / "model_checkpoint").iterdir()} == {"step-3", "step-4", "step-8"}
    folder = tmp_path / "model_checkpoint" / "step-8"
    assert json.loads((folder / "manifest.json").read_text())["content"] == "model"
    again = SmallRun(tmp_path / "other", initial_load_path=str(folder))
    assert again.checkpointer.load() and again.step == 0
    run.step = 0
    assert run.checkpointer.load(8)
    assert torch.equal(again.model.weight, run.model.weight.bfloat16().float())


def test_a_final_model_is_no_place_to_resume_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, losses = _saved(tmp_path, 3, interval=2, last_save_model_only=True)
    run = SmallRun(tmp_path, interval=2, last_save_model_only=True)
    run.checkpointer.load()
    run.train()
    run.checkpointer.save(3, last_step=True)
    run.close()
    assert _names(tmp_path) == {"step-2", "step-3"}
    again = SmallRun(tmp_path)
    assert again.checkpointer.load() and again.step == 2
    assert "step-3: holds the weights only" in caplog.text
    assert again.train() == losses[2]


def test_weights_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    run.model.register_parameter("extra", torch.nn.Parameter(torch.ones(2)))
    run.train()
    run.checkpointer.save(1)
    run.close()
    with pytest.raises(FatalFault, match=r"step-1 holds weights that this model hasn't: extra"):
        SmallRun(tmp_path).checkpointer.load()


def test_kill_trials(tmp_path: Path) -> None:
    dist.destroy_process_group()  # the forked processes make their own
    try:
        assert run_trials(tmp_path, 20, seed=1, longest=0.4).total() == 20
    finally:
        alone(tmp_path / "store")


def two_ranks(case: tuple[str, Path]) -> Any:
    """On each rank: save, damage the other rank's file, load; what is loaded."""
    mode, folder = case
    run = SmallRun(folder, async_mode=mode)
    # A tensor of this rank only, so that both write files.
    own = {"own": torch.full((8,), float(dist.get_rank()))}
    run.checkpointer.states["train_state"].state_dict = lambda: {"step": run.step, f"of_{dist.get_rank()}": own}
    for _ in range(3):
        run.train()
        run.checkpointer.save(run.step)
    run.close()
    files = sorted(json.loads((folder / "checkpoint" / "step-3" / "manifest.json").read_text())["files"])
    dist.barrier()
    if dist.get_rank() == 0:
        _flip_bit(folder / "checkpoint" / "step-3" / "__1_0.distcp")
    dist.barrier()
    again = SmallRun(folder, async_mode=mode)
    again.checkpointer.load()
    return files, again.step


def test_all_ranks_fall_back_together(tmp_path: Path) -> None:
    cases = [(mode, (mode, tmp_path / mode)) for mode in ("disabled", "async")]
    for ranks in run_on_ranks(2, two_ranks, cases, tmp_path / "ranks").values():
        assert ranks == [([".metadata", "__0_0.distcp", "__1_0.distcp"], 2)] * 2
