"""Runs of the real trainer with a fault in them, on the ranks of the current process group."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from mula_titan.components.optimizer_sharding.slices import FlatSlice
from mula_titan.exit_codes import FatalFault
from tests.distributed.training import Layout, _trainer

FLAGS = {
    "training.steps": 4,
    "watchdog.enable": False,
    "guard.policy": "skip",
    "validator.enable": False,
    "compile.enable": False,
}


@dataclass
class Case:
    """A run."""

    data: str
    folder: Path
    flags: dict[str, Any] = field(default_factory=dict)
    watched_step: int = 0
    """Compare the state before and after this step."""
    replay: bool = False


@dataclass
class Outcome:
    """What one rank saw of it."""

    losses: dict[int, float]
    step: int
    position: int
    """Samples handed out, over all ranks."""
    total_faults: int
    checksum: str
    """Of weights, moments, biases and schedule at the end."""
    exit_code: int = 0
    message: str = ""
    changed: list[str] | None = None
    """What the watched step changed."""


def state_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Everything that training carries from step to step, but for the data position; local parts."""
    state: dict[str, Any] = {}
    for i, part in enumerate(trainer.model_parts):
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            state[f"{i}.{name}"] = tensor
    state |= {f"optimizer.{k}": v for k, v in trainer.optimizers.state_dict().items()}
    state |= {f"schedule.{k}": v for k, v in trainer.lr_schedulers.state_dict().items()}
    state["random"] = torch.get_rng_state()
    plain = {}
    for key, value in state.items():
        value = value.values if isinstance(value, FlatSlice) else value
        value = value.to_local() if isinstance(value, DTensor) else value
        plain[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return plain


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Keys whose values differ in a bit."""

    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return sorted(key for key in one.keys() | other.keys() if not same(one.get(key), other.get(key)))


def run(case: Case) -> Outcome:
    """Train (or replay) one case."""
    torch._dynamo.reset()
    trainer = _trainer(Layout(data=case.data, flags={**FLAGS, **case.flags}), str(case.folder))
    losses: dict[int, float] = {}
    snapshots: list[dict[str, Any]] = []
    trainer.metrics_processor.log = lambda step, loss, *args, **kwargs: losses.__setitem__(step, loss)
    read, handle = trainer._read_step, trainer._train_on

    def observed_read(iterator: Any) -> Any:
        if trainer.step == case.watched_step:
            snapshots.append(state_of(trainer))
        return read(iterator)

    def observed_train(data: Any) -> bool:
        result = handle(data)
        if data.step == case.watched_step:
            snapshots.append(state_of(trainer))
        return result

    trainer._read_step, trainer._train_on = observed_read, observed_train
    code, message = 0, ""
    with mock.patch("torchtitan.trainer.time.sleep"):
        try:
            if case.replay:
                code = trainer.faulty_steps.replay_bundle()
            else:
                trainer.train()
        except FatalFault as fault:
            code, message = fault.exit_code, str(fault)
        finally:
            trainer.close()
    state = state_of(trainer)
    changed = differing(*snapshots[:2]) if case.watched_step else None
    tensors = [v.double().sum().item().hex() if isinstance(v, torch.Tensor) else repr(v) for v in state.values()]
    return Outcome(
        losses=losses,
        step=trainer.step,
        position=trainer.dataloader.state_dict()["sample_index"],
        total_faults=trainer.guard.total,
        checksum="".join(tensors),
        exit_code=code,
        message=re.sub(r"\s+", " ", message),
        changed=changed,
    )
