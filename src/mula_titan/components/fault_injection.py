"""Faults on purpose, for tests: each kind of damage that the other components must notice."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.config import Configurable

IN_STEP = ("nan_output", "nan_gradient", "flip_bit", "spike")
Kind = Literal[
    "none", "nan_output", "nan_gradient", "flip_bit", "spike", "nan_weight", "other_weight", "hang",
    "sigterm", "sigusr1", "sigterm_in_validation", "failed_save",
]  # fmt: skip


class FaultInjection(Configurable):
    """Does one kind of damage on one rank at chosen steps."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        kind: Kind = "none"
        """
        Tests only. nan_output, nan_gradient, spike, flip_bit: change what a module computes or its gradient;
        nan_weight, other_weight: change a weight, in the step or at the start; hang, sigterm, sigusr1: sleep, or send
        the signal to the own process, in the step; sigterm_in_validation; failed_save: writing fails for want of space.
        """

        step: int = 1
        """First step with the fault."""

        steps: int = 1
        """Steps with it."""

        rank: int = 0
        """Rank with it."""

        module: str = "layers.0"
        """Module or weight that is damaged."""

        run: int = 0
        """Which run of a step has the fault: 1 the one that counts, 2 and 3 its replays. 0: all."""

    def __init__(self, config: Config):
        self.config = config
        self._left = config.steps
        self._run = 0
        self._mine = dist.get_rank() == config.rank

    def _is_due(self, step: int) -> bool:
        return self._left > 0 and step >= self.config.step

    @contextmanager
    def in_step(self, step: int, model_parts: list[nn.Module]) -> Iterator[None]:
        """Around the forward and backward passes of a step and of its replays."""
        kind = self.config.kind
        self._run += 1
        with ExitStack() as stack:
            if self._mine and self._is_due(step) and self.config.run in (0, self._run):
                if kind in IN_STEP:
                    for part in model_parts:
                        for name, module in part.named_modules():
                            if name == self.config.module:
                                stack.callback(module.register_forward_hook(self._damage, prepend=True).remove)
                elif kind == "nan_weight":
                    self._change_weight(model_parts, float("nan"))
                elif kind == "hang":
                    time.sleep(3600)
                elif kind in ("sigterm", "sigusr1"):
                    os.kill(os.getpid(), signal.SIGTERM if kind == "sigterm" else signal.SIGUSR1)
            yield

    def after_step(self, step: int) -> None:
        """The step and its replays are done."""
        self._left -= self._is_due(step)
        self._run = 0

    def at_start(self, model_parts: list[nn.Module]) -> None:
        """Before the first step."""
        if self._mine and self.config.kind == "other_weight":
            self._change_weight(model_parts, 0.5)

    def in_validation(self) -> None:
        """Within a validation pass."""
        if self._mine and self._left and self.config.kind == "sigterm_in_validation":
            self._left -= 1
            os.kill(os.getpid(), signal.SIGTERM)

    def before_write(self, folder: Path) -> None:
        """Where a checkpoint is written."""
        if self.config.kind == "failed_save" and self._left:
            self._left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _damage(self, module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        kind = self.config.kind
        if kind == "nan_gradient":
            if first.requires_grad:
                first.register_hook(lambda grad: grad * float("nan"))
            return None
        if kind == "flip_bit":
            changed = first.clone()
            with torch.no_grad():
                changed.view(-1)[0] = torch.nextafter(first.view(-1)[0], torch.full_like(first.view(-1)[0], torch.inf))
        else:
            changed = first * (float("nan") if kind == "nan_output" else 1e3)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    @torch.no_grad()
    def _change_weight(self, model_parts: list[nn.Module], value: float) -> None:
        for part in model_parts:
            for name, parameter in part.named_parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                if name == self.config.module and local.numel():
                    local.view(-1)[0] = value
