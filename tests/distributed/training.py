"""Three training steps under a layout, and the same three steps written out in plain torch for one process."""

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed.utils import clip_grad_norm_

from mula_titan.components.load_balance import (
    RouterReport,
    moe_layers,
    reduced_counts,
    router_report,
    update_expert_bias,
)
from mula_titan.data.loader import TokenDataLoader, TokenSource
from mula_titan.model import model_registry
from mula_titan.toml_config import load_config
from mula_titan.trainer import MulaTrainer
from mula_titan.validate import validate
from tests.distributed.xpu_rules import XpuRules

STEPS = 3
MAX_NORM = 0.5  # below the norms that occur, so that clipping acts
GLOBAL_BATCH = 8
MICRO_BATCH = 2
SEQ_LEN = 16
VOCAB = 96
EOS = 0

# Matrices larger than init_std = 0.02 would give, so that routing and attention are far from uniform.
MODEL: dict[str, Any] = {
    "dim": 32,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 4,
    "ffn_dim": 24,
    "vocab_size": VOCAB,
    "max_seq_len": 64,
    "init_std": 0.1,
    "load_balance_loss": 0.05,
    "router_z_loss": 0.01,
    "expert_bias_rate": 0.01,
}
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.1}


@dataclass
class Layout:
    """A case: fields of the model and flags of the configuration that differ from the common ones."""

    data: str
    model: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    flavor: str = "mula_debug"
    reference_micro_batch: int = MICRO_BATCH
    global_batch: int = GLOBAL_BATCH
    xpu_rules: bool = False
    """Refuse the collectives that xccl refuses."""
    dump_folder: str | None = None
    """Where the run keeps its checkpoints; None for a folder that is thrown away."""


@dataclass
class Result:
    """What must be equal. Names are the model's; a pipeline rank has only its own parameters.

    Initial weights must be equal to the bit. Gradients (before clipping) and counts are those of the first step,
    weights and biases those after the last.
    """

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    counts: dict[str, torch.Tensor]
    biases: dict[str, torch.Tensor]
    reports: list[list[RouterReport]]
    """Of each step, all layers on every rank."""
    initial: dict[str, torch.Tensor]


def write_tokens(folder: Path, constant: bool = False) -> str:
    """Tokens in documents of 3 to 30, as an Optimus-style .npy file: random, or all the same.

    Equal tokens have equal hidden states, so that all of them choose the same experts.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCAB, size=2000, dtype=np.int32)
    if constant:
        tokens[:] = 7
    else:
        tokens[np.cumsum(rng.integers(3, 31, size=60))] = EOS
    path = folder / f"tokens-{constant}.npy"
    np.save(path, tokens)
    return str(path)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().float().cpu().clone()


def _flags(layout: Layout, dump_folder: str) -> list[str]:
    values = {
        "config": layout.flavor,
        "dump_folder": dump_folder,
        "hf_assets_path": "assets/tokenizer",
        "dataloader.sources": f'[{{path = "{layout.data}", eos_id = {EOS}}}]',
        "training.local_batch_size": MICRO_BATCH,
        "training.global_batch_size": layout.global_batch,
        "training.seq_len": SEQ_LEN,
        "training.steps": STEPS,
        "training.max_norm": MAX_NORM,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay_ratio": 0.0,
        "metrics.log_freq": 1,
        "metrics.enable_tensorboard": False,
        "metrics.enable_plot": False,
        **{f"optimizer.{key}": value for key, value in OPTIMIZER.items()},
        **{f"model.{key}": value for key, value in {**MODEL, **layout.model}.items()},
        **layout.flags,
    }
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def train(layout: Layout) -> Result:
    """Train on the ranks of the current process group, with the program's own trainer."""
    torch._dynamo.reset()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("torchtitan.trainer.time.sleep"),  # torchtitan waits 2 s for the other ranks' log lines
        mock.patch("torchtitan.distributed.utils.clip_grad_norm_") as clip,
        XpuRules() if layout.xpu_rules else nullcontext(),
    ):
        shared = [layout.dump_folder or folder]
        dist.broadcast_object_list(shared)  # one folder for all ranks, as a job has
        trainer = _trainer(layout, shared[0])
        config = trainer.config
        result = Result([], [], {}, {}, {}, {}, [], {})
        parts = trainer.model_parts

        def parameters() -> list[tuple[str, torch.Tensor]]:
            return [(canonical_fqn(n), p) for part in parts for n, p in part.named_parameters()]

        result.initial = {name: _full(p) for name, p in parameters()}

        def observed_clip(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not result.gradients:
                result.gradients = {name: _full(p.grad) for name, p in parameters()}
                if layout.flavor == "mula_debug":
                    counts = reduced_counts(parts, trainer.parallel_dims)
                    names = [f"layers.{i}" for i, _ in moe_layers(parts)]
                    result.counts = dict(zip(names, counts, strict=True))
            return clip_grad_norm_(*args, **kwargs)

        clip.side_effect = observed_clip

        def observed_log(step: int, loss: float, max_loss: float, norm: float, extra_metrics: Any = None) -> None:
            result.losses.append(loss)
            result.grad_norms.append(norm)
            if layout.flavor == "mula_debug":
                num_choices = int(trainer.metrics_processor.step_valid_tokens) * config.model.top_k
                result.reports.append(router_report(parts, trainer.parallel_dims, config.model.n_layers, num_choices))

        trainer.metrics_processor.log = observed_log
        trainer.train()
        result.weights = {name: _full(p) for name, p in parameters()}
        result.biases = {
            canonical_fqn(n): _full(b) for part in parts for n, b in part.named_buffers() if n.endswith("expert_bias_E")
        }
        trainer.close()
    return result


def _trainer(layout: Layout, dump_folder: str) -> MulaTrainer:
    config, values = load_config(None, _flags(layout, dump_folder))
    validate(config, values, dist.get_world_size())
    return config.build()


def load_state(layout: Layout) -> dict[str, torch.Tensor]:
    """Load the newest checkpoint of the layout's folder; weights, biases and optimizer states by name."""
    assert layout.dump_folder is not None
    trainer = _trainer(layout, layout.dump_folder)
    assert trainer.checkpointer.load()
    state = {canonical_fqn(n): _full(p) for part in trainer.model_parts for n, p in part.named_parameters()}
    for part in trainer.model_parts:
        state |= {f"bias.{canonical_fqn(n)}": _full(b) for n, b in part.named_buffers() if "expert_bias" in n}
    optimizer = trainer.optimizers.state_dict()
    state |= {key: _full(value) for key, value in optimizer.items() if isinstance(value, torch.Tensor)}
    trainer.close()
    return state


def reference(layout: Layout) -> Result:
    """The same steps in one process: plain modules, autograd and torch.optim.AdamW, micro-batches in global order."""
    model = model_registry(layout.flavor, **{**MODEL, **layout.model}).model
    model.init_seed = 42
    module = model.build()
    module.init_states()
    loader = TokenDataLoader(
        TokenDataLoader.Config(
            sources=[TokenSource(path=layout.data, eos_id=EOS)],
            vocab_size=VOCAB,
            document_mask=layout.model.get("document_mask", True),
        ),
        dp_world_size=1,
        dp_rank=0,
        tokenizer=None,
        seq_len=SEQ_LEN,
        local_batch_size=layout.reference_micro_batch,
    )
    undecayed = [p for n, p in module.named_parameters() if p.ndim < 2 or n == "tok_embeddings.weight"]
    decayed = [p for n, p in module.named_parameters() if not (p.ndim < 2 or n == "tok_embeddings.weight")]
    optimizer = torch.optim.AdamW(
        [{"params": undecayed, "weight_decay": 0.0}, {"params": decayed}], betas=(0.9, 0.95), eps=1e-8, **OPTIMIZER
    )
    result = Result([], [], {}, {}, {}, {}, [], {})
    result.initial = {n: p.detach().clone() for n, p in module.named_parameters()}
    batches = iter(loader)
    for _ in range(STEPS):
        micro_batches = [next(batches) for _ in range(layout.global_batch // layout.reference_micro_batch)]
        valid = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in micro_batches)
        optimizer.zero_grad()
        total = 0.0
        for inputs, labels in micro_batches:
            weights = (labels != IGNORE_INDEX).float() / valid
            logits = module(inputs["input"], positions=inputs["positions"], token_weights=weights)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
            (loss / valid).backward()
            total += float(loss.detach()) / valid
        result.losses.append(total)
        if not result.gradients:
            result.gradients = {n: p.grad.clone() for n, p in module.named_parameters()}
        result.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)))
        moes = {index: block.moe for index, block in module.layers.items() if block.moe_enabled}
        if moes:
            counts = torch.stack([moe.tokens_per_expert_E for moe in moes.values()])
            if not result.counts:
                result.counts = {f"layers.{index}": c.clone() for index, c in zip(moes, counts, strict=True)}
            result.reports.append(
                [
                    RouterReport(
                        layer=int(index),
                        load_max_over_mean=float(c.max() / c.mean()),
                        busiest_share=float(c.max() / c.sum()),
                        idle_experts=int((c == 0).sum()),
                        entropy=float(module.router_sums_L2[int(index), 0]),
                        z_loss=float(module.router_sums_L2[int(index), 1]),
                        dropped=0,
                    )
                    for index, c in zip(moes, counts, strict=True)
                ]
            )
            update_expert_bias(list(moes.values()), counts)
            for moe in moes.values():
                moe.tokens_per_expert_E.zero_()
            module.start_step()
        optimizer.step()
    result.weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    result.biases = {n: b.clone() for n, b in module.named_buffers() if n.endswith("expert_bias_E")}
    return result
