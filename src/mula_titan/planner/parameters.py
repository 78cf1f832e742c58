"""A model's parameters as data: name, shape, and how tensor and expert parallelism split them.

The model is built on the meta device with one block, and the block's parameters stand for every layer's.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torchtitan.distributed.parallel_dims import MeshAxisName

from mula_titan.model.args import MulaArgs
from mula_titan.model.spec import model_config
from mula_titan.planner.layout import Layout

Kind = Literal["expert", "split", "replicated"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of the full model."""

    name: str
    shape: tuple[int, ...]
    ep_dim: int | None
    """Dimension that expert ranks split; None: they all hold it."""
    tp_dim: int | None
    """Dimension that tensor ranks split."""
    is_expert: bool

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """Shape on one rank after tensor and expert parallelism, before data parallelism."""
        shape = list(self.shape)
        for dim, degree in ((self.ep_dim, layout.ep), (self.tp_dim, layout.tp)):
            if dim is not None:
                shape[dim] = -(-shape[dim] // degree)
        return tuple(shape)

    def kind(self, layout: Layout) -> Kind:
        """Which ranks hold the same values: the row of the table in ``optimizer_sharding.owners``."""
        if self.ep_dim is not None and layout.ep > 1:
            return "expert"
        return "split" if self.tp_dim is not None and layout.tp > 1 else "replicated"


class Inventory:
    """Parameters of a model for given kinds of parallelism, and the optimizer's groups."""

    def __init__(self, config: Any, *, ep: bool, tp: bool) -> None:
        """Read the parameters off the real model.

        Args:
            config: a ``MulaTrainer.Config``.
            ep: whether expert parallelism is on.
            tp: whether tensor parallelism is on.
        """
        args: MulaArgs = replace(config.model, n_layers=1)
        tree = model_config(args)
        parallelism = replace(
            config.parallelism,
            expert_parallel_degree=2 if ep else 1,
            tensor_parallel_degree=2 if tp else 1,
            pipeline_parallel_degree=1,
        )
        tree.update_from_config(config=replace(config, parallelism=parallelism))
        with torch.device("meta"):
            model = tree.build()
        found: list[Parameter] = []
        for prefix, module in model.named_modules():
            for name, param in module.named_parameters(recurse=False):
                sharding = getattr(module, "_sharding_config", None)
                placed = sharding.state_shardings.get(name) if sharding is not None else None
                axes = placed.axis_types if placed is not None else {}
                found.append(
                    Parameter(
                        name=f"{prefix}.{name}",
                        shape=tuple(param.shape),
                        ep_dim=_split_dim(axes, MeshAxisName.EP) if ep else None,
                        tp_dim=_split_dim(axes, MeshAxisName.TP) if tp else None,
                        is_expert=".inner_experts." in prefix + ".",
                    )
                )
        self.block = [p for p in found if p.name.startswith("layers.0.")]
        self.others = {p.name: p for p in found if not p.name.startswith("layers.0.")}
        self._order = [p.name for p in found]
        self.num_experts = args.num_experts
        self.tied = args.tie_embeddings
        self._patterns = [re.compile(group.pattern) for group in config.optimizer.groups()]

    def group_of(self, parameter: Parameter) -> int:
        """Index of the optimizer's parameter group."""
        return next(i for i, pattern in enumerate(self._patterns) if pattern.search(parameter.name))

    def of_stage(self, modules: list[str]) -> Iterator[Parameter]:
        """Parameters of a pipeline stage, in the order of ``model.parameters()``; modules as in ``Layout.stages``."""
        blocks_done = False
        for name in self._order:
            if name.startswith("layers.0."):
                if not blocks_done:
                    for module in modules:
                        if module.startswith("layers."):
                            for p in self.block:
                                yield replace(p, name=p.name.replace("layers.0", module, 1))
                blocks_done = True
            elif name.rsplit(".", 1)[0] in modules:
                yield self.others[name]


def _split_dim(axes: dict[Any, Any], axis: MeshAxisName) -> int | None:
    placement = axes.get(axis)
    return getattr(placement, "dim", None)
