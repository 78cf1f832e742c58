"""A run of a few milliseconds a step with the real checkpoint manager; a resumed one must have the same losses."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.optimizer import LRSchedulersContainer

from mula_titan.components.checkpoint import MulaCheckpointManager
from mula_titan.components.optimizer import AdamWContainer

WIDTH = 32


class Position(Stateful):
    """Data position of a loader whose sample ``i`` is a pure function of ``i``."""

    def __init__(self) -> None:
        self.index = 0

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index = state["index"]

    def next(self) -> torch.Tensor:
        self.index += 1
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.index))


class SmallRun(Stateful):
    """One linear layer, AdamW, warm-up and noise from torch's global generator."""

    def __init__(self, folder: Path, **config: Any):
        torch.manual_seed(0)
        self.model = nn.Linear(WIDTH, WIDTH)
        self.optimizers = AdamWContainer(
            AdamWContainer.Config(lr=1e-2, implementation="for-loop"), model_parts=[self.model]
        )
        schedule = LRSchedulersContainer.Config(warmup_steps=20, decay_ratio=0.0)
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=1000)
        self.data = Position()
        self.step = 0
        values = {"enable": True, "interval": 1, "keep_latest_k": 2, "last_save_model_only": False, **config}
        self.checkpointer = MulaCheckpointManager(
            MulaCheckpointManager.Config(**values),
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self) -> float:
        """One step; its loss."""
        self.step += 1
        self.optimizers.zero_grad()
        loss = (self.model(self.data.next()) + 0.1 * torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        return float(loss.detach())

    def close(self) -> None:
        self.checkpointer.maybe_wait_for_saving()
        self.checkpointer.close()


def alone(store: Path) -> None:
    """A process group of this process only."""
    store.unlink(missing_ok=True)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(store), 1))
