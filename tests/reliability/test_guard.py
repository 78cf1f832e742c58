"""The numerical guard in the real trainer on two ranks: a skipped step leaves no trace, the report names the cause."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mula_titan.components.bad_nodes import host_name, read_bad_nodes
from mula_titan.components.diagnosis import Diagnosis, Finding
from mula_titan.components.guard import NumericalGuard
from mula_titan.exit_codes import HARDWARE, NUMERICS, FatalFault
from tests.distributed.ranks import run_on_ranks
from tests.distributed.training import GLOBAL_BATCH, write_tokens
from tests.reliability.guarded import Case, Outcome, run

EP = {"parallelism.expert_parallel_degree": 2}
PP = {
    "parallelism.pipeline_parallel_degree": 2,
    "parallelism.pipeline_parallel_microbatch_size": 2,
    "training.local_batch_size": 4,
    "model.load_balance_per_layer": True,
}
SAVE = {"checkpoint.enable": True, "checkpoint.interval": 2, "checkpoint.last_save_model_only": False}


def _fault(kind: str, step: int = 3, **more: Any) -> dict[str, Any]:
    values = {"kind": kind, "step": step, "rank": 1, "module": "layers.1", **more}
    return {f"fault_injection.{key}": value for key, value in values.items()}


CASES: dict[str, dict[str, Any]] = {
    "clean": EP,
    "off": {**EP, "guard.policy": "off", "preemption.enable": False},
    "twice": {**EP, "replay.interval": 2},
    "nan output": {**EP, **_fault("nan_output"), **SAVE},
    "nan output, resumed": {**EP, **SAVE, "training.steps": 5},
    "nan gradient": {**EP, **_fault("nan_gradient")},
    "pipeline": {**PP, **_fault("nan_gradient", rank=0, module="layers.0")},
    "epso": {**EP, **_fault("nan_gradient"), "optimizer.sharding": "epso"},
    "once": _fault("nan_output", run=1),
    "stop": {**EP, **_fault("nan_output"), "guard.policy": "stop"},
    "replayed": EP,
    "replayed with the fault": {**EP, **_fault("nan_output", steps=2)},
    "every step": {**EP, **_fault("nan_output", steps=9), "guard.max_in_a_row": 1, "guard.find_cause": "false"},
    "spike": {**EP, **_fault("spike", step=4, module="lm_head"), "guard.spike_sigma": 6, "guard.spike_window": 2},
    "rollback": {**EP, **_fault("nan_output", step=4), **SAVE, "guard.policy": "rollback"},
    "no way back": {**EP, **_fault("nan_output"), "guard.policy": "rollback"},
    "bit flip": {**EP, **_fault("flip_bit", step=2, run=2), "replay.interval": 2},
}
WATCHED = {"nan output": 3, "nan gradient": 3, "pipeline": 3, "epso": 3, "once": 3, "spike": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guard")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Outcome]]:
    """All cases, on ranks that are started once."""
    data = write_tokens(folder)
    cases = []
    for name, flags in CASES.items():
        home = folder / name.split(",")[0]
        replay = name.startswith("replayed")
        if replay:
            flags = {**flags, "replay.bundle": str(folder / "stop" / "faults" / "step-3")}
        cases.append((name, Case(data, home, flags, watched_step=WATCHED.get(name, 0), replay=replay)))
    results = run_on_ranks(2, run, cases, folder / "ranks")
    for name, ranks in results.items():
        for rank, result in enumerate(ranks):
            assert not isinstance(result, str), f"rank {rank} of {name}:\n{result}"
    return results


def _report(folder: Path, name: str, step: int = 3) -> dict[str, Any]:
    return json.loads((folder / name / "faults" / f"step-{step}" / "report.json").read_text())


@pytest.mark.parametrize("name", ["off", "twice"])
def test_checks_change_no_bit(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    for got, want in zip(outcomes[name], outcomes["clean"], strict=True):
        assert (got.losses, got.checksum, got.exit_code) == (want.losses, want.checksum, 0)
        assert len(got.losses) == 4


@pytest.mark.parametrize("name", WATCHED)
def test_a_skipped_step_leaves_no_trace(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    for rank in outcomes[name]:
        assert rank.changed == []
        assert (rank.exit_code, rank.step, rank.total_faults) == (0, 4, 1)
        assert rank.position == 4 * GLOBAL_BATCH, "the data of the step is used up"
        assert sorted(rank.losses) == [step for step in (1, 2, 3, 4) if step != WATCHED[name]]
        assert all(math.isfinite(loss) for loss in rank.losses.values())


def test_a_good_step_is_seen_to_change_things(outcomes: dict[str, list[Outcome]]) -> None:
    for good, skipped in zip(outcomes["clean"], outcomes["nan output"], strict=True):
        assert good.losses[1] == skipped.losses[1]
        assert good.losses[2] == skipped.losses[2]
        assert good.losses[4] != skipped.losses[4]
        assert good.checksum != skipped.checksum


def test_counters_survive_a_resume(outcomes: dict[str, list[Outcome]]) -> None:
    for rank in outcomes["nan output, resumed"]:
        assert (sorted(rank.losses), rank.step, rank.total_faults) == ([5], 5, 1)


@pytest.mark.parametrize(
    ("name", "rank", "first_bad"),
    [
        ("nan output", 1, "forward layers.1"),
        ("nan gradient", 1, "backward layers.1"),
        ("pipeline", 0, "backward layers.0"),
    ],
)
def test_the_report_names_rank_module_and_samples(
    name: str, rank: int, first_bad: str, folder: Path, outcomes: dict[str, list[Outcome]]
) -> None:
    report = _report(folder, name)
    assert report["origin"] == rank
    assert report["findings"][rank]["first_bad"].startswith(first_bad)
    assert report["findings"][rank]["host"] == host_name()
    assert report["suspects"] == []
    # Step 3 takes samples 16 to 23, with micro-batches of two on each of two ranks (one, with a pipeline).
    got = [sample["sample"] for sample in report["findings"][rank]["samples"]]
    assert got == (list(range(16, 24)) if name == "pipeline" else [18, 19, 22, 23])
    assert all(Path(sample["path"]).is_file() for sample in report["findings"][rank]["samples"])


def test_a_fault_that_does_not_come_back_is_the_hardware(folder: Path, outcomes: dict[str, list[Outcome]]) -> None:
    report = _report(folder, "once")
    assert (report["origin"], report["suspects"]) == (None, [1])
    assert "did not come back in two more runs: suspect the hardware of rank 1" in report["text"]
    assert read_bad_nodes(folder / "once" / "bad_nodes.txt") == [host_name()]
    assert not (folder / "nan output" / "bad_nodes.txt").read_text()


def test_stop(folder: Path, outcomes: dict[str, list[Outcome]]) -> None:
    for rank in outcomes["stop"]:
        assert (rank.exit_code, rank.step) == (NUMERICS, 3)
        assert "Step 3: loss not finite on 1 ranks; gradient norm not finite." in rank.message
        assert "First bad: forward layers.1 on rank 1" in rank.message
        assert 'guard.policy is "stop"' in rank.message


def test_a_bundle_can_be_replayed(outcomes: dict[str, list[Outcome]]) -> None:
    assert [rank.exit_code for rank in outcomes["replayed"]] == [0, 0]
    assert [rank.exit_code for rank in outcomes["replayed with the fault"]] == [NUMERICS, NUMERICS]


def test_too_many_in_a_row_stop(outcomes: dict[str, list[Outcome]]) -> None:
    for rank in outcomes["every step"]:
        assert (rank.exit_code, rank.step, rank.total_faults) == (NUMERICS, 4, 2)
        assert "These are 2 in a row, more than guard.max_in_a_row." in rank.message


def test_spikes_are_measured_on_the_reduced_loss(folder: Path, outcomes: dict[str, list[Outcome]]) -> None:
    assert "spikes above" in _report(folder, "spike", 4)["faults"][0]


def test_rollback_goes_on_behind_the_bad_data(outcomes: dict[str, list[Outcome]]) -> None:
    for rank, clean in zip(outcomes["rollback"], outcomes["clean"], strict=True):
        assert (rank.exit_code, rank.step, rank.total_faults) == (0, 4, 1)
        assert rank.position == 6 * GLOBAL_BATCH  # four steps, two of them done again with new data
        assert rank.losses[2] == clean.losses[2]
        assert rank.losses[3] != clean.losses[3]
    for rank in outcomes["no way back"]:
        assert rank.exit_code == NUMERICS
        assert "There is no checkpoint to roll back to." in rank.message


def test_a_flipped_bit_is_found_and_its_host_listed(folder: Path, outcomes: dict[str, list[Outcome]]) -> None:
    for rank in outcomes["bit flip"]:
        assert (rank.exit_code, rank.step) == (HARDWARE, 2)
        assert "first on rank 1" in rank.message and "forward layers.1" in rank.message
    assert _report(folder, "bit flip", 2)["suspects"] == [1]
    assert read_bad_nodes(folder / "bit flip" / "bad_nodes.txt") == [host_name()]


def _votes(loss: float = 2.0, norm: float = 1.0, bad: float = 0.0) -> list[float]:
    return [loss, norm, bad, 0.0, 0.0, 0.0]


def test_window_of_faults() -> None:
    guard = NumericalGuard(NumericalGuard.Config(policy="skip", max_in_a_row=1, max_in_window=2, window=10))
    for bad in (1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0):  # the first has left the window when the third comes
        if guard.judge(_votes(bad=bad)).faults:
            guard.refuse_too_many("bad")
    guard.judge(_votes(bad=1))
    with pytest.raises(FatalFault, match=r"3 in 10 steps, more than guard.max_in_window"):
        guard.in_a_row = 1
        guard._faulty_steps.append(guard._seen)
        guard.refuse_too_many("bad")


def test_spike_thresholds() -> None:
    config = NumericalGuard.Config(policy="skip", spike_sigma=3, spike_window=4)
    guard = NumericalGuard(config)
    for loss in (1.0, 2.0, 1.0, 2.0):
        assert not guard.judge(_votes(loss=loss)).faults
    # Mean 1.5, deviation 0.5: 3.0 is no spike, 3.1 is, and doesn't enter the window.
    assert guard.judge(_votes(loss=3.1)).faults == ["loss 3.1 spikes above 3"]
    again = NumericalGuard(config)
    again.load_state_dict(guard.state_dict())
    assert (again.total, again.in_a_row) == (1, 1)
    assert not again.judge(_votes(loss=3.0)).faults
    assert again.judge(_votes(norm=1.1)).faults == ["gradient norm 1.1 spikes above 1.03"]


def test_bad_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    guard = NumericalGuard(NumericalGuard.Config(check_weights=True))
    assert int(guard.bad_weights([model])) == 0  # type: ignore[arg-type]
    with torch.no_grad():
        model[1].weight[0, 0] = -math.inf
    assert int(guard.bad_weights([model])) == 1  # type: ignore[arg-type]
    assert guard.judge([2.0, 1.0, 0, 0, 1, 0]).faults == ["weights not finite on 1 ranks"]


def test_the_earliest_rank_is_the_origin() -> None:
    findings = [
        Finding(0, "a", math.nan, first_bad="forward layers.2", first_bad_at=9),
        Finding(1, "b", 1.0, first_bad="backward layers.1", first_bad_at=30),
        Finding(2, "c", math.nan, first_bad="forward layers.1", first_bad_at=5),
    ]
    diagnosis = Diagnosis(7, ["loss not finite on 2 ranks"], findings)
    assert diagnosis.origin is findings[2]
    assert "Loss not finite on rank 0 (a), rank 2 (c). First bad: forward layers.1 on rank 2 (c)." in diagnosis.text()
