"""torchtitan's validator, which ends early when the job is preempted, and which the watchdog knows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torchtitan.components.validate import Validator
from torchtitan.tools.logging import logger

from mula_titan.components.watchdog import phase


class _Interrupted(Exception):
    """All ranks leave the validation at the same batch."""


class MulaValidator(Validator):
    """Validation that gives way to preemption."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    must_stop: Callable[[], bool] | None = None
    """Asked at every batch; must answer alike on all ranks."""

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, model_parts: list[nn.Module]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """As torchtitan's, once for each batch."""
        if self.must_stop is not None and self.must_stop():
            raise _Interrupted
        return super().post_dataloading_process(input_dict, labels, model_parts)

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """As torchtitan's; without a result if interrupted."""
        with phase("validation"):
            try:
                super().validate(model_parts, step)
            except _Interrupted:
                logger.warning(f"Validation at step {step} interrupted: the job is to end.")
                for part in model_parts:
                    part.train()
