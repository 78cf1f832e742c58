"""The launcher over several hosts, here names on this machine: leaves out bad nodes, restarts, knows when not to."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mula_titan.exit_codes import HANG, HARDWARE, NUMERICS, PREFLIGHT, REQUEUE
from mula_titan.launch import JobOptions, launch, overall_code


def _launch(folder: Path, plan: dict[str, Any], hosts: str = "a b c d", **options: Any) -> int:
    (folder / "plan.json").write_text(json.dumps({"good": hosts.split(), **plan}))
    (folder / "hosts").write_text("\n".join(hosts.split()))
    values = {"nodes": 2, "nproc": 4, "start": "", "back_off": 0.0, "preflight": False, "grace": 0.5, **options}
    job = JobOptions(config=Path("x.toml"), hosts_file=folder / "hosts", state=folder, **values)
    program = [sys.executable, str(Path(__file__).with_name("fake_program.py")), str(folder)]
    return launch(job, ["--training.steps", "5"], program)


def _calls(folder: Path, command: str) -> dict[str, list[dict[str, Any]]]:
    return {
        path.name.removeprefix(f"{command}-"): [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob(f"{command}-*")
    }


def test_a_start(tmp_path: Path) -> None:
    assert _launch(tmp_path, {}) == 0
    calls = _calls(tmp_path, "train")
    meeting = ["--nproc", "4", "--nnodes", "2", "--rdzv-endpoint", "a:29500"]
    words = ["x.toml", *meeting, "--training.steps", "5"]
    assert calls == {h: [{"words": words, "node_rank": str(r)}] for r, h in enumerate("ab")}


def test_a_blamed_node_is_replaced_by_a_spare(tmp_path: Path) -> None:
    assert _launch(tmp_path, {"train a": ["blame itself"], "train b": [HARDWARE, 0]}) == 0
    calls = _calls(tmp_path, "train")
    assert {host: len(c) for host, c in calls.items()} == {"a": 1, "b": 2, "c": 1}
    assert "b:29502" in calls["c"][0]["words"]


def test_an_unreachable_node_is_replaced(tmp_path: Path) -> None:
    assert _launch(tmp_path, {"train b": [255]}) == 0
    assert {host: len(c) for host, c in _calls(tmp_path, "train").items()} == {"a": 2, "b": 1, "c": 1}
    assert "b  # could not be reached" in (tmp_path / "bad_nodes.txt").read_text()


def test_restarts_are_bounded(tmp_path: Path) -> None:
    assert _launch(tmp_path, {"train a": [HANG], "train b": [1]}, max_restarts=2) == HANG
    assert len(_calls(tmp_path, "train")["a"]) == 3


@pytest.mark.parametrize("code", [REQUEUE, NUMERICS])
def test_some_ends_are_final(code: int, tmp_path: Path) -> None:
    assert _launch(tmp_path, {"train a": [code]}) == code
    assert len(_calls(tmp_path, "train")["a"]) == 1


def test_a_node_that_stays_behind_is_ended(tmp_path: Path) -> None:
    assert _launch(tmp_path, {"train a": [1, 0], "train b": ["hang", 0]}) == 0
    assert not (tmp_path / "stayed-b").exists()
    assert len(_calls(tmp_path, "train")["b"]) == 2


def test_preflight_chooses_the_nodes(tmp_path: Path) -> None:
    plan = {"preflight a": [PREFLIGHT], "good": ["b", "d"]}  # a fails alone, c among the others
    assert _launch(tmp_path, plan, preflight=True) == 0
    assert sorted(_calls(tmp_path, "train")) == ["b", "d"]
    assert [call["node_rank"] for call in _calls(tmp_path, "preflight")["b"]] == [None, "0"]
    assert _launch(tmp_path, {**plan, "good": ["d"]}, preflight=True) == PREFLIGHT


def test_signals_are_handed_on(tmp_path: Path) -> None:
    def send() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    plan = {f"train {host}": ["wait for a signal"] for host in "ab"}
    assert _launch(tmp_path, plan, grace=30.0) == REQUEUE
    thread.join()


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has only 1 hosts"):
        _launch(tmp_path, {}, hosts="a a")
    with pytest.raises(ValueError, match="no such file; write the allocation's hosts"):
        launch(JobOptions(config=Path("x"), nodes=1, nproc=1, hosts_file=tmp_path / "none"), [])


def test_one_code_for_many() -> None:
    assert overall_code([0, 0]) == 0
    assert overall_code([-15, REQUEUE, REQUEUE]) == REQUEUE
    assert overall_code([REQUEUE, HARDWARE]) == HARDWARE
    assert overall_code([0, -9]) == 137
