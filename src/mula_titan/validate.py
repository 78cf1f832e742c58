"""Checks across sections that need no process group: values, degrees, divisibility, paths.

Everything here would otherwise fail after the job has its nodes, or give wrong results.
"""

import os
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from mula_titan.runtime import select_device
from mula_titan.toml_config import ConfigError, Values
from mula_titan.trainer import MulaTrainer

Problem = tuple[str, str]
"""(key, what is wrong with its value and what to do)"""

AT_LEAST = {
    "training.local_batch_size": 1,
    "training.seq_len": 1,
    "training.steps": 1,
    "training.gc_freq": 1,
    "lr_scheduler.warmup_steps": 0,
    "metrics.log_freq": 1,
    "validator.freq": 1,
    "comm.init_timeout_seconds": 1,
    "comm.train_timeout_seconds": 1,
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "optimizer.weight_decay": 0,
}
POSITIVE = ("training.max_norm", "optimizer.lr", "optimizer.eps")
FRACTIONS = ("optimizer.beta1", "optimizer.beta2", "lr_scheduler.min_lr_factor")


def validate(config: MulaTrainer.Config, values: Values, world_size: int) -> None:
    """Refuse a configuration that cannot run on ``world_size`` ranks.

    Raises:
        ConfigError: all problems found, a line each: origin, key, value, remedy.
    """
    problems = [*_ranges(config)]
    if not problems:  # the sums below would trip over values out of range
        problems = [*_degrees(config, world_size), *_model_fits(config), *_batches(config, world_size), *_paths(config)]
    if problems:
        raise ConfigError(
            "\n".join(f"{values.origin(key)}: {key} = {_get(config, key)!r}: {text}" for key, text in problems)
        )


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _ranges(config: MulaTrainer.Config) -> Iterator[Problem]:
    for key, least in AT_LEAST.items():
        if _get(config, key) < least:
            yield key, f"must be at least {least}"
    for key in POSITIVE:
        if not _get(config, key) > 0:
            yield key, "must be positive"
    for key in FRACTIONS:
        if not 0 <= _get(config, key) <= 1:
            yield key, "must lie in 0..1"
    for key in ("optimizer.beta1", "optimizer.beta2"):
        if _get(config, key) == 1:
            yield key, "must be below 1"
    shard = config.parallelism.data_parallel_shard_degree
    if shard < 1 and shard != -1:
        yield "parallelism.data_parallel_shard_degree", "must be at least 1, or -1 for all ranks that are left"
    batch = config.training.global_batch_size
    if batch < 1 and batch != -1:
        yield "training.global_batch_size", "must be at least 1, or -1 for no gradient accumulation"


def _degrees(config: MulaTrainer.Config, world_size: int) -> Iterator[Problem]:
    p = config.parallelism
    parts = {
        "data_parallel_replicate_degree": p.data_parallel_replicate_degree,
        "context_parallel_degree": p.context_parallel_degree,
        "tensor_parallel_degree": p.tensor_parallel_degree,
        "pipeline_parallel_degree": p.pipeline_parallel_degree,
    }
    product = 1
    for degree in parts.values():
        product *= degree
    formula = " x ".join(f"{name} {degree}" for name, degree in parts.items())
    shard = p.data_parallel_shard_degree
    if shard == -1:
        if world_size % product:
            yield (
                "parallelism.data_parallel_shard_degree",
                f"the other degrees' product {product} ({formula}) must divide the {world_size} ranks; "
                "change a degree or the number of ranks (NGPU)",
            )
            return
        shard = world_size // product
    elif product * shard != world_size:
        yield (
            "parallelism.data_parallel_shard_degree",
            f"the product of degrees {product * shard} ({formula}) must equal the {world_size} ranks; "
            f"set -1 for all ranks that are left, or start {product * shard} ranks (NGPU)",
        )
        return
    inside = shard * p.context_parallel_degree * p.tensor_parallel_degree
    if inside % p.expert_parallel_degree:
        yield (
            "parallelism.expert_parallel_degree",
            f"must divide data_parallel_shard_degree x context_parallel_degree x tensor_parallel_degree = {inside}",
        )
    if p.spmd_backend != "partial_dtensor":
        yield "parallelism.spmd_backend", "Mula models need 'partial_dtensor'"


def _model_fits(config: MulaTrainer.Config) -> Iterator[Problem]:
    model, p = config.model, config.parallelism
    if model.num_experts and model.num_experts % p.expert_parallel_degree:
        yield (
            "parallelism.expert_parallel_degree",
            f"must divide model.num_experts ({model.num_experts}); "
            f"possible: {', '.join(str(d) for d in range(1, model.num_experts + 1) if model.num_experts % d == 0)}",
        )
    if not model.num_experts and p.expert_parallel_degree > 1:
        yield "parallelism.expert_parallel_degree", f"the model {model.flavor} is dense; set 1"
    tp = p.tensor_parallel_degree
    for name in ("n_heads", "n_kv_heads", "ffn_dim"):
        if getattr(model, name) % tp:
            yield "parallelism.tensor_parallel_degree", f"must divide model.{name} ({getattr(model, name)})"
    seq_divisor = (tp if p.enable_sequence_parallel or p.expert_parallel_degree > 1 else 1) * (
        2 * p.context_parallel_degree if p.context_parallel_degree > 1 else 1
    )
    if config.training.seq_len % seq_divisor:
        yield "training.seq_len", f"must be a multiple of {seq_divisor} for this sequence and context parallelism"
    if config.training.seq_len > model.max_seq_len:
        yield "training.seq_len", f"exceeds model.max_seq_len ({model.max_seq_len}); raise that or shorten this"
    if p.pipeline_parallel_degree > model.n_layers + 2:
        yield "parallelism.pipeline_parallel_degree", f"more stages than the model's {model.n_layers} layers can fill"
    over_all_layers = model.num_experts and model.load_balance_loss and not model.load_balance_per_layer
    if over_all_layers and p.pipeline_parallel_degree > 1:
        yield (
            "model.load_balance_per_layer",
            "the loss over all layers' tokens needs every layer on one pipeline stage; set true, or "
            "pipeline_parallel_degree = 1",
        )
    if p.context_parallel_degree > 1 and select_device() == "cpu":
        yield "parallelism.context_parallel_degree", "torch has no context-parallel attention for CPUs; set 1"
    if p.context_parallel_degree > 1 and model.num_experts and (model.load_balance_loss or model.router_z_loss):
        yield (
            "parallelism.context_parallel_degree",
            "the router losses would see a part of each sequence; set model.load_balance_loss = 0 and "
            "model.router_z_loss = 0 and balance by model.expert_bias_rate, or set 1",
        )
    if p.context_parallel_degree > 1 and model.document_mask and model.attention == "sdpa":
        yield (
            "model.document_mask",
            "context parallelism has no mask for sdpa; set false, or attention = 'flex'",
        )
    if model.tie_embeddings and p.pipeline_parallel_degree > 1:
        yield "model.tie_embeddings", "pipeline parallelism puts embedding and head on different ranks; set false"


def _batches(config: MulaTrainer.Config, world_size: int) -> Iterator[Problem]:
    p, t = config.parallelism, config.training
    data_ranks = world_size // (p.context_parallel_degree * p.tensor_parallel_degree * p.pipeline_parallel_degree)
    unit = t.local_batch_size * max(1, data_ranks)
    if t.global_batch_size != -1 and t.global_batch_size % unit:
        yield (
            "training.global_batch_size",
            f"must be a multiple of local_batch_size {t.local_batch_size} x data-parallel ranks {data_ranks} = {unit}",
        )
    if t.disable_cuda_graphs is False and p.pipeline_parallel_degree > 1:
        yield "training.disable_cuda_graphs", "pipeline parallelism doesn't run in CUDA graphs; set true"


def _paths(config: MulaTrainer.Config) -> Iterator[Problem]:
    loaders = {"dataloader": config.dataloader}
    if config.validator.enable:
        loaders["validator.dataloader"] = config.validator.dataloader
    for key, loader in loaders.items():
        if loader.dataset_path and loader.sources:
            yield f"{key}.dataset_path", f"set either this or {key}.sources"
        elif not loader.dataset_path and not loader.sources:
            yield f"{key}.dataset_path", "set the folder that `mula-titan tokenize` wrote"
        elif loader.dataset_path and not _exists(loader.dataset_path):
            yield f"{key}.dataset_path", "no such file or folder; make it with `mula-titan tokenize`"
    if not Path(config.hf_assets_path).is_dir():
        yield "hf_assets_path", "no such folder; it must hold the tokenizer's files (tokenizer.json)"
    parent = Path(config.dump_folder).absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        yield "dump_folder", f"cannot be written: {parent} is not a writable folder"


def _exists(path: str) -> bool:
    return bool(glob(path)) if has_magic(path) else Path(path).exists()
