"""The program as a user starts it: a hang ends with every rank's stack, a signal with a save and the requeue code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mula_titan.exit_codes import HANG, REQUEUE
from tests.distributed.training import Layout, _flags, write_tokens


def _command(folder: Path, data: str, flags: dict[str, Any]) -> list[str]:
    config = folder.parent / "config.toml"
    config.write_text('config = "mula_debug"\n')
    words = _flags(Layout(data=data, flags={"training.steps": 2000, **flags}), str(folder))
    return [sys.executable, "-m", "mula_titan.cli", "train", str(config), "--nproc", "2", *words]


def test_a_hang_ends_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    flags = {
        "fault_injection.kind": "hang",
        "fault_injection.step": 4,
        "fault_injection.rank": 1,
        "watchdog.first_steps": 1,
        "watchdog.minimum_seconds": 4,
        "watchdog.poll_seconds": 0.5,
        "comm.trace_buf_size": 100,
    }
    command = _command(tmp_path / "run", write_tokens(tmp_path), flags)
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == HANG, done.stderr[-3000:]
    stacks = {rank: (tmp_path / "run" / "hang" / f"rank_{rank}.txt").read_text() for rank in (0, 1)}
    assert "fault_injection.py" in stacks[1] and "in_step" in stacks[1]
    assert "all_reduce" in stacks[0] or "all_gather" in stacks[0] or "forward" in stacks[0]
    for rank, text in stacks.items():
        assert text.startswith(f"rank {rank} on ") and "in step for" in text
    assert any("step has taken" in text for text in stacks.values())
    assert (tmp_path / "run" / "hang" / "rank_0.flight_recorder").stat().st_size > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_saves_and_asks_for_requeue(number: signal.Signals, tmp_path: Path) -> None:
    flags = {"checkpoint.enable": True, "checkpoint.interval": 100000}
    command = _command(tmp_path / "run", write_tokens(tmp_path), flags)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.exists() or not metrics.read_text():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0][-3000:]
        time.sleep(0.05)
    os.kill(process.pid, number)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == REQUEUE, output[-3000:]
    saved = [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()]
    assert len(saved) == 1
    assert f"mula-titan: Preempted ({number.name}): step {saved[0].removeprefix('step-')} is saved." in output
