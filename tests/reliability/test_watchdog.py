"""The watchdog's limits, and that one rank's alarm reaches a rank whose own limit is far away."""

import os
import threading
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from mula_titan.components.watchdog import Watchdog, phase
from mula_titan.exit_codes import HANG
from tests.distributed.ranks import run_on_ranks


def test_the_limit_of_a_step_is_learnt() -> None:
    config = Watchdog.Config(first_steps=2, first_step_seconds=900, factor=10, minimum_seconds=20, save_seconds=77)
    watchdog = Watchdog(config, dump_folder="unused")
    with mock.patch("time.monotonic") as clock:
        limits = []
        for seconds in (300, 100, 3, 1, 3):
            limits.append(watchdog.limit("step"))
            clock.return_value = float(seconds)
            watchdog._leave("step", 0.0)
        limits.append(watchdog.limit("step"))
    # Two first ones; then 10 x median of (100), (100, 3), (100, 3, 1), (100, 3, 1, 3).
    assert limits == [900, 900, 1000, 515, 30, 30]
    assert watchdog.limit("save") == 77


def hang_on_one(folder: Path) -> tuple[int, str]:
    """Rank 1 runs over its limit of a second, rank 0 has a quarter of an hour; exit code and file of each."""
    rank = dist.get_rank()
    limit = 1.0 if rank else 900.0
    config = Watchdog.Config(first_step_seconds=limit, minimum_seconds=limit, poll_seconds=0.2)
    watchdog = Watchdog(config, dump_folder=str(folder))
    codes: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()
        raise SystemExit  # of the thread

    with mock.patch.object(os, "_exit", end):
        watchdog.start()
        with phase("step"):
            assert ended.wait(60)
    watchdog.close()
    return codes[0], (folder / "hang" / f"rank_{rank}.txt").read_text()


def test_an_alarm_reaches_all_ranks(tmp_path: Path) -> None:
    (first, stack_0), (second, stack_1) = run_on_ranks(2, hang_on_one, [("hang", tmp_path)], tmp_path / "ranks")["hang"]
    assert (first, second) == (HANG, HANG)
    assert "alarm of rank 1" in stack_0 and "step has taken" in stack_0
    assert "hang_on_one" in stack_0 and "hang_on_one" in stack_1
    assert "alarm" not in stack_1.splitlines()[1]
