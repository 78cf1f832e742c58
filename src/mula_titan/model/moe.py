"""Router and Mixture-of-Experts layer with functional balancing statistics.

Every layer returns its statistics beside its output, so that activation checkpointing, compilation and pipeline stages
neither repeat nor lose them; :class:`mula_titan.model.MulaModel` turns them into counters and losses.

Shape suffixes: B = batch, L = sequence length, D = width, E = experts, K = experts per token.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter


class RouterStats(NamedTuple):
    """Sums over the tokens of one micro-batch, each token weighted by its share of the loss (0 for padding).

    A token's weight is 1 / (valid tokens of the whole step), so that sums over micro-batches, layers' shards and ranks
    add up to means over the step.
    """

    probs_E: torch.Tensor
    """Weighted sum of the softmax over experts, float32, differentiable."""

    load_E: torch.Tensor
    """Weighted sum of the choices (K per token), float32, no gradient."""

    z: torch.Tensor
    """Weighted sum of logsumexp(logits)^2, float32 scalar, differentiable."""

    entropy: torch.Tensor
    """Weighted sum of the entropy of the softmax in nats, float32 scalar, no gradient."""

    counts_E: torch.Tensor
    """Number of choices of tokens with non-zero weight, float32, no gradient."""

    dispatched_E: torch.Tensor
    """Number of choices of all tokens, padding too, int64: the rows that each expert receives."""


class Float32Linear(Linear):
    """Linear layer computed in float32 whatever the parameters' dtype: router logits keep their order in bf16 runs."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``(..., in_features)`` of any dtype to float32 ``(..., out_features)``."""
        return F.linear(input.float(), self.weight.float())


class Router(TokenChoiceTopKRouter):
    """Softmax over all experts in float32, then top-k, then renormalisation if configured (OLMoE)."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def forward(
        self,
        x_BLD: torch.Tensor,
        expert_bias_E: torch.Tensor | None = None,
        token_weights_BL: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, RouterStats]:
        """Route tokens.

        Args:
            x_BLD: input.
            expert_bias_E: added to the probabilities for the choice only (arXiv 2408.15664), or None.
            token_weights_BL: float32 share of each token in the loss; None counts every token with weight 1.

        Returns:
            topk_scores_BLK float32, topk_expert_ids_BLK int64, statistics.
        """
        logits_BLE = self.gate(x_BLD)
        probs_BLE = F.softmax(logits_BLE, dim=-1)
        choice_BLE = probs_BLE if expert_bias_E is None else probs_BLE + expert_bias_E
        topk_expert_ids_BLK = torch.topk(choice_BLE, k=self.top_k, dim=-1, sorted=False).indices
        topk_scores_BLK = probs_BLE.gather(dim=-1, index=topk_expert_ids_BLK)
        if self._debug_force_load_balance:
            topk_expert_ids_BLK, topk_scores_BLK = self._debug_force_load_balance_routing(probs_BLE)
        if self.route_norm:
            topk_scores_BLK = topk_scores_BLK / topk_scores_BLK.sum(dim=-1, keepdim=True)
        stats = self._stats(logits_BLE, probs_BLE, topk_expert_ids_BLK, token_weights_BL)
        return topk_scores_BLK, topk_expert_ids_BLK, stats

    def _stats(
        self,
        logits_BLE: torch.Tensor,
        probs_BLE: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        token_weights_BL: torch.Tensor | None,
    ) -> RouterStats:
        weights_BL1 = _like_tokens(token_weights_BL, probs_BLE)
        chosen_BLE = torch.zeros_like(probs_BLE).scatter_(-1, topk_expert_ids_BLK, 1.0).detach()
        z_BL1 = torch.logsumexp(logits_BLE, dim=-1, keepdim=True).square()
        with torch.no_grad():
            entropy_BLE = torch.special.entr(probs_BLE)
            valid_BL1 = (weights_BL1 > 0).to(chosen_BLE.dtype)
        return RouterStats(
            probs_E=(probs_BLE * weights_BL1).sum(dim=(0, 1)),
            load_E=(chosen_BLE * weights_BL1).sum(dim=(0, 1)),
            z=(z_BL1 * weights_BL1).sum(),
            entropy=(entropy_BLE * weights_BL1).sum(),
            counts_E=(chosen_BLE * valid_BL1).sum(dim=(0, 1)),
            dispatched_E=chosen_BLE.long().sum(dim=(0, 1)),
        )


def _like_tokens(token_weights_BL: torch.Tensor | None, probs_BLE: torch.Tensor) -> torch.Tensor:
    """Token weights as ``(B, L, 1)``, on the router output's mesh if that is a DTensor."""
    if token_weights_BL is None:
        return torch.ones_like(probs_BLE[..., :1])
    if isinstance(probs_BLE, DTensor) and not isinstance(token_weights_BL, DTensor):
        mesh = probs_BLE.device_mesh
        weights_BL = DTensor.from_local(token_weights_BL, mesh, [Replicate()] * mesh.ndim, run_check=False)
        weights_BL1 = cast(DTensor, weights_BL.unsqueeze(-1))
        return weights_BL1.redistribute(placements=probs_BLE.placements)
    return token_weights_BL.unsqueeze(-1)


class MulaMoE(MoE):
    """torchtitan's MoE layer, returning router statistics beside the output."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def forward(
        self, x_BLD: torch.Tensor, token_weights_BL: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, RouterStats]:
        """Apply the layer to ``(B, L, D)``; returns the output of the same shape and the router's statistics."""
        topk_scores_BLK, topk_expert_ids_BLK, stats = self.router(x_BLD, self.expert_bias_E, token_weights_BL)
        out_BLD = self.routed_experts(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, stats.dispatched_E)
        return out_BLD, stats

    def _redistribute_outputs(self, parallel_dims: Any, outputs: Any) -> Any:
        # The layer's output layout concerns the activations; statistics stay as they are.
        out_BLD, stats = outputs
        return super()._redistribute_outputs(parallel_dims, out_BLD), stats


class AddLoss(torch.autograd.Function):
    """Identity on activations that adds a scalar to the loss: its backward gives the scalar gradient 1.

    The gradient is right under pipelining, accumulation and recomputation, because the scalar carries its own weight in
    the step's loss and needs nothing from downstream.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Return ``x``; ``loss`` is a float32 scalar."""
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass the gradient on, and 1 to the loss."""
        (loss,) = ctx.saved_tensors
        return grad_x, torch.ones_like(loss)
