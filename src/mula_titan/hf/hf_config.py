"""``config.json`` of OLMo and OLMoE from :class:`MulaArgs`, and the reverse."""

from typing import Any

from mula_titan.model.args import FLAVORS, MulaArgs, make_args

_OLMO_EPS = 1e-5  # OlmoForCausalLM has no setting for it


def to_hf_config(args: MulaArgs) -> dict[str, Any]:
    """Fields of ``config.json`` that follow from the architecture.

    Raises:
        ValueError: neither OlmoForCausalLM nor OlmoeForCausalLM computes this model; names each obstacle.
    """
    moe = args.num_experts > 0
    needed = {"norm": "rms", "qk_norm": True} if moe else {"norm": "layer_no_affine", "qk_norm": False}
    if not moe:
        needed["norm_eps"] = _OLMO_EPS
    name = "OlmoeForCausalLM" if moe else "OlmoForCausalLM"
    wrong = [f"model.{k} = {getattr(args, k)!r} (it needs {v!r})" for k, v in needed.items() if getattr(args, k) != v]
    if wrong:
        raise ValueError(f"{name} of transformers can't represent this model: {', '.join(wrong)}")
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": "olmoe" if moe else "olmo",
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "max_position_embeddings": args.max_seq_len,
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": args.tie_embeddings,
        "initializer_range": args.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "use_cache": True,
    }
    if moe:
        config |= {
            "rms_norm_eps": args.norm_eps,
            "num_experts": args.num_experts,
            "num_experts_per_tok": args.top_k,
            "norm_topk_prob": args.route_norm,
            "router_aux_loss_coef": args.load_balance_loss,
            "output_router_logits": False,
        }
    return config


def from_hf_config(config: dict[str, Any]) -> MulaArgs:
    """Architecture that a ``config.json`` of OLMo or OLMoE describes; absent fields take transformers' defaults.

    Raises:
        ValueError: another architecture, a missing dimension, or settings that Mula models don't compute.
    """
    model_type = config.get("model_type")
    if model_type not in ("olmo", "olmoe"):
        raise ValueError(f"config.json: model_type = {model_type!r}; only 'olmo' and 'olmoe' can be imported")
    moe = model_type == "olmoe"
    problems = _unsupported(config)
    dims = {
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "ffn_dim": "intermediate_size",
        "vocab_size": "vocab_size",
    }
    if moe:
        dims |= {"num_experts": "num_experts", "top_k": "num_experts_per_tok"}
    problems += [f"{hf} is missing" for hf in dims.values() if config.get(hf) is None]
    if problems:
        raise ValueError("config.json can't be imported: " + "; ".join(problems))

    fields = {ours: config[hf] for ours, hf in dims.items()}
    fields["n_kv_heads"] = config.get("num_key_value_heads") or config["num_attention_heads"]
    fields["max_seq_len"] = config.get("max_position_embeddings", 4096 if moe else 2048)
    fields["rope_theta"] = float(_rope(config).get("rope_theta", config.get("rope_theta", 10000.0)))
    fields["tie_embeddings"] = config.get("tie_word_embeddings", False)
    fields["init_std"] = config.get("initializer_range", 0.02)
    fields["norm_eps"] = config.get("rms_norm_eps", 1e-5) if moe else _OLMO_EPS
    if moe:
        fields["route_norm"] = config.get("norm_topk_prob", False)
        fields["load_balance_loss"] = config.get("router_aux_loss_coef", 0.01)
    return make_args("mula_7b_a1b" if moe else "mula_1b", **fields)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings: transformers 5 writes ``rope_parameters``, earlier versions ``rope_scaling``."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _unsupported(config: dict[str, Any]) -> list[str]:
    """Settings that change the computation in a way that Mula models don't have, each with value and reason."""
    found = []

    def refuse(name: str, reason: str) -> None:
        found.append(f"{name} = {config[name]!r} ({reason})")

    rope_name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope_type = _rope(config).get("rope_type", _rope(config).get("type", "default"))
    if rope_type != "default" or _rope(config).get("partial_rotary_factor", 1.0) != 1.0:
        refuse(rope_name, "only plain rotary positions are implemented")
    if config.get("clip_qkv") is not None:
        refuse("clip_qkv", "queries, keys and values aren't clipped here, so logits would differ")
    if config.get("attention_bias"):
        refuse("attention_bias", "the projections have no bias here")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act", "the feed-forward is SwiGLU")
    if config.get("attention_dropout"):
        refuse("attention_dropout", "there is no dropout here")
    if config.get("quantization_config"):
        refuse("quantization_config", "export full-precision weights first")
    width = config.get("head_dim")
    if width is not None and width * config.get("num_attention_heads", 0) != config.get("hidden_size"):
        refuse("head_dim", "it must be hidden_size / num_attention_heads")
    return found


def changes_from_flavor(args: MulaArgs) -> dict[str, Any]:
    """Fields that differ from the flavor that ``args`` names: what a TOML ``[model]`` section must set beside it."""
    base = make_args(args.flavor) if args.flavor in FLAVORS else MulaArgs()
    return {name: getattr(args, name) for name in MulaArgs.__slots__ if getattr(args, name) != getattr(base, name)}
