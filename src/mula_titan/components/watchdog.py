"""Watchdog: ends a job that hangs, after writing down where every rank stands."""

import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torchtitan.config import Configurable
from torchtitan.tools.logging import logger

from mula_titan.components.bad_nodes import host_name
from mula_titan.exit_codes import HANG

_ALARM = "mula_titan/hang"


class Watchdog(Configurable):
    """A thread on each rank that compares the time in the current phase with its limit.

    The limit of a step follows the steps seen so far; the first ones (compilation), saves and validations have their
    own. The rank that runs over its limit tells all others through the process group's store; each writes
    ``hang/rank_N.txt`` (phase, time, Python stacks of all threads) and, where PyTorch records collectives,
    ``hang/rank_N.flight_recorder``, and ends with exit code 76.
    """

    active: ClassVar["Watchdog | None"] = None
    """The one that :func:`phase` reports to."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = True
        """End the job when a step, save or validation takes longer than its limit."""

        first_steps: int = 3
        """Steps after a start that have the limit `first_step_seconds`: they compile and open connections."""

        first_step_seconds: float = 1800.0
        """Limit of each of the first steps, s."""

        factor: float = 10.0
        """Limit of later steps: so many times the median of the last 50."""

        minimum_seconds: float = 300.0
        """Least limit of a step, s."""

        save_seconds: float = 3600.0
        """Limit of a save or load, s."""

        validation_seconds: float = 3600.0
        """Limit of a validation, s."""

        poll_seconds: float = 5.0
        """How often the thread looks, s."""

        def __post_init__(self) -> None:
            for name in ("first_step_seconds", "factor", "minimum_seconds", "save_seconds", "validation_seconds"):
                if not getattr(self, name) > 0:
                    raise ValueError(f"{name} = {getattr(self, name)} must be positive")
            if not 0 < self.poll_seconds <= min(self.minimum_seconds, self.first_step_seconds):
                raise ValueError(f"poll_seconds = {self.poll_seconds} must be positive and below the limits of steps")

    def __init__(self, config: Config, *, dump_folder: str):
        self.config = config
        self._folder = Path(dump_folder) / "hang"
        self._seconds: deque[float] = deque(maxlen=50)
        self._steps = 0
        self._phase = ("start", time.monotonic(), float("inf"))
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch; does nothing if switched off."""
        if not self.config.enable:
            return
        Watchdog.active = self
        # An own connection: the training thread may hold the store's lock while it waits for a rank that hangs.
        self._store = dist.distributed_c10d._get_default_store().clone()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        if Watchdog.active is self:
            Watchdog.active = None
        self._ended.set()
        if self._thread is not None:
            faulthandler.cancel_dump_traceback_later()
            self._thread.join()

    def limit(self, phase: str) -> float:
        """Seconds that a phase may take."""
        c = self.config
        if phase == "step":
            if self._steps < c.first_steps:
                return c.first_step_seconds
            return max(c.minimum_seconds, c.factor * statistics.median(self._seconds))
        return {"save": c.save_seconds, "validation": c.validation_seconds}.get(phase, c.first_step_seconds)

    def _enter(self, phase: str) -> None:
        limit = self.limit(phase)
        self._phase = (phase, time.monotonic(), limit)
        # If something holds the interpreter's lock for good, this thread of C code still ends the process.
        faulthandler.dump_traceback_later(1.5 * limit + 60, exit=True)

    def _leave(self, phase: str, begun: float) -> None:
        if phase == "step":
            self._steps += 1
            if self._steps > self.config.first_steps:
                self._seconds.append(time.monotonic() - begun)
            elif self._steps == self.config.first_steps:
                self._seconds.clear()
                self._seconds.append(time.monotonic() - begun)

    def _watch(self) -> None:
        while not self._ended.wait(self.config.poll_seconds):
            phase, begun, limit = self._phase
            seconds = time.monotonic() - begun
            if seconds > limit:
                reason = f"{phase} has taken {seconds:.0f} s, limit {limit:.0f} s"
                self._tell(f"rank {dist.get_rank()} ({host_name()}): {reason}")
                self._end(reason)
            elif alarm := self._heard():
                self._end(f"alarm of {alarm}")

    def _tell(self, text: str) -> None:
        with suppress(RuntimeError):  # the store's host may be gone; every rank has its own limit
            self._store.set(_ALARM, text)

    def _heard(self) -> str | None:
        try:
            return self._store.get(_ALARM).decode() if self._store.check([_ALARM]) else None
        except RuntimeError:
            return None

    def _end(self, reason: str) -> None:
        rank, (phase, begun, _) = dist.get_rank(), self._phase
        path = self._folder / f"rank_{rank}.txt"
        message = f"Watchdog on rank {rank} ({host_name()}): {reason}. Stacks of all ranks: {self._folder}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                now = time.monotonic() - begun
                file.write(
                    f"rank {rank} on {host_name()}, process {os.getpid()}\n{reason}\nin {phase} for {now:.1f} s\n\n"
                )
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            if record := torch._C._distributed_c10d._dump_fr_trace():  # type: ignore[attr-defined]
                (self._folder / f"rank_{rank}.flight_recorder").write_bytes(record)
        except Exception as error:  # ending the job matters more than the files
            message += f" ({error})"
        logger.critical(message)
        print(message, file=sys.stderr, flush=True)
        time.sleep(2 * self.config.poll_seconds + 1)  # until the others have heard and written theirs
        os._exit(HANG)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Say what the training thread does: ``"step"``, ``"save"`` or ``"validation"``. Free without a watchdog."""
    watchdog = Watchdog.active
    if watchdog is None:
        yield
        return
    begun = time.monotonic()
    watchdog._enter(name)
    try:
        yield
    finally:
        watchdog._leave(name, begun)
        watchdog._enter("between steps")
