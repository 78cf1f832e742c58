"""Every module's outputs and their gradients in one training step, as checksums: which was bad first, which differ."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torchtitan.components.checkpointer.utils import canonical_fqn


@dataclass(frozen=True)
class Event:
    """One tensor that a step made."""

    name: str
    """``"forward layers.0.moe"``, ``"backward ..."`` (gradient of that module's output) or ``"gradient ..."``."""
    checksum: int
    """Sum of its bits, as :func:`bit_sum` has it."""
    is_finite: bool


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor's bits as integers, below 2**31, int64."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer).sum(dtype=torch.int64) % (2**31 - 1)


class StepTrace:
    """Records :class:`Event` s in the order in which they happen on this rank, without waiting for the device."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._values: list[torch.Tensor] = []

    @torch.no_grad()
    def record(self, name: str, tensor: torch.Tensor) -> None:
        """Note one tensor, of a DTensor the local part."""
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if not local.is_floating_point():
            return
        finite = torch.isfinite(local).all().to(torch.int64)
        self._names.append(name)
        self._values.append(torch.stack([bit_sum(local), finite]))

    @contextmanager
    def watch(self, model_parts: list[nn.Module]) -> Iterator[None]:
        """Record what the modules do inside the block; compiled ones run uncompiled, so that their parts show."""
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for part in model_parts:
                for name, parameter in part.named_parameters():
                    self.record(f"weight {canonical_fqn(name)}", parameter)
                for name, module in part.named_modules():
                    handle = module.register_forward_hook(self._hook(canonical_fqn(name) or "model"))
                    stack.callback(handle.remove)
            yield
            for part in model_parts:
                for name, parameter in part.named_parameters():
                    if parameter.grad is not None:
                        self.record(f"gradient {canonical_fqn(name)}", parameter.grad)

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for leaf in tree_leaves(output):
                if not isinstance(leaf, torch.Tensor):
                    continue
                self.record(f"forward {name}", leaf)
                if leaf.requires_grad:
                    leaf.register_hook(lambda grad: self.record(f"backward {name}", grad))

        return hook

    def events(self) -> list[Event]:
        """What was recorded; waits for the device."""
        if not self._values:
            return []
        table = torch.stack(self._values).tolist()
        return [Event(name, bits, bool(ok)) for name, (bits, ok) in zip(self._names, table, strict=True)]


def first_bad(events: list[Event]) -> int | None:
    """Index of the first event that isn't finite."""
    return next((i for i, event in enumerate(events) if not event.is_finite), None)


def first_difference(one: list[Event], other: list[Event]) -> int | None:
    """Index of the first event that two runs of the same step don't share to the bit."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))
