"""Checkpoint manager: torchtitan's DCP manager that also saves each rank's random state and never deletes blindly."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.tools.logging import logger

from mula_titan.hf.checkpoint_info import write_checkpoint_info
from mula_titan.hf.description import write_description

RNG = "rng"
"""Key of the random states in a checkpoint; below it one entry per rank."""

_STEP_FOLDER = re.compile(r"step-(\d+)")


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


class MulaCheckpointManager(CheckpointManager):
    """torchtitan's manager with random states, model description and safe retention."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    model_info: dict[str, Any] | None = None
    """What :func:`write_checkpoint_info` stores beside the tensors, so that export needs only the checkpoint."""

    def __init__(self, config: Config, *, states: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(config, states={**states, RNG: RandomState()}, **kwargs)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load as torchtitan does; ranks without a saved random state keep their own."""
        random_state = state_dict.get(RNG)
        if random_state is not None and not from_hf and not random_state.is_in(checkpoint_id):
            logger.warning(f"{checkpoint_id} has no random state for rank {dist.get_rank()}; it keeps its own.")
            state_dict = {key: value for key, value in state_dict.items() if key != RNG}
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        """Save as torchtitan does, then describe the model beside the tensors."""
        result = super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)
        if self.model_info is not None and dist.get_rank() == 0:
            folder = Path(checkpoint_id)
            folder.mkdir(parents=True, exist_ok=True)
            write_checkpoint_info(folder, **self.model_info)
            if kwargs.get("to_hf"):
                args, tokenizer = self.model_info["args"], Path(self.model_info["hf_assets_path"])
                write_description(folder, args, tokenizer, self.export_dtype)
        return result

    def newest(self) -> Path | None:
        """Folder of the newest complete checkpoint."""
        if not self.enable or (step := self._find_load_step()) < 0:
            return None
        return Path(self._create_checkpoint_id(step))

    def _purge_stale_checkpoints(self) -> None:
        """Delete all but the newest ``keep_latest_k`` complete checkpoints; unfinished and foreign folders stay."""
        if not self._should_purge():
            return
        complete = []
        for path in Path(self.folder).iterdir():
            match = _STEP_FOLDER.fullmatch(path.name)
            if match and (path / ".metadata").is_file():
                complete.append((int(match.group(1)), path))
        for _, path in sorted(complete)[: -self.keep_latest_k]:
            self.purge_queue.put(str(path))
