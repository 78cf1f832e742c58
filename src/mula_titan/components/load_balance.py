"""Bias-based expert balancing and the counters behind it (arXiv 2408.15664).

Shape suffixes: E = experts, M = Mixture-of-Experts layers of this rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import ParallelDims


def moe_layers(model_parts: list[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Name (``layers.3``) and MoE module of every Mixture-of-Experts layer in the model parts of this rank."""
    for part in model_parts:
        for index, block in part.get_submodule("layers").named_children():
            if getattr(block, "moe_enabled", False):
                yield f"layers.{index}", block.moe


def reduced_counts(model_parts: list[nn.Module], parallel_dims: ParallelDims) -> torch.Tensor:
    """Choices per layer and expert since the last reset, summed over all data ranks with one collective.

    Returns:
        float32 ``(M, E)``.
    """
    counts_ME = torch.stack([_local(moe.tokens_per_expert_E) for _, moe in moe_layers(model_parts)])
    loss_mesh = parallel_dims.get_optional_mesh("loss")
    if loss_mesh is not None:
        dist.all_reduce(counts_ME, group=loss_mesh.get_group())
    return counts_ME


def _local(counts_E: torch.Tensor) -> torch.Tensor:
    # Under tensor parallelism the counter is a DTensor, partial over the ranks that hold different tokens.
    return counts_E.full_tensor() if isinstance(counts_E, DTensor) else counts_E.clone()


@torch.no_grad()
def update_expert_bias(moes: list[Any], counts_ME: torch.Tensor) -> None:
    """Move each layer's bias by its rate towards balance: up for experts below the mean load, down above, centred.

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
    optimizers: OptimizersContainer, model_parts: list[nn.Module], parallel_dims: ParallelDims
) -> None:
    """torchtitan's ``post_optimizer_build_fn``: before each optimizer step, update biases and reset the counters."""
    moes = [moe for _, moe in moe_layers(model_parts)]
    if not moes:
        return

    def before_step(*args, **kwargs) -> None:
        if any(moe.load_balance_coeff is not None for moe in moes):
            update_expert_bias(moes, reduced_counts(model_parts, parallel_dims))
        for moe in moes:
            moe.tokens_per_expert_E.zero_()

    optimizers.register_step_pre_hook(before_step)
