"""A process group of one, for what needs no second rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.reliability.small_run import alone


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """This process alone, as torchtitan would set it up."""
    torch.autograd.set_multithreading_enabled(False)
    alone(tmp_path / "store")
    yield
    dist.destroy_process_group()
