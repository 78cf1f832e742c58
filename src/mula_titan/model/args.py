"""Scalars that describe a Mula model; :mod:`mula_titan.model.spec` turns them into torchtitan's config tree."""

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(kw_only=True, slots=True)
class MulaArgs:
    """Architecture and routing of one model. The TOML section ``[model]`` sets every field."""

    flavor: str = "mula_debug"
    """Name of the configuration in ``FLAVORS`` that the other fields start from."""

    dim: int = 128
    """Width of the residual stream (H in the papers)."""

    n_layers: int = 4
    """Number of transformer blocks."""

    n_heads: int = 4
    """Number of attention heads; the head width is dim / n_heads."""

    n_kv_heads: int = 4
    """Number of key and value heads; fewer than n_heads is grouped-query attention."""

    ffn_dim: int = 128
    """Width of the SwiGLU feed-forward: of the dense layer, or of each expert."""

    num_experts: int = 8
    """Routed experts per layer; 0 makes every layer dense."""

    top_k: int = 2
    """Experts chosen per token."""

    vocab_size: int = 2048
    """Rows of the embedding and of the output head."""

    max_seq_len: int = 4096
    """Longest context that the positions cover, in tokens."""

    rope_theta: float = 10000.0
    """Base of the rotary position frequencies."""

    norm: Literal["rms", "layer_no_affine"] = "rms"
    """RMSNorm with a weight (OLMoE), or LayerNorm without weight and bias (OLMo)."""

    norm_eps: float = 1e-5
    """Added to the variance in every normalisation."""

    qk_norm: bool = True
    """RMSNorm of queries and keys over the whole projected width, before the split into heads (OLMoE)."""

    tie_embeddings: bool = False
    """Share one matrix between the embedding and the output head."""

    init_std: float = 0.02
    """Standard deviation of the normal distribution of initial matrices."""

    document_mask: bool = True
    """Attention never crosses a document boundary, and positions restart at each document."""

    attention: Literal["sdpa", "flex"] = "sdpa"
    """Attention: torch's scaled-dot-product attention (any device), or FlexAttention (compiled, CUDA and XPU)."""

    route_norm: bool = False
    """Renormalise the chosen experts' probabilities to sum 1 (norm_topk_prob of OLMoE: false)."""

    load_balance_loss: float = 0.01
    """Weight of the auxiliary load-balancing loss; 0 turns it off."""

    load_balance_per_layer: bool = False
    """Take the auxiliary loss per layer and average, or (false, as OLMoE) over the tokens of all layers together."""

    load_balance_scope: Literal["micro_batch", "local_batch", "global_batch"] = "micro_batch"
    """
    Tokens whose choices the auxiliary loss sees: this micro-batch's; those of the rank's micro-batches so far in the
    step; or those of all data ranks (arXiv 2501.11873; one small all-reduce per forward).
    """

    router_z_loss: float = 0.0
    """Weight of the router z-loss, mean over layers of mean logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5)."""

    expert_bias_rate: float = 0.0
    """Step of the bias-based balancing without auxiliary loss (arXiv 2408.15664); 0 turns it off."""

    expert_dispatch: Literal["auto", "all_to_all", "all_gather"] = "auto"
    """
    How tokens reach the experts of other ranks: each token to its experts (all_to_all), or all tokens to all ranks
    (all_gather: even messages, no host synchronisation). auto: all_gather on XPU, all_to_all elsewhere.
    """

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    def dispatch_on(self, device_type: str) -> str:
        """Expert dispatch on a type of device, ``auto`` resolved: ``all_to_all`` or ``all_gather``."""
        if self.expert_dispatch != "auto":
            return self.expert_dispatch
        # xccl emulates uneven all-to-all with sends and receives, and older versions refuse empty messages.
        return "all_gather" if device_type == "xpu" else "all_to_all"

    def problems(self) -> list[tuple[str, object, str]]:
        """Values that cannot work, as (field, value, what to do). Empty if the model is sound."""
        found: list[tuple[str, object, str]] = []

        def check(name: str, ok: bool, remedy: str) -> None:
            if not ok:
                found.append((name, getattr(self, name), remedy))

        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "max_seq_len"):
            check(name, getattr(self, name) >= 1, "must be at least 1")
        if found:
            return found
        check("n_heads", self.dim % self.n_heads == 0, f"must divide model.dim ({self.dim})")
        check("n_kv_heads", self.n_heads % self.n_kv_heads == 0, f"must divide model.n_heads ({self.n_heads})")
        check("dim", self.head_dim % 2 == 0, f"dim / n_heads must be even for rotary positions, not {self.head_dim}")
        check("num_experts", self.num_experts >= 0, "must be 0 (dense) or more")
        if self.num_experts > 0:
            check("top_k", 1 <= self.top_k <= self.num_experts, f"must lie in 1..num_experts ({self.num_experts})")
        for name in ("load_balance_loss", "router_z_loss", "expert_bias_rate"):
            check(name, 0 <= getattr(self, name) < float("inf"), "must be 0 (off) or positive")
        for name in ("init_std", "norm_eps", "rope_theta"):
            check(name, 0 < getattr(self, name) < float("inf"), "must be positive")
        return found


def _olmoe(**changes) -> dict:
    """OLMoE-1B-7B (arXiv 2409.02060), with changes."""
    return {
        "dim": 2048,
        "n_layers": 16,
        "n_heads": 16,
        "n_kv_heads": 16,
        "ffn_dim": 1024,
        "num_experts": 64,
        "top_k": 8,
        "vocab_size": 50304,
    } | changes


_XL = {"dim": 3072, "n_heads": 24, "n_kv_heads": 24, "ffn_dim": 1536}

_DENSE = {"num_experts": 0, "top_k": 0, "norm": "layer_no_affine", "qk_norm": False, "load_balance_loss": 0.0}

# Dimensions of arXiv 2604.00785, table of models. Totals and active parameters are checked in tests/model.
FLAVORS: dict[str, dict] = {
    "mula_debug": {},
    "mula_debug_dense": {"ffn_dim": 384} | _DENSE,
    "mula_1b": _olmoe(ffn_dim=8192, **_DENSE),
    "mula_7b_a1b": _olmoe(),
    "mula_20b_a2b": _olmoe(num_experts=96, n_layers=32),
    "mula_100b_a7b": _olmoe(num_experts=144, n_layers=48, **_XL),
    "mula_220b_a10b": _olmoe(num_experts=240, n_layers=64, **_XL),
}


def make_args(flavor: str, **changes) -> MulaArgs:
    """Arguments of a named flavor, with changes.

    Raises:
        ValueError: unknown flavor or field.
    """
    if flavor not in FLAVORS:
        raise ValueError(f"unknown model flavor {flavor!r}; known: {', '.join(FLAVORS)}")
    names = {f.name for f in fields(MulaArgs)}
    unknown = changes.keys() - names
    if unknown:
        raise ValueError(f"unknown model field {sorted(unknown)[0]!r}; known: {', '.join(sorted(names))}")
    return MulaArgs(**({"flavor": flavor} | FLAVORS[flavor] | changes))
