"""MulaModel: the decoder of OLMo and OLMoE on torchtitan's Decoder.

Shape suffixes: B = batch, L = sequence length (layers in router statistics), D = width, E = experts, V = vocabulary,
M = layers * E + 1.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.models.common.attention import AttentionMasksType, FlexAttention
from torchtitan.models.common.decoder import Decoder, TransformerBlock

from mula_titan.model.attention import document_causal_mask
from mula_titan.model.init import initialize
from mula_titan.model.moe import AddLoss, RouterStats
from mula_titan.model.sharding import set_mula_sharding_config


class MulaBlock(TransformerBlock):
    """Pre-norm transformer block: attention, then a dense or Mixture-of-Experts feed-forward."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        pass

    def __init__(self, config: Config):
        super().__init__()
        self.attention = config.attention.build()
        self.attention_norm = config.attention_norm.build()
        self.ffn_norm = config.ffn_norm.build()
        self.moe_enabled = config.moe is not None
        if config.moe is not None:
            self.moe = config.moe.build()
        else:
            assert config.feed_forward is not None
            self.feed_forward = config.feed_forward.build()

    def forward(
        self,
        x_BLD: torch.Tensor,
        attention_masks: AttentionMasksType | torch.Tensor | None,
        positions_BL: torch.Tensor | None,
        token_weights_BL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, RouterStats | None]:
        """Apply the block to ``(B, L, D)``; returns the same shape and, with experts, the router's statistics."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), attention_masks, positions_BL)
        if not self.moe_enabled:
            return x_BLD + self.feed_forward(self.ffn_norm(x_BLD)), None
        out_BLD, stats = self.moe(self.ffn_norm(x_BLD), token_weights_BL)
        return x_BLD + out_BLD, stats


class MulaModel(Decoder):
    """Decoder-only language model with the module names of torchtitan's decoders."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        init_std: float = 0.02
        init_seed: int = 0
        document_mask: bool = True
        load_balance_loss: float = 0.0
        load_balance_per_layer: bool = False
        load_balance_scope: str = "micro_batch"
        router_z_loss: float = 0.0
        optimizer_sharding: str = "fsdp"

        @property
        def num_moe_layers(self) -> int:
            """Number of Mixture-of-Experts layers in the whole model."""
            return sum(layer.moe is not None for layer in self.layers)

        def update_from_config(self, *, config, **kwargs) -> None:
            """Take what the run's configuration decides: sharding plans and the seed of initial weights."""
            Decoder.Config.update_from_config(self, config=config, **kwargs)
            debug = getattr(config, "debug", None)
            if debug is not None and debug.seed is not None:
                self.init_seed = debug.seed
            self.optimizer_sharding = getattr(config.optimizer, "sharding", "fsdp")
            parallelism = config.parallelism
            set_mula_sharding_config(
                self,
                enable_sp=parallelism.enable_sequence_parallel,
                enable_ep=parallelism.expert_parallel_degree > 1,
            )

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            """Total parameters, and FLOPs per token of forward and backward.

            6 per active matrix parameter (the input embedding is a lookup, not a product) and 6 * L * S * D for causal
            attention scores and values, S = seq_len; recomputation doesn't count.
            """
            total = sum(p.numel() for p in model.parameters())
            matmul = self.num_active_params(model) - model.tok_embeddings.weight.numel()
            if self.enable_weight_tying:
                matmul += model.lm_head.weight.numel()
            return total, 6 * matmul + 6 * len(self.layers) * self.dim * seq_len

        def num_active_params(self, model: nn.Module) -> int:
            """Parameters that take part in one token's computation: top_k of the experts, all else."""
            active = 0
            for name, param in model.named_parameters():
                if ".inner_experts." in name:
                    router = self.layers[0].moe.router
                    active += param.numel() // router.num_experts * router.top_k
                else:
                    active += param.numel()
            return active

    data_mesh: DeviceMesh | None = None
    """Ranks that see different tokens, set by ``parallelize_mula``."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._init_self_buffers()

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        super()._init_self_buffers(buffer_device=buffer_device)
        config = self.config
        device = buffer_device or next(self.parameters()).device
        num_experts = max((layer.moe.num_experts for layer in config.layers if layer.moe is not None), default=0)
        # Buffers, not attributes: the pipeline's shape inference runs a forward and puts buffers back.
        sums_L2 = torch.zeros(len(config.layers), 2, dtype=torch.float32, device=device)
        self.register_buffer("router_sums_L2", sums_L2, persistent=False)
        choices_M = torch.zeros(len(config.layers) * num_experts + 1, dtype=torch.float32, device=device)
        self.register_buffer("choices_M", choices_M, persistent=False)

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Initialise buffers, then parameters from (seed, name, global index); see :mod:`mula_titan.model.init`."""
        super().init_states(buffer_device=buffer_device)
        initialize(self, std=self.config.init_std, seed=self.config.init_seed)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: AttentionMasksType | torch.Tensor | None = None,
        token_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute logits ``(B, L, V)``; a pipeline stage takes and returns hidden states instead.

        Args:
            tokens: int64 ``(B, L)`` token ids, or ``(B, L, D)`` hidden states on later pipeline stages.
            positions: int64 ``(B, L)``, restarting at each document when documents are masked.
            attention_masks: FlexAttention's BlockMask, or None.
            token_weights: float32 ``(B, L)``, each token's share of the step's loss. Needed while training with a
                router loss; evaluation leaves it out.

        Raises:
            ValueError: a router loss is configured but the training loop passes no token weights.
        """
        config = self.config
        h_BLD = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        if (
            attention_masks is None
            and config.document_mask
            and positions is not None
            and not isinstance(config.first_attention.inner_attention, FlexAttention.Config)
        ):
            attention_masks = document_causal_mask(positions)

        stats: dict[int, RouterStats] = {}
        for index, layer in self.layers.items():
            h_BLD, layer_stats = layer(h_BLD, attention_masks, positions, token_weights)
            if layer_stats is not None:
                stats[int(index)] = layer_stats
        if stats and self.training:
            h_BLD = self._router_losses(h_BLD, stats, token_weights)

        h_BLD = self.norm(h_BLD) if self.norm is not None else h_BLD
        if self._skip_lm_head or self.lm_head is None:
            return h_BLD
        return self.lm_head(h_BLD)

    def start_step(self) -> None:
        """Begin new sums over a step's micro-batches; the finished ones stay in ``last_router_sums_L2``."""
        self.last_router_sums_L2 = self.router_sums_L2.clone()
        self.router_sums_L2.zero_()
        self.choices_M.zero_()

    def _router_losses(
        self, h_BLD: torch.Tensor, stats: dict[int, RouterStats], token_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Record the statistics and add the losses. Outside checkpointed and compiled blocks: once a forward."""
        config = self.config
        entropy_z_L2 = _whole(torch.stack([torch.stack([s.entropy, s.z]) for s in stats.values()]))
        with torch.no_grad():
            # Row by row: indexing with a list of layers would copy it to the device, and wait.
            for (index, s), sums_2 in zip(stats.items(), entropy_z_L2, strict=True):
                self.router_sums_L2[index].add_(sums_2)
                self.layers[str(index)].moe.tokens_per_expert_E.add_(s.counts_E)
        if config.load_balance_loss == 0 and config.router_z_loss == 0:
            return h_BLD
        if token_weights is None:
            raise ValueError(
                "model.load_balance_loss or model.router_z_loss is set, but the training loop passes no token_weights. "
                "Train with mula_titan.trainer.MulaTrainer, or set both to 0 and balance by model.expert_bias_rate."
            )
        load_LE = _whole(torch.stack([s.load_E for s in stats.values()]))
        loss = router_losses(
            probs_LE=_whole(torch.stack([s.probs_E for s in stats.values()])),
            share_LE=self._choice_shares(load_LE, token_weights.sum()),
            z_L=entropy_z_L2[:, 1],
            num_layers=config.num_moe_layers,
            load_balance=config.load_balance_loss,
            per_layer=config.load_balance_per_layer,
            z=config.router_z_loss,
        )
        h_BLD = AddLoss.apply(h_BLD, loss)
        # A pipeline stage must not return a view: FSDP hangs its backward hook on the output.
        return h_BLD.clone() if self.norm is None else h_BLD

    @torch.no_grad()
    def _choice_shares(self, load_LE: torch.Tensor, batch_weight: torch.Tensor) -> torch.Tensor:
        """Share of the tokens in the configured scope that choose each expert; rows sum to top_k."""
        scope = self.config.load_balance_scope
        if scope != "micro_batch":
            sums = torch.cat([load_LE.flatten(), batch_weight.reshape(1)])
            if scope == "global_batch" and self.data_mesh is not None:
                sums = all_reduce(sums, "sum", self.data_mesh)
            running = self.choices_M[: sums.numel()].add_(sums).clone()  # a stage has a part of the layers
            load_LE, batch_weight = running[:-1].view_as(load_LE), running[-1]
        # A micro-batch without valid tokens has zero weight and zero load.
        return load_LE / batch_weight.clamp_min(1e-30)


def router_losses(
    *,
    probs_LE: torch.Tensor,
    share_LE: torch.Tensor,
    z_L: torch.Tensor,
    num_layers: int,
    load_balance: float,
    per_layer: bool,
    z: float,
) -> torch.Tensor:
    """Router losses of one micro-batch, weighted with its share of the step.

    Load balancing is E * sum_e f_e P_e, f_e the share of tokens that choose expert e (summing to K) and P_e the mean
    probability (Switch, arXiv 2101.03961, eq. 4), with f and P taken over all layers' tokens as OLMoE does, or per
    layer and then averaged. A balanced router gives K. The z-loss is mean logsumexp(logits)^2 (2202.08906, eq. 5).

    Args:
        probs_LE: sums of probabilities over this micro-batch, weighted with the tokens' shares of the step, float32.
        share_LE: f of each layer on this pipeline stage.
        z_L: sums of squared logsumexp, weighted likewise.
        num_layers: Mixture-of-Experts layers of the whole model.
        load_balance: weight of the load-balancing loss.
        per_layer: statistics per layer rather than over all layers together.
        z: weight of the z-loss.

    Returns:
        float32 scalar.
    """
    num_experts = probs_LE.shape[-1]
    if per_layer:
        balance = num_experts * (share_LE * probs_LE).sum() / num_layers
    else:
        balance = num_experts * (share_LE.mean(0) * probs_LE.mean(0)).sum()
    return load_balance * balance + z * z_L.sum() / num_layers


def _whole(x: torch.Tensor) -> torch.Tensor:
    """The full tensor of a statistic that tensor parallelism left partial."""
    return x.full_tensor() if isinstance(x, DTensor) else x
