"""Preemption: a signal or the end of the walltime on any rank makes all ranks save the same step and end."""

import os
import signal
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torchtitan.config import Configurable
from torchtitan.tools.logging import logger

SLURM_END = "SLURM_JOB_END_TIME"


class Preemption(Configurable):
    """Remembers that this rank was asked to end; the trainer asks at each step and each validation batch.

    The answer travels with the numerical guard's reduction, so that all ranks act at the same step.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = True
        """On SIGTERM, SIGUSR1 or near the end of the walltime: save, and end with the requeue exit code."""

        end_time: int = 0
        """When the job's walltime ends, Unix seconds. 0: SLURM_JOB_END_TIME if that is set, else never."""

        margin_seconds: int = 300
        """Begin to save so long before the end of the walltime, s."""

        def __post_init__(self) -> None:
            for name in ("end_time", "margin_seconds"):
                if getattr(self, name) < 0:
                    raise ValueError(f"{name} = {getattr(self, name)} must be at least 0")

    def __init__(self, config: Config):
        self.config = config
        self.reason: str | None = None
        self._end = config.end_time or int(os.environ.get(SLURM_END, "0"))
        self._previous: dict[signal.Signals, Any] = {}
        if config.enable:
            self._previous = {number: signal.signal(number, self._on_signal) for number in self.SIGNALS}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name

    def requested(self) -> bool:
        """Whether this rank was asked to end."""
        is_late = self._end and time.time() > self._end - self.config.margin_seconds
        if self.config.enable and self.reason is None and is_late:
            self.reason = "end of the walltime"
        return self.reason is not None

    def close(self) -> None:
        """Give the signals their former meaning."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if self.reason:
            logger.info(f"Preempted: {self.reason}.")
