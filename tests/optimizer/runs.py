"""Training under so and epso with the program's own trainer; what each rank owns comes back in pieces."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torchtitan.components.checkpointer.utils import canonical_fqn

from mula_titan.components.optimizer_sharding import ShardedAdamW
from mula_titan.components.optimizer_sharding.slices import FlatSlice
from tests.distributed.training import Layout, _full, _trainer
from tests.distributed.xpu_rules import XpuRules

Pieces = list[tuple[tuple[int, ...], torch.Tensor]]
"""Boxes of a parameter: (offsets, values)."""


@dataclass
class ShardedResult:
    """Of one rank. Gradients are those of the first step, before clipping; the rest is as after the last."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: dict[str, Pieces] = field(default_factory=dict)
    masters: dict[str, Pieces] = field(default_factory=dict)
    moments: dict[str, Pieces] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """This rank's parameters in full, as the forward sees them; gathered over EP and TP."""
    num_buckets: int = 0
    early: list[int] = field(default_factory=list)
    """Buckets whose sum had begun before the end of the backward, in each step."""


def pieces(piece: FlatSlice) -> Pieces:
    """Copies of the boxes."""
    return [(tuple(chunk.offsets), view.clone()) for chunk, view in piece.pieces()]


def assemble(ranks: list[dict[str, Pieces]], shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Whole tensors from all ranks' pieces; every element must be there, and copies must agree to the bit."""
    whole = {}
    for name, shape in shapes.items():
        value, seen = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        for rank in ranks:
            for offsets, box in rank.get(name, []):
                where = tuple(slice(o, o + s) for o, s in zip(offsets, box.shape, strict=True))
                known = seen[where]
                assert torch.equal(value[where][known], box.float()[known]), f"copies of {name} differ"
                value[where], seen[where] = box.float(), True
        assert seen.all(), f"{name}: {int((~seen).sum())} elements have no owner"
        whole[name] = value
    return whole


def sharded_optimizer(trainer: Any) -> ShardedAdamW:
    """The one optimizer of a trainer under so or epso."""
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, ShardedAdamW)
    return optimizer


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    """The modules' parameters by name, up to date."""
    trainer.optimizers.wait()
    named = [(canonical_fqn(n), p) for part in trainer.model_parts for n, p in part.named_parameters()]
    return {n: _full(p) for n, p in named if not n.startswith("grad_norm")}


def state_after(layout: Layout, *, loading: bool) -> dict[str, Pieces]:
    """This rank's state of model and optimizer after training, or after loading its checkpoint; any sharding."""
    assert layout.dump_folder is not None
    with mock.patch("torchtitan.trainer.time.sleep"):
        trainer = _trainer(layout, layout.dump_folder)
        if loading:
            assert trainer.checkpointer.load()
        else:
            trainer.train()
        state = {key: value for part in trainer.model_parts for key, value in part.state_dict().items()}
        state |= trainer.optimizers.state_dict()
        if layout.flags["optimizer.sharding"] != "fsdp":
            state |= {f"parameter.{name}": value for name, value in parameters(trainer).items()}
        trainer.close()
    return {
        key: pieces(value) if isinstance(value, FlatSlice) else [((0,) * value.ndim, _full(value))]
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def train_sharded(layout: Layout) -> ShardedResult:
    """Three steps on the ranks of the current process group."""
    torch._dynamo.reset()
    result = ShardedResult()
    with (
        mock.patch("torchtitan.trainer.time.sleep"),
        XpuRules() if layout.xpu_rules else nullcontext(),
    ):
        trainer = _trainer(layout, layout.dump_folder or str(Path(layout.data).parent / "run"))
        optimizer = sharded_optimizer(trainer)
        result.num_buckets = len(optimizer.buckets)
        finish = optimizer.finish_backward

        def observed_finish() -> torch.Tensor:
            result.early.append(optimizer._next_to_reduce)
            norm = finish()
            if not result.gradients:
                for g in optimizer._gradients:
                    result.gradients[g.name] = pieces(g.bucket.slice_of(g.slot, g.param, g.bucket.grad_shard))
            return norm

        optimizer.finish_backward = observed_finish
        trainer.metrics_processor.log = lambda step, loss, max_loss, norm, extra_metrics=None: (
            result.losses.append(loss),
            result.grad_norms.append(norm),
        )
        trainer.train()
        result.parameters = parameters(trainer)
        for g in optimizer._gradients:
            result.masters[g.name] = pieces(optimizer._masters[g.name])
            result.moments[g.name] = pieces(optimizer.state[g.param]["exp_avg"])
        trainer.close()
    return result
