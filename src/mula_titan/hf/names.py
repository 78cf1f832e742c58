"""The one table of parameter names, ours and Hugging Face's, and the functions that read it.

``{}`` stands for the layer, and in Hugging Face names of expert weights the second one for the expert: we keep all
experts of a layer in one tensor, checkpoints on disk keep one tensor per expert. Shapes agree otherwise, and both sides
rotate halves in RoPE, so no weight is permuted or transposed.
"""

import re

NATIVE_TO_HF = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.qkv_linear.wq.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.qkv_linear.wk.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.qkv_linear.wv.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.qkv_linear.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "layers.{}.attention.qkv_linear.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "layers.{}.attention.wo.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.feed_forward.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.feed_forward.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.feed_forward.w3.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.moe.router.gate.weight": "model.layers.{}.mlp.gate.weight",
    "layers.{}.moe.routed_experts.inner_experts.w1_EFD": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "layers.{}.moe.routed_experts.inner_experts.w2_EDF": "model.layers.{}.mlp.experts.{}.down_proj.weight",
    "layers.{}.moe.routed_experts.inner_experts.w3_EFD": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}

EMBEDDING = "tok_embeddings.weight"
HEAD = "lm_head.weight"

_HF_TO_NATIVE = {hf: native for native, hf in NATIVE_TO_HF.items()}
_EXPERT_BIAS = "layers.{}.moe.expert_bias_E"
_MODEL_ROOTS = {native.partition(".")[0] for native in NATIVE_TO_HF}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def is_expert_bias(native: str) -> bool:
    """Whether a native key is the router's balancing bias, for which Hugging Face models have no place."""
    return _NUMBER.sub("{}", native) == _EXPERT_BIAS


def is_model_key(key: str) -> bool:
    """Whether a key of a training checkpoint belongs to the model, by its first component."""
    return key.partition(".")[0] in _MODEL_ROOTS


def is_computed(hf: str) -> bool:
    """Whether old Hugging Face checkpoints hold a key that the model computes itself: the rotary frequencies."""
    return hf.endswith(".rotary_emb.inv_freq")


def hf_name(native: str) -> str | None:
    """Hugging Face name of a native key, or None if there is none.

    A tensor with all experts of a layer gives a name with one ``{}`` left, for the expert.
    """
    template = NATIVE_TO_HF.get(_NUMBER.sub("{}", native))
    if template is None:
        return None
    for layer in _NUMBER.findall(native):
        template = template.replace("{}", layer, 1)
    return template


def native_name(hf: str) -> tuple[str, int | None] | None:
    """Native key of a Hugging Face name and the expert's index in it (None: all of it), or None if there is none."""
    template = _HF_TO_NATIVE.get(_NUMBER.sub("{}", hf))
    if template is None:
        return None
    layer, expert, *_ = [*map(int, _NUMBER.findall(hf)), None, None]
    return template.format(layer), expert
