"""All-gather token dispatcher: expert parallelism with even, plain-sum collectives and no host synchronisation.

Each expert rank gathers the tokens, weights and choices of its whole expert group, computes its own experts, and a
reduce-scatter sums the parts (arXiv 2604.00785; the alternative to torchtitan's ``AllToAllTokenDispatcher``). It moves
EP * T * D elements each way whatever the routing, so it suits a top-k close to the EP degree, and backends whose uneven
all-to-all is slow or fails on empty messages.

Shape suffixes: T = tokens of this rank, G = tokens of the expert group (T * EP), D = width, K = experts per token,
N = G * K choices, e = experts of this rank.
"""

from dataclasses import dataclass

import torch
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_gather_single,
    all_gather_single_autograd,
    reduce_scatter_single_autograd,
)
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher


@dataclass(frozen=True, kw_only=True)
class AllGatherMetadata:
    """What :meth:`AllGatherTokenDispatcher.combine` needs of the dispatch."""

    token_of_row_N: torch.Tensor
    score_of_row_N: torch.Tensor
    """float32; 0 for rows of experts on other ranks."""
    is_local_N: torch.Tensor
    num_tokens: int


def _done(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a collective (on a GPU the stream does, not the host).

    torch 2.14 corrupts memory on gloo when several functional gathers are in flight and the last is waited for first.
    """
    if isinstance(tensor, AsyncCollectiveTensor):  # compiled code has its waits already
        tensor.trigger_wait()
    return tensor


class AllGatherTokenDispatcher(BaseEPTokenDispatcher):
    """Gathers all tokens of the expert group.

    :meth:`gather` and :meth:`reduce` serve ``KernelRoutedExperts``, which computes straight from tokens and choices.
    :meth:`dispatch` and :meth:`combine` are torchtitan's contract, for its stock ``RoutedExperts``; the rows of other
    ranks' experts come last, beyond all counts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        pass

    @property
    def _num_local_experts(self) -> int:
        return self.num_experts // self.ep_mesh.size() if self.ep_mesh is not None else self.num_experts

    def gather(
        self, x_TD: torch.Tensor, scores_TK: torch.Tensor, ids_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens ``(G, D)``, scores and ids ``(G, K)`` of the expert group.

        Ids count from this rank's first expert; those of other ranks fall outside ``[0, e)``.
        """
        if self.ep_mesh is None:
            return x_TD, scores_TK, ids_TK
        ids_GK = _done(all_gather_single(ids_TK.contiguous(), 0, self.ep_mesh))
        x_GD = _done(all_gather_single_autograd(x_TD, 0, self.ep_mesh))
        scores_GK = _done(all_gather_single_autograd(scores_TK, 0, self.ep_mesh))
        return x_GD, scores_GK, ids_GK - self.ep_mesh.get_local_rank() * self._num_local_experts

    def reduce(self, out_GD: torch.Tensor) -> torch.Tensor:
        """Sum of the group's outputs for this rank's tokens, ``(T, D)``."""
        if self.ep_mesh is None:
            return out_GD
        return reduce_scatter_single_autograd(out_GD, "sum", 0, self.ep_mesh)

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, AllGatherMetadata]:
        """torchtitan's contract; rows are ``(N, D)`` whatever the routing, so nothing is read on the host."""
        del num_local_tokens_per_expert_E  # counts of this rank's tokens; the group's are needed
        x_GD, scores_GK, ids_GK = self.gather(x_TD, topk_scores_TK, topk_expert_ids_TK)
        num_experts = self._num_local_experts
        ids_N = ids_GK.reshape(-1)
        ids_N = torch.where((ids_N >= 0) & (ids_N < num_experts), ids_N, num_experts)
        order_N = torch.argsort(ids_N, stable=True)
        is_local_N = ids_N[order_N] < num_experts
        bounds = torch.arange(num_experts + 1, device=ids_N.device)
        counts_e = torch.searchsorted(ids_N[order_N], bounds).diff()
        token_of_row_N = order_N // self.top_k
        # Grouped products leave the rows beyond the counts unwritten, in gradients too: keep them apart on both sides.
        routed_ND = torch.where(is_local_N[:, None], x_GD[token_of_row_N], 0)
        metadata = AllGatherMetadata(
            token_of_row_N=token_of_row_N,
            score_of_row_N=scores_GK.reshape(-1)[order_N],
            is_local_N=is_local_N,
            num_tokens=x_GD.shape[0],
        )
        return routed_ND, counts_e, metadata

    def combine(self, routed_output_RD: torch.Tensor, metadata: AllGatherMetadata, x_TD: torch.Tensor) -> torch.Tensor:
        """Weighted sum per token in float32, then the reduction over the group; ``(T, D)``."""
        rows_ND = torch.where(metadata.is_local_N[:, None], routed_output_RD, 0).float()
        rows_ND = rows_ND * metadata.score_of_row_N[:, None]
        out_GD = rows_ND.new_zeros(metadata.num_tokens, x_TD.shape[-1])
        out_GD = out_GD.index_add(0, metadata.token_of_row_N, rows_ND).to(x_TD.dtype)
        return self.reduce(out_GD)
