"""AdamW as an ``OptimizersContainer``: scalars instead of parameter-group tables, no decay on norms and embeddings."""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch.nn as nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

NO_DECAY_PATTERN = r"(norm|tok_embeddings)\.weight$"
"""Parameters without weight decay: every norm's weight and the input embedding."""


class AdamWContainer(OptimizersContainer):
    """torchtitan's optimizer container with PyTorch's AdamW (arXiv 1711.05101) on all parameters."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        lr: float = 4e-4
        """Peak learning rate."""

        beta1: float = 0.9
        """Decay of the first moment."""

        beta2: float = 0.95
        """Decay of the second moment."""

        eps: float = 1e-8
        """Added to the root of the second moment."""

        weight_decay: float = 0.1
        """Decoupled weight decay, multiplied by the learning rate."""

        decay_all: bool = False
        """Decay norms and embeddings too, as Optimus did."""

        def groups(self) -> list[ParamGroupConfig]:
            """``param_groups`` if given, else one group without decay and one with it."""
            if self.param_groups:
                return self.param_groups
            kwargs = {
                "lr": self.lr,
                "betas": (self.beta1, self.beta2),
                "eps": self.eps,
                "weight_decay": self.weight_decay,
            }
            decayed = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=kwargs)
            if self.decay_all:
                return [decayed]
            undecayed = {**kwargs, "weight_decay": 0.0}
            return [
                ParamGroupConfig(pattern=NO_DECAY_PATTERN, optimizer_name="AdamW", optimizer_kwargs=undecayed),
                decayed,
            ]

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        config = replace(config)
        config.param_groups = config.groups()
        super().__init__(config, model_parts=model_parts)

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        """As torchtitan's, but a pattern may match nothing on a pipeline stage (a dense one has no norm weights)."""
        names = [name for name, param in model.named_parameters() if param.requires_grad]
        claimed: set[str] = set()
        used = []
        for group in param_group_configs:
            matched = {name for name in names if name not in claimed and re.search(group.pattern, name)}
            if matched:
                claimed |= matched
                used.append(group)
        return OptimizersContainer._build_param_groups(model, used, impl_kwargs)
