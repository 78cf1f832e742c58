"""From scalars (:class:`MulaArgs`) to torchtitan's config tree and ``ModelSpec``."""

from typing import Any

from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.attention import FlexAttention, GQAttention, QKVLinear
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import LayerNorm, RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.protocols.model_spec import ModelSpec

from mula_titan.components.experts import KernelGroupedExperts, KernelRoutedExperts
from mula_titan.components.load_balance import register_load_balancing
from mula_titan.components.token_dispatcher import AllGatherTokenDispatcher
from mula_titan.hf.adapter import MulaStateDictAdapter
from mula_titan.model.args import MulaArgs, make_args
from mula_titan.model.attention import FullWidthRMSNorm, MaskedAttention, NormedQKVLinear
from mula_titan.model.model import MulaBlock, MulaModel
from mula_titan.model.moe import Float32Linear, MulaMoE, Router
from mula_titan.model.parallelize import parallelize_mula
from mula_titan.runtime import select_device

DISPATCHERS = {"all_to_all": AllToAllTokenDispatcher.Config, "all_gather": AllGatherTokenDispatcher.Config}
"""Values of ``model.expert_dispatch`` beside auto."""

# MulaModel.init_states gives every parameter its value; the modules' own initialisers would be overwritten.
_LATER: dict[str, Any] = {"weight": skip_param_init}


def _linear(n_in: int, n_out: int) -> Linear.Config:
    return Linear.Config(in_features=n_in, out_features=n_out, param_init=_LATER)


def _norm(args: MulaArgs) -> RMSNorm.Config | LayerNorm.Config:
    if args.norm == "rms":
        return RMSNorm.Config(normalized_shape=args.dim, eps=args.norm_eps, param_init=_LATER)
    return LayerNorm.Config(normalized_shape=args.dim, eps=args.norm_eps, elementwise_affine=False)


def _attention(args: MulaArgs) -> GQAttention.Config:
    width, kv_width = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    projections: dict[str, Any] = {
        "head_dim": args.head_dim,
        "wq": _linear(args.dim, width),
        "wkv": _linear(args.dim, kv_width),
    }
    qkv: QKVLinear.Config
    if args.qk_norm:
        q_norm, k_norm = (
            FullWidthRMSNorm.Config(normalized_shape=w, eps=args.norm_eps, param_init=_LATER) for w in (width, kv_width)
        )
        qkv = NormedQKVLinear.Config(**projections, q_norm=q_norm, k_norm=k_norm)
    else:
        qkv = QKVLinear.Config(**projections)
    return GQAttention.Config(
        n_heads=args.n_heads,
        n_kv_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        dim=args.dim,
        qkv_linear=qkv,
        wo=_linear(width, args.dim),
        inner_attention=FlexAttention.Config() if args.attention == "flex" else MaskedAttention.Config(),
        rope=CosSinRoPE.Config(dim=args.head_dim, max_seq_len=args.max_seq_len, theta=args.rope_theta),
    )


def _feed_forward(args: MulaArgs) -> FeedForward.Config:
    up, down = _linear(args.dim, args.ffn_dim), _linear(args.ffn_dim, args.dim)
    return FeedForward.Config(w1=up, w2=down, w3=_linear(args.dim, args.ffn_dim))


def _dispatcher(args: MulaArgs) -> AllToAllTokenDispatcher.Config | AllGatherTokenDispatcher.Config:
    return DISPATCHERS[args.dispatch_on(select_device())](num_experts=args.num_experts, top_k=args.top_k)


def _moe(args: MulaArgs) -> MulaMoE.Config:
    return MulaMoE.Config(
        num_experts=args.num_experts,
        load_balance_coeff=args.expert_bias_rate or None,
        router=Router.Config(
            num_experts=args.num_experts,
            top_k=args.top_k,
            score_func="softmax",
            route_norm=args.route_norm,
            gate=Float32Linear.Config(in_features=args.dim, out_features=args.num_experts, param_init=_LATER),
        ),
        routed_experts=KernelRoutedExperts.Config(
            inner_experts=KernelGroupedExperts.Config(
                dim=args.dim,
                hidden_dim=args.ffn_dim,
                num_experts=args.num_experts,
                param_init={name: skip_param_init for name in ("w1_EFD", "w2_EDF", "w3_EFD")},
            ),
            token_dispatcher=_dispatcher(args),
        ),
    )


def model_config(args: MulaArgs) -> MulaModel.Config:
    """Config tree of the model; ``build()`` makes the module.

    Raises:
        ValueError: a value that cannot work, with its field and the remedy.
    """
    for name, value, remedy in args.problems():
        raise ValueError(f"model.{name} = {value!r}: {remedy}")
    blocks = [
        MulaBlock.Config(
            attention=_attention(args),
            attention_norm=_norm(args),
            ffn_norm=_norm(args),
            moe=_moe(args) if args.num_experts else None,
            feed_forward=None if args.num_experts else _feed_forward(args),
        )
        for _ in range(args.n_layers)
    ]
    return MulaModel.Config(
        dim=args.dim,
        vocab_size=args.vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=args.vocab_size, embedding_dim=args.dim, param_init=_LATER),
        norm=_norm(args),
        lm_head=_linear(args.dim, args.vocab_size),
        layers=blocks,
        enable_weight_tying=args.tie_embeddings,
        init_std=args.init_std,
        document_mask=args.document_mask,
        load_balance_loss=args.load_balance_loss if args.num_experts else 0.0,
        load_balance_per_layer=args.load_balance_per_layer,
        load_balance_scope=args.load_balance_scope,
        router_z_loss=args.router_z_loss if args.num_experts else 0.0,
    )


def model_registry(flavor: str, **changes: Any) -> ModelSpec:
    """torchtitan's description of a model: config tree and the functions that parallelise it.

    Args:
        flavor: key of ``FLAVORS``, for example ``"mula_7b_a1b"``.
        **changes: fields of :class:`MulaArgs` that differ from the flavor.

    Raises:
        ValueError: unknown flavor or field, or a value that cannot work.
    """
    return model_spec(make_args(flavor, **changes))


def model_spec(args: MulaArgs) -> ModelSpec:
    """``ModelSpec`` of a model given by its scalars."""
    return ModelSpec(
        name="mula",
        flavor=args.flavor,
        model=model_config(args),
        parallelize_fn=parallelize_mula,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_load_balancing,
        state_dict_adapter=MulaStateDictAdapter,
    )
