from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from mula_titan import MulaArgs
from tests.hf.tiny_models import random_model, save, tiny_args


@pytest.fixture
def saved(tmp_path) -> Callable[..., tuple[nn.Module, MulaArgs, Path]]:
    """Make a model and its checkpoint: ``saved("moe", top_k=3)``."""

    def make(kind: str, **changes) -> tuple[nn.Module, MulaArgs, Path]:
        args = tiny_args(kind, **changes)
        model = random_model(args)
        return model, args, save(model, args, tmp_path / "checkpoint" / "step-5")

    return make
