"""Tensor-, sequence- and expert-parallel placements of every module, as data (torchtitan's ``ShardingConfig``)."""

from typing import TYPE_CHECKING

import spmd_types as spmd
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
    norm_config,
    set_decoder_sharding_config,
    set_dense_ffn_sharding,
    set_gqa_attention_sharding,
    set_gqa_inner_attention_local_map,
)
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.protocols.sharding import ShardingConfig

from mula_titan.model.attention import NormedQKVLinear

if TYPE_CHECKING:
    from mula_titan.model.model import MulaModel

_EXPERT_LAYOUT = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}


def set_mula_sharding_config(config: "MulaModel.Config", *, enable_sp: bool, enable_ep: bool) -> None:
    """Fill ``sharding_config`` on all sub-configs; axes that a run doesn't use are ignored when it is applied."""
    set_decoder_sharding_config(config, enable_sp=enable_sp)
    activation = dense_sequence_parallel_placement() if enable_sp else dense_activation_placement(tp=spmd.I)
    for layer in config.layers:
        layer.attention_norm.sharding_config = norm_config(enable_sp=enable_sp)
        layer.ffn_norm.sharding_config = norm_config(enable_sp=enable_sp)
        set_gqa_attention_sharding(layer.attention, enable_sp=enable_sp)
        set_gqa_inner_attention_local_map(layer.attention.inner_attention)
        if isinstance(layer.attention.qkv_linear, NormedQKVLinear.Config):
            for norm in (layer.attention.qkv_linear.q_norm, layer.attention.qkv_linear.k_norm):
                norm.sharding_config = _full_width_norm_config()
        if layer.feed_forward is not None:
            set_dense_ffn_sharding(layer.feed_forward, attn_x_layout=activation, enable_sp=enable_sp)
        if layer.moe is not None:
            set_moe_sharding_config(
                layer.moe, enable_ep=enable_ep, enable_sp=enable_sp, expert_param_layout=_EXPERT_LAYOUT
            )


def _full_width_norm_config() -> ShardingConfig:
    """Norm over a column-parallel projection: weight and activations split along the width."""
    sharded = dense_activation_placement(tp=spmd.S(2))
    return ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.S(0))},
        in_src_shardings={"input": sharded},
        out_src_shardings=sharded,
    )
