"""Tiny models with random weights, saved as training checkpoints are."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from mula_titan import MulaArgs
from mula_titan.hf.checkpoint_info import write_checkpoint_info
from mula_titan.model.args import make_args
from mula_titan.model.spec import model_spec

TOKENIZER = Path(__file__).parents[2] / "assets" / "tokenizer"

TINY = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "vocab_size": 2048,
    "ffn_dim": 24,
    "rope_theta": 500.0,
    "init_std": 0.15,
}
MODELS = {
    "dense": ("mula_debug_dense", {}),
    "dense_tied": ("mula_debug_dense", {"tie_embeddings": True}),
    "dense_gqa": ("mula_debug_dense", {"n_kv_heads": 2}),
    "moe": ("mula_debug", {"norm_eps": 1e-3}),
    "moe_tied": ("mula_debug", {"tie_embeddings": True}),
    "moe_gqa": ("mula_debug", {"n_kv_heads": 2}),
    "moe_route_norm": ("mula_debug", {"route_norm": True, "top_k": 3}),
    "moe_bias": ("mula_debug", {"expert_bias_rate": 0.01}),
}


def tiny_args(kind: str, **changes) -> MulaArgs:
    flavor, own = MODELS[kind]
    return make_args(flavor, **TINY | own | changes)


def build(args: MulaArgs) -> nn.Module:
    """The model with its initial weights."""
    model = model_spec(args).model.build()
    model.init_states()
    return model.eval()


def random_model(args: MulaArgs) -> nn.Module:
    """As ``build``, with norm weights that differ too: a swap of two norms must show in the logits."""
    model = build(args)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.uniform_(0.5, 1.5, generator=generator)
    return model


def save(model: nn.Module, args: MulaArgs, folder: Path, **changes: torch.Tensor | None) -> Path:
    """Save as the trainer does, beside optimizer and progress; ``changes`` replace keys or, None, remove them."""
    state = {**model.state_dict(), **changes}
    state = {key: value for key, value in state.items() if value is not None}
    optimizer = {f"state.{name}.exp_avg": torch.zeros_like(p) for name, p in model.named_parameters()}
    dcp.save({**state, "optimizer": optimizer, "train_state": {"step": 5}}, checkpoint_id=folder, no_dist=True)
    write_checkpoint_info(folder, args, str(TOKENIZER))
    return folder


def load(args: MulaArgs, folder: Path) -> nn.Module:
    """Native model with the weights of a checkpoint."""
    model = build(args)
    state = model.state_dict()
    for value in state.values():
        value.fill_(float("nan"))
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, 2048, (2, 24), generator=torch.Generator().manual_seed(1))


def assert_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    scale = theirs.abs().max()
    assert scale > 0.5, "logits too small to tell models apart"
    assert (ours - theirs).abs().max() <= 1e-5 * scale
