"""torchtitan's routed experts on the kernels of `inductor_kernels`, chosen by config type.

- :class:`KernelGroupedExperts` replaces `GroupedExperts` behind any token dispatcher (rows already sorted by expert).
- :class:`KernelRoutedExperts` replaces `RoutedExperts`: where tokens stay on their rank it computes from the routing
  itself, without dispatch, permuted copy or scatter; behind an all-to-all it is dispatch, experts, combine as usual.

The overrides :func:`kernel_grouped_experts` and :func:`kernel_routed_experts` put them into any torchtitan MoE.
Parameter names, shapes and sharding are those of the stock modules, so checkpoints are interchangeable. Unlike the
stock modules these compute in the dtype of the parameters: fp32 parameters give fp32 results.

Shape suffixes: B = batch, L = sequence length, D = width, F = expert width, E = experts, K = experts per token,
T = B*L tokens, R = routed rows.
"""

from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

from inductor_kernels import moe_experts, sorted_experts


@runtime_checkable
class TokenMajorDispatcher(Protocol):
    """A dispatcher that moves whole tokens instead of sorted rows, such as an all-gather over the expert ranks."""

    def gather(
        self, x_TD: torch.Tensor, scores_TK: torch.Tensor, ids_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, scores and expert ids of all ranks; ids relative to this rank's first expert, others out of range."""
        ...

    def reduce(self, out_TD: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' contributions and return this rank's own tokens."""
        ...


class KernelGroupedExperts(GroupedExperts):
    """SwiGLU experts on rows sorted by expert; rows past the last count give zero rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def local_weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's w1 (gate), w3 (up) and w2 (down) as plain tensors."""
        weights = (self.w1_EFD, self.w3_EFD, self.w2_EDF)
        return cast(
            tuple[torch.Tensor, torch.Tensor, torch.Tensor],
            tuple(w.to_local() if isinstance(w, DTensor) else w for w in weights),
        )

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """``(R, D)`` rows and ``(E,)`` counts of the local experts to ``(R, D)`` outputs in the dtype of x."""
        w1_EFD, w3_EFD, w2_EDF = self.local_weights()
        out_RD = sorted_experts(x_RD.to(w1_EFD.dtype), num_tokens_per_expert_E, w1_EFD, w3_EFD, w2_EDF)
        return out_RD.to(x_RD.dtype)


class KernelRoutedExperts(RoutedExperts):
    """Routed experts that go straight from tokens and routing to the combined output where no rows change rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        inner_experts: KernelGroupedExperts.Config

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """Same contract as `RoutedExperts.forward`."""
        dispatcher = self.token_dispatcher
        token_major = isinstance(dispatcher, TokenMajorDispatcher)
        if not token_major and getattr(dispatcher, "ep_mesh", None) is not None:
            return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
        B, _, D = x_BLD.shape
        K = topk_scores_BLK.shape[-1]
        x_TD = x_BLD.reshape(-1, D)
        scores_TK, ids_TK = topk_scores_BLK.reshape(-1, K), topk_expert_ids_BLK.reshape(-1, K)
        if token_major:
            x_TD, scores_TK, ids_TK = dispatcher.gather(x_TD, scores_TK, ids_TK)
        with maybe_set_sparse_mesh():
            w1_EFD, w3_EFD, w2_EDF = self.inner_experts.local_weights()
            out_TD = moe_experts(x_TD.to(w1_EFD.dtype), ids_TK, scores_TK, w1_EFD, w3_EFD, w2_EDF).to(x_BLD.dtype)
        if token_major:
            out_TD = dispatcher.reduce(out_TD)
        return out_TD.view(B, -1, D)


@override(target=GroupedExperts.Config, exact=True, description="Routed experts on Triton kernels")
def kernel_grouped_experts(cfg: GroupedExperts.Config) -> KernelGroupedExperts.Config:
    """`override.imports=["mula_titan.components.experts.kernel_grouped_experts"]`: kernels behind any dispatcher."""
    return derive(cfg, KernelGroupedExperts.Config)


@override(target=RoutedExperts.Config, exact=True, description="Dispatch-free routed experts on Triton kernels")
def kernel_routed_experts(cfg: RoutedExperts.Config) -> KernelRoutedExperts.Config:
    """`override.imports=["mula_titan.components.experts.kernel_routed_experts"]`: experts, dispatch and combine."""
    return derive(cfg, KernelRoutedExperts.Config, inner_experts=derive(cfg.inner_experts, KernelGroupedExperts.Config))
