from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mula_titan import MulaArgs
from tests.hf.tiny_models import random_model, save, tiny_args


@pytest.fixture(autouse=True)
def _float32_experts(monkeypatch):
    from torchtitan.models.common.moe import GroupedExperts

    def forward(self, x_RD, counts_E):
        parts = x_RD.split(counts_E.tolist())
        return torch.cat(
            [
                F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
                for x, w1, w2, w3 in zip(parts, self.w1_EFD, self.w2_EDF, self.w3_EFD, strict=True)
            ]
        )

    monkeypatch.setattr(GroupedExperts, "forward", forward)


@pytest.fixture
def saved(tmp_path) -> Callable[..., tuple[nn.Module, MulaArgs, Path]]:
    """Make a model and its checkpoint: ``saved("moe", top_k=3)``."""

    def make(kind: str, **changes) -> tuple[nn.Module, MulaArgs, Path]:
        args = tiny_args(kind, **changes)
        model = random_model(args)
        return model, args, save(model, args, tmp_path / "checkpoint" / "step-5")

    return make
