"""Activation checkpointing that never routes twice.

A recomputed router may break a near tie the other way, and then sends other tokens to the experts than the forward did.
Both policies save the choice of experts.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchtitan.distributed import activation_checkpoint as titan

import inductor_kernels  # noqa: F401  (registers the ops)

ROUTING_OPS = [torch.ops.aten.topk.default]
EXPERT_OPS = [torch.ops.inductor_kernels.moe_experts.default]


class FullAC(titan.FullAC):
    """Recompute everything in a block but the choice of experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.FullAC.Config):
        pass

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        return checkpoint_wrapper(
            module,
            context_fn=lambda: create_selective_checkpoint_contexts(ROUTING_OPS),
            preserve_rng_state=self.config.preserve_rng_state,
            determinism_check=self.config.determinism_check,
            early_stop=False,
            debug=self.config.debug,
        )


class SelectiveAC(titan.SelectiveAC):
    """torchtitan's choice of expensive operations to save, the expert kernels included."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        """Operations whose outputs are saved."""
        return super().get_save_ops() | set(EXPERT_OPS)
