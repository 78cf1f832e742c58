"""The data of one optimizer step on this rank, kept so that the step can be run again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MicroBatch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Inputs and labels, as a data loader yields them."""


@dataclass
class StepData:
    """What :meth:`MulaTrainer.train_step` computes on."""

    step: int
    groups: list[list[MicroBatch]]
    """A list for each forward and backward pass; with pipeline parallelism that has several micro-batches."""
    local_valid_tokens: torch.Tensor
    global_valid_tokens: torch.Tensor
    """On the device."""
    random_state: dict[str, Any]
    """State of torch's generators before the step; empty where nobody will ask."""
    samples: list[int]
    """Numbers of this rank's sequences in the global order; empty if the loader has no such order."""

    def save(self, path: Path, world_size: int) -> None:
        """Write it for :meth:`load`."""
        content = {
            "step": self.step,
            "world_size": world_size,
            "groups": self.groups,
            "local_valid_tokens": self.local_valid_tokens,
            "global_valid_tokens": self.global_valid_tokens.cpu(),
            "random_state": self.random_state,
            "samples": self.samples,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)

    @classmethod
    def load(cls, path: Path, world_size: int, device: torch.device) -> "StepData":
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: no such file, or from another number of ranks.
        """
        if not path.is_file():
            raise ValueError(f"{path} is missing: replay.bundle must be a folder faults/step-N of this many ranks")
        content = torch.load(path, weights_only=True, map_location="cpu")
        saved_on = content.pop("world_size")
        if saved_on != world_size:
            raise ValueError(f"{path} was written by {saved_on} ranks; replay it on as many, not on {world_size}")
        content["global_valid_tokens"] = content["global_valid_tokens"].to(device)
        content["groups"] = [[tuple(micro_batch) for micro_batch in group] for group in content["groups"]]
        return cls(**content)


def samples_of_step(dataloader: Any, data_rank: int, num_batches: int) -> list[int]:
    """Numbers of the sequences that this rank's next batches will hold; empty for loaders without a global order.

    Args:
        dataloader: :class:`mula_titan.data.TokenDataLoader`, or another.
        data_rank: this rank among those that read different data.
        num_batches: how many batches.
    """
    if not hasattr(dataloader, "locate"):
        return []
    start = dataloader.state_dict()["sample_index"] + data_rank * dataloader.local_batch_size
    return [
        start + batch * dataloader.samples_per_next + row
        for batch in range(num_batches)
        for row in range(dataloader.local_batch_size)
    ]
