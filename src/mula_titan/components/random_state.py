"""torch's random generators as a part of the checkpoint, one entry a rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.stateful import Stateful

RNG = "rng"
"""Key of the random states in a checkpoint; below it one entry per rank."""


class RandomState(Stateful):
    """torch's generators of this rank: CPU and, where there is one, the accelerator's."""

    def __init__(self) -> None:
        self._key = f"rank_{dist.get_rank()}"

    def state_dict(self) -> dict[str, Any]:
        """``{rank: {"cpu": uint8 tensor, "device": uint8 tensor or absent}}``."""
        states = {"cpu": torch.get_rng_state()}
        if torch.accelerator.is_available():
            states["device"] = _device_module().get_rng_state()
        return {self._key: states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the saved streams."""
        states = state_dict[self._key]
        torch.set_rng_state(states["cpu"].cpu())
        if "device" in states:
            _device_module().set_rng_state(states["device"].cpu())

    def is_in(self, checkpoint: str) -> bool:
        """Whether a DCP folder holds this rank's state; a run on more ranks than the saved one finds none."""
        prefix = f"{RNG}.{self._key}."
        return any(key.startswith(prefix) for key in FileSystemReader(checkpoint).read_metadata().state_dict_metadata)


def _device_module() -> Any:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.get_device_module(accelerator)
