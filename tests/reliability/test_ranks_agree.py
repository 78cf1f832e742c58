"""Preemption on any one rank ends all of them at one saved step; ranks that differ are refused at the start."""

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mula_titan.components.preemption import Preemption
from mula_titan.components.replicas import compare_facts
from mula_titan.exit_codes import REPLICAS, REQUEUE, FatalFault
from tests.distributed.ranks import run_on_ranks
from tests.distributed.training import GLOBAL_BATCH, write_tokens
from tests.reliability.guarded import Case, Outcome, run

SAVE = {"checkpoint.enable": True, "checkpoint.interval": 100, "checkpoint.last_save_model_only": False}
REPLICATED = {"parallelism.data_parallel_replicate_degree": 2}


def _fault(kind: str, step: int = 2, **more: Any) -> dict[str, Any]:
    values = {"kind": kind, "step": step, "rank": 1, **more}
    return {f"fault_injection.{key}": value for key, value in values.items()}


def _validation(folder: Path) -> dict[str, Any]:
    return {
        "validator.enable": True,
        "validator.freq": 2,
        "validator.dataloader.sources": f'[{{path = "{folder}/tokens-False.npy", eos_id = 0}}]',
    }


def _cases(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "unbroken": SAVE,
        "sigterm": {**SAVE, **_fault("sigterm")},
        "sigterm, resumed": SAVE,
        "sigusr1, guard off": {**SAVE, **_fault("sigusr1", rank=0), "guard.policy": "off"},
        "in validation": {**SAVE, **_fault("sigterm_in_validation"), **_validation(folder)},
        "walltime": {**SAVE, "preemption.end_time": int(time.time()) + 60, "preemption.margin_seconds": 100},
        "saved already": {**SAVE, **_fault("sigterm"), "checkpoint.interval": 1, "checkpoint.async_mode": "async"},
        "in the last step": {**SAVE, **_fault("sigterm", step=4)},
        "equal replicas": {**REPLICATED, "replicas.interval": 1},
        "other weight": {**REPLICATED, **_fault("other_weight", module="lm_head.weight")},
        "equal whole weights": {"optimizer.sharding": "epso", "replicas.interval": 1},
        "other whole weight": {"optimizer.sharding": "epso", **_fault("other_weight", module="lm_head.weight")},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agree")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Outcome]]:
    """All cases, on ranks that are started once."""
    data = write_tokens(folder)
    cases = [(name, Case(data, folder / name.split(", resumed")[0], flags)) for name, flags in _cases(folder).items()]
    results = run_on_ranks(2, run, cases, folder / "ranks")
    for name, ranks in results.items():
        for rank, result in enumerate(ranks):
            assert not isinstance(result, str), f"rank {rank} of {name}:\n{result}"
    return results


@pytest.mark.parametrize(
    ("name", "step", "reason"),
    [
        ("sigterm", 2, "SIGTERM"),
        ("sigusr1, guard off", 2, "SIGUSR1"),
        ("in validation", 2, "SIGTERM"),  # of step 1; the step after it is the last
        ("walltime", 1, "end of the walltime"),
        ("saved already", 2, "SIGTERM"),
    ],
)
def test_all_ranks_save_the_same_step(
    name: str, step: int, reason: str, folder: Path, outcomes: dict[str, list[Outcome]]
) -> None:
    for rank in outcomes[name]:
        assert (rank.exit_code, rank.step, rank.position) == (REQUEUE, step, step * GLOBAL_BATCH)
        assert f"step {step} is saved" in rank.message
    signalled = 0 if "sigusr1" in name else 1
    assert reason in outcomes[name][signalled].message
    saved = {path.name for path in (folder / name / "checkpoint").glob("step-*")}
    assert f"step-{step}" in saved and f"step-{step + 1}" not in saved
    assert (folder / name / "checkpoint" / f"step-{step}" / "manifest.json").is_file()


def test_a_preempted_run_goes_on_to_the_same_losses(outcomes: dict[str, list[Outcome]]) -> None:
    for before, after, whole in zip(
        outcomes["sigterm"], outcomes["sigterm, resumed"], outcomes["unbroken"], strict=True
    ):
        assert before.losses | after.losses == whole.losses
        assert (sorted(before.losses), sorted(after.losses)) == ([1, 2], [3, 4])
        assert after.checksum == whole.checksum


def test_a_run_at_its_end_ends_as_planned(outcomes: dict[str, list[Outcome]]) -> None:
    for rank in outcomes["in the last step"]:
        assert (rank.exit_code, rank.step) == (0, 4)


@pytest.mark.parametrize(
    ("equal", "other"), [("equal replicas", "other weight"), ("equal whole weights", "other whole weight")]
)
def test_other_weights_are_refused_at_the_start(equal: str, other: str, outcomes: dict[str, list[Outcome]]) -> None:
    assert [rank.exit_code for rank in outcomes[equal]] == [0, 0]
    for rank in outcomes[other]:
        assert (rank.exit_code, rank.step, rank.losses) == (REPLICAS, 0, {})
        assert "Replicas differ in their weights on ranks [0, 1]: lm_head.weight" in rank.message


def test_odd_ranks_are_named() -> None:
    usual = {"code": "a" * 32, "configuration": "b" * 32, "host": "h", "clock": 0.0}
    compare_facts([usual, {**usual, "host": "other", "clock": 9.0}])
    with pytest.raises(FatalFault) as caught:
        compare_facts([usual, usual, {**usual, "code": "c" * 32, "host": "node7"}])
    assert caught.value.exit_code == REPLICAS
    assert "code: rank 2 (node7: cccccccccccc), all others aaaaaaaaaaaa." in str(caught.value)


def configured_differently(folder: Path) -> Any:
    """A case whose configuration or data depends on the rank."""
    rank = dist.get_rank()
    flags: dict[str, Any] = {"hf_assets_path": str(Path(__file__).parents[2] / "assets/tokenizer")}
    if folder.name == "configuration":
        flags["optimizer.lr"] = 1e-3 * (1 + rank)
    # The same path on both hosts, as a node's own disk would have it.
    with contextlib.chdir(folder / f"{rank}"):
        return run(Case("tokens.npy", folder / "run", flags))


def test_other_configuration_and_data_are_refused(tmp_path: Path) -> None:
    cases = [(kind, tmp_path / kind) for kind in ("configuration", "data")]
    content = Path(write_tokens(tmp_path)).read_bytes()
    for kind, path in cases:
        for rank in range(2):
            (path / f"{rank}").mkdir(parents=True)
            odd = kind == "data" and rank == 1
            (path / f"{rank}" / "tokens.npy").write_bytes(content[:-4] + b"\1\0\0\0" if odd else content)
    for kind, ranks in run_on_ranks(2, configured_differently, cases, tmp_path / "ranks").items():
        for rank in ranks:
            assert not isinstance(rank, str), rank
            assert (rank.exit_code, rank.step) == (REPLICAS, 0)
            assert f"Ranks differ in their set-up. {kind}: rank 1" in rank.message


def test_signals_get_their_former_meaning() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    preemption = Preemption(Preemption.Config())
    assert not preemption.requested()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    assert preemption.requested() and preemption.reason == "SIGUSR1"
    preemption.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_walltime_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    for margin, wanted in ((900, False), (1100, True)):
        preemption = Preemption(Preemption.Config(margin_seconds=margin))
        assert preemption.requested() == wanted
        preemption.close()
