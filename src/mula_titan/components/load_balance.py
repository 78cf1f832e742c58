"""Bias-based expert balancing, and what the routers did in the last step.

Shape suffixes: E = experts, M = Mixture-of-Experts layers of this rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import ParallelDims


def moe_layers(model_parts: list[nn.Module]) -> Iterator[tuple[int, Any]]:
    """Index and MoE module of every Mixture-of-Experts layer in the model parts of this rank."""
    for part in model_parts:
        for index, block in part.get_submodule("layers").named_children():
            if getattr(block, "moe_enabled", False):
                yield int(index), block.moe


def _whole(x: torch.Tensor) -> torch.Tensor:
    # Under tensor parallelism a counter is a DTensor, partial over the ranks that hold different tokens.
    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.no_grad()
def reduced_counts(model_parts: list[nn.Module], parallel_dims: ParallelDims) -> torch.Tensor:
    """Choices per layer and expert since the last optimizer step, summed over all data ranks with one collective.

    Returns:
        float32 ``(M, E)``.
    """
    counts_ME = torch.stack([_whole(moe.tokens_per_expert_E) for _, moe in moe_layers(model_parts)])
    return _sum_over(counts_ME, parallel_dims, "loss")


def _sum_over(x: torch.Tensor, parallel_dims: ParallelDims, axis: str) -> torch.Tensor:
    mesh = parallel_dims.get_optional_mesh(axis)
    if mesh is not None:
        dist.all_reduce(x, group=mesh.get_group())
    return x


@torch.no_grad()
def update_expert_bias(moes: list[Any], counts_ME: torch.Tensor) -> None:
    """Move each bias by its rate towards balance (arXiv 2408.15664): up below the mean load, down above; centred.

    Layers without a bias are left alone.
    """
    for moe, counts_E in zip(moes, counts_ME, strict=True):
        if moe.load_balance_coeff is None:
            continue
        delta_E = moe.load_balance_coeff * torch.sign(counts_E.mean() - counts_E)
        delta_E = delta_E - delta_E.mean()
        bias_E = moe.expert_bias_E
        (bias_E.to_local() if isinstance(bias_E, DTensor) else bias_E).add_(delta_E)


def register_load_balancing(
    optimizers: OptimizersContainer, model_parts: list[Any], parallel_dims: ParallelDims
) -> None:
    """torchtitan's ``post_optimizer_build_fn``: before each optimizer step, update biases and start new counters.

    The step's own counts stay on each MoE module for :func:`router_report`.
    """
    moes = [moe for _, moe in moe_layers(model_parts)]
    if not moes:
        return

    def before_step(*args: Any, **kwargs: Any) -> None:
        if any(moe.load_balance_coeff is not None for moe in moes):
            update_expert_bias(moes, reduced_counts(model_parts, parallel_dims))
        for moe in moes:
            moe.last_counts_E = moe.tokens_per_expert_E.clone()
            moe.tokens_per_expert_E.zero_()
        for part in model_parts:
            part.start_step()

    optimizers.register_step_pre_hook(before_step)


@dataclass(frozen=True)
class RouterReport:
    """What one layer's router did in a step, over all data ranks."""

    layer: int
    load_max_over_mean: float
    """Load of the busiest expert over the mean; 1 is balance, E / K is all tokens on the same K experts."""
    busiest_share: float
    """Choices of the busiest expert over all choices; 1 / K when every token picks it."""
    idle_experts: int
    """Experts without a token."""
    entropy: float
    """Mean entropy of the router's softmax, nats."""
    z_loss: float
    """Mean squared logsumexp of the logits."""
    dropped: int
    """Choices that reached no expert: valid tokens * K - choices counted. The layers drop none."""


@torch.no_grad()
def router_report(
    model_parts: list[Any], parallel_dims: ParallelDims, num_layers: int, num_choices: int
) -> list[RouterReport]:
    """Reports of all layers, those of other pipeline stages included; a collective call.

    Args:
        model_parts: this rank's parts of the model.
        parallel_dims: the run's meshes.
        num_layers: transformer blocks of the whole model.
        num_choices: valid tokens of the step times experts per token.
    """
    layers = [(part, *layer) for part in model_parts for layer in moe_layers([part])]
    if not layers:
        return []
    rows = torch.stack(
        [torch.cat([_whole(moe.last_counts_E), part.last_router_sums_L2[index]]) for part, index, moe in layers]
    )
    table = rows.new_zeros(num_layers, rows.shape[1])
    table[[index for _, index, _ in layers]] = rows
    table = _sum_over(_sum_over(table, parallel_dims, "loss"), parallel_dims, "pp").cpu()
    return [
        RouterReport(
            layer=index,
            load_max_over_mean=float(counts_E.max() / counts_E.mean()),
            busiest_share=float(counts_E.max() / counts_E.sum()),
            idle_experts=int((counts_E == 0).sum()),
            entropy=float(row[-2]),
            z_loss=float(row[-1]),
            dropped=num_choices - int(counts_E.double().sum()),
        )
        for index, row in enumerate(table)
        if (counts_E := row[:-2]).sum() > 0
    ]
