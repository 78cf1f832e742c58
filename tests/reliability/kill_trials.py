"""kill -9 at random moments of start, training, saving and deleting; each next start must go on to the same losses.

    python -m tests.reliability.kill_trials --trials 200

A trial is a forked process that resumes, trains and saves every step until it is killed.
"""

import argparse
import os
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from mula_titan.components.manifest import DELETING, MANIFEST, UNFINISHED
from tests.reliability.small_run import SmallRun, alone

MODES = ("disabled", "async")


def reference(folder: Path, steps: int) -> list[float]:
    """Losses of a run that nothing interrupts."""
    return _in_child(lambda: _reference(folder, steps), folder / "reference")


def _reference(folder: Path, steps: int) -> str:
    alone(folder / "store")
    run = SmallRun(folder / "unbroken", enable=False)
    return " ".join(run.train().hex() for _ in range(steps))


def _in_child(function: Callable[[], str], result: Path) -> list[float]:
    pid = os.fork()
    if pid == 0:
        result.write_text(function())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return [float.fromhex(word) for word in result.read_text().split()]


def _train_until_killed(folder: Path, mode: str, log: Path, want: list[float]) -> None:
    """Append ``s STEP`` when a checkpoint is durable; write what went wrong to ``wrong`` and end."""
    try:
        alone(folder / "store")
        run = SmallRun(folder / "run", async_mode=mode)
        with log.open("a") as file:
            durable = max((int(line.split()[1]) for line in log.read_text().splitlines()), default=0)
            loaded = run.checkpointer.load()
            assert run.step >= durable, f"step {durable} was durable, but the newest loadable one is {run.step}"
            assert loaded or not durable
            # The checkpoint before, too, must be whole once there are two.
            while run.step < len(want):
                loss = run.train()
                assert loss == want[run.step - 1], f"loss {loss} at step {run.step}, not {want[run.step - 1]}"
                previous = run.checkpointer.save_future
                assert run.checkpointer.save(run.step)
                if mode == "disabled" or previous is not None:
                    file.write(f"s {run.step - (mode != 'disabled')}\n")
                    file.flush()
        run.close()
    except BaseException:
        (folder / "wrong").write_text(traceback.format_exc())
    os._exit(0)


def run_trials(folder: Path, trials: int, seed: int = 0, longest: float = 0.6) -> Counter:
    """Kill ``trials`` processes one after another; how often which state was left on disk.

    Raises:
        AssertionError: a start found no good checkpoint, an older one than was durable, or other losses.
    """
    rng = random.Random(seed)
    want = reference(folder, 200)
    left: Counter = Counter()
    runs = 0
    while left.total() < trials:
        mode = MODES[runs % 2]
        root = folder / f"run-{runs}"
        root.mkdir()
        runs += 1
        log = root / "log"
        log.touch()
        while left.total() < trials:
            pid = os.fork()
            if pid == 0:
                _train_until_killed(root, mode, log, want)
            time.sleep(rng.uniform(0, longest))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
            assert not (root / "wrong").exists(), (root / "wrong").read_text()
            if not killed:
                break  # it came to the end; begin a new run
            names = [path.name for path in (root / "run" / "checkpoint").glob("*")]
            left[_state(names, root)] += 1
    return left


def _state(names: list[str], root: Path) -> str:
    if any(name.startswith(UNFINISHED) for name in names):
        partial = next((root / "run" / "checkpoint").glob(f"{UNFINISHED}*"))
        return "while writing the manifest" if any(MANIFEST in p.name for p in partial.glob("*")) else "while writing"
    if any(name.startswith(DELETING) for name in names):
        return "while deleting"
    return "between saves" if names else "before the first save"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        left = run_trials(Path(folder), options.trials, options.seed)
    for state, count in left.most_common():
        print(f"{count:5d} killed {state}")
    print(f"{left.total()} trials, all resumed to the same losses, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
