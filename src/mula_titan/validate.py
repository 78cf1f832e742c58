"""Checks across sections that need no process group: values, degrees, divisibility, paths.

Everything here would otherwise fail after the job has its nodes, or give wrong results.
"""

import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from torchtitan.tools import filesystem

from mula_titan.data.loader import TokenDataLoader
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
    "lr_scheduler.total_steps": 1,
    "lr_scheduler.decay_ratio": 0,
    "checkpoint.load_step": -1,
    "profiler.profile_freq": 1,
    "profiler.profiler_active": 1,
    "profiler.profiler_warmup": 0,
    "profiler.profiler_repeat": 0,
    "profiler.profiler_skip_first": 0,
    "profiler.profiler_skip_first_wait": 0,
    "profiler.memory_snapshot_freq": 1,
    "profiler.memory_snapshot_max_entries": 1,
    "debug.seed": 0,
    "metrics.log_freq": 1,
    "validator.freq": 1,
    "comm.init_timeout_seconds": 1,
    "comm.train_timeout_seconds": 1,
    "comm.trace_buf_size": 0,
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.pipeline_parallel_layers_per_stage": 1,
    "parallelism.pipeline_parallel_first_stage_less_layers": 0,
    "parallelism.pipeline_parallel_last_stage_less_layers": 0,
    "parallelism.context_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "optimizer.weight_decay": 0,
    "optimizer.clip_after_step": 0,
}
POSITIVE = ("training.max_norm", "optimizer.lr", "optimizer.eps", "optimizer.bucket_mib", "metrics.router_alarm")
FRACTIONS = (
    "optimizer.beta1",
    "optimizer.beta2",
    "lr_scheduler.decay_ratio",
    "lr_scheduler.min_lr_factor",
    "activation_checkpoint.memory_budget",
)
FINITE = ("optimizer.lr", "optimizer.eps", "optimizer.weight_decay")
DERIVED = {
    "dataloader.document_mask": "model.document_mask",
    "dataloader.vocab_size": "model.vocab_size",
    "dataloader.global_batch_size": "training.global_batch_size",
    "validator.dataloader.document_mask": "model.document_mask",
    "validator.dataloader.vocab_size": "model.vocab_size",
}
"""Keys that the trainer fills in from another one."""
CHECKPOINT_PARTS = ("optimizer", "lr_scheduler", "dataloader", "train_state", "rng")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")


SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def validate(config: MulaTrainer.Config, values: Values, world_size: int, *, paths: bool = True) -> None:
    """Refuse a configuration that cannot run on ``world_size`` ranks.

    Args:
        config: the configuration.
        values: its values with their origins.
        world_size: ranks of the job.
        paths: look at files and folders too; planning needs none.

    Raises:
        ConfigError: all problems found, a line each: origin, key, value, remedy.
    """
    if not isinstance(config, MulaTrainer.Config):
        raise ConfigError(
            f"{values.origin('config')}: the registry function gives a {type(config).__qualname__}, which mula-titan "
            "cannot train; return a MulaTrainer.Config, or run it with python -m torchtitan.train --module ... --config"
        )
    problems = [*_ranges(config), *_ignored(config, values)]
    if not problems:  # the sums below would trip over values out of range
        problems = [
            *_degrees(config, world_size),
            *_model_fits(config),
            *_optimizer_fits(config, values),
            *_batches(config, world_size),
            *(_paths(config) if paths else ()),
        ]
    if problems:
        raise ConfigError(
            "\n".join(f"{values.origin(key)}: {key} = {_get(config, key)!r}: {text}" for key, text in problems)
        )


def _get(config: Any, key: str) -> Any:
    """Value of a dotted key; None if this run's component has no such field."""
    for part in key.split("."):
        config = getattr(config, part, None)
    return config


def _ranges(config: MulaTrainer.Config) -> Iterator[Problem]:
    def refused(keys: Iterable[str], is_good: Callable[[Any], bool], remedy: str) -> Iterator[Problem]:
        for key in keys:
            value = _get(config, key)
            if value is not None and not is_good(value):  # comparisons with nan are false
                yield key, remedy

    for least in sorted(set(AT_LEAST.values())):
        keys = [key for key, bound in AT_LEAST.items() if bound == least]
        yield from refused(keys, partial(operator.le, least), f"must be at least {least}")
    yield from refused(POSITIVE, lambda value: value > 0, "must be positive")
    yield from refused(FRACTIONS, lambda value: 0 <= value <= 1, "must lie in 0..1")
    yield from refused(("optimizer.beta1", "optimizer.beta2"), lambda value: value != 1, "must be below 1")
    yield from refused(FINITE, lambda value: value < math.inf, "must be finite")
    shard = config.parallelism.data_parallel_shard_degree
    if shard < 1 and shard != -1:
        yield "parallelism.data_parallel_shard_degree", "must be at least 1, or -1 for all ranks that are left"
    batch = config.training.global_batch_size
    if batch < 1 and batch != -1:
        yield "training.global_batch_size", "must be at least 1, or -1 for no gradient accumulation"
    profiler = config.profiler
    cycle = profiler.profiler_warmup + profiler.profiler_active
    if profiler.enable_profiling and profiler.profile_freq < cycle:
        yield "profiler.profile_freq", f"must be at least profiler_warmup + profiler_active = {cycle}"
    unknown = set(config.checkpoint.exclude_from_loading) - set(CHECKPOINT_PARTS)
    if unknown:
        yield "checkpoint.exclude_from_loading", f"no such part; choose among {', '.join(CHECKPOINT_PARTS)}"


def _ignored(config: MulaTrainer.Config, values: Values) -> Iterator[Problem]:
    """Keys that would have no effect."""
    for key, source in DERIVED.items():
        if values.origin(key) != "defaults":
            yield key, f"follows from {source}; set that one and leave this out"
    if config.checkpoint.create_seed_checkpoint:
        yield "checkpoint.create_seed_checkpoint", "initial weights are the same on every mesh without it; set false"
    if config.comm.mode == "local_tensor":
        yield "comm.mode", "trains nothing in this torchtitan; set 'default'"


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
    if p.pipeline_parallel_degree > 1 and p.pipeline_parallel_schedule in SPLIT_BACKWARD and model.num_experts:
        yield (
            "parallelism.pipeline_parallel_schedule",
            "zero-bubble schedules compute gradients of inputs and weights apart, which torch cannot do through "
            "expert layers; use '1F1B' or 'Interleaved1F1B'",
        )
    if config.checkpoint.last_save_in_hf and model.expert_bias_rate:
        yield (
            "checkpoint.last_save_in_hf",
            "Hugging Face's models have no place for the experts' biases of model.expert_bias_rate; set false and "
            "use `mula-titan export --drop-expert-bias`",
        )
    if model.tie_embeddings and p.pipeline_parallel_degree > 1:
        yield "model.tie_embeddings", "pipeline parallelism puts embedding and head on different ranks; set false"


def _optimizer_fits(config: MulaTrainer.Config, values: Values) -> Iterator[Problem]:
    sharding = getattr(config.optimizer, "sharding", "fsdp")
    if sharding == "fsdp":
        for name in ("grad_dtype", "bucket_mib", "offload_states", "clip_after_step"):
            if values.origin(f"optimizer.{name}") != "defaults":
                yield f"optimizer.{name}", "has no effect with optimizer.sharding = 'fsdp'; leave it out, or set 'epso'"
        return
    no = f"doesn't go with optimizer.sharding = {sharding!r}; "
    if config.training.enable_cpu_offload:
        yield "training.enable_cpu_offload", no + "set false and optimizer.offload_states = true"
    if not config.training.disable_cuda_graphs:
        yield "training.disable_cuda_graphs", no + "set true"
    if config.optimizer.implementation == "fused_opt_states_bf16":
        yield "optimizer.implementation", no + "set 'fused': moments are float32, split over the ranks"
    for name in ("last_save_in_hf", "initial_load_in_hf"):
        if getattr(config.checkpoint, name):
            command = "export" if name == "last_save_in_hf" else "import"
            yield f"checkpoint.{name}", no + f"set false and use `mula-titan {command}`"
    p = config.parallelism
    if sharding == "so" and p.tensor_parallel_degree > 1 and p.expert_parallel_degree > 1:
        yield "optimizer.sharding", "has no owners for tensor-parallel weights beside expert ranks; use 'epso'"


def _batches(config: MulaTrainer.Config, world_size: int) -> Iterator[Problem]:
    p, t = config.parallelism, config.training
    data_ranks = world_size // (p.context_parallel_degree * p.tensor_parallel_degree * p.pipeline_parallel_degree)
    unit = t.local_batch_size * max(1, data_ranks)
    if t.global_batch_size != -1 and t.global_batch_size % unit:
        yield (
            "training.global_batch_size",
            f"must be a multiple of local_batch_size {t.local_batch_size} x data-parallel ranks {data_ranks} = {unit}",
        )
    micro_batches = t.local_batch_size // max(1, p.pipeline_parallel_microbatch_size)
    if p.pipeline_parallel_degree > 1 and micro_batches < p.pipeline_parallel_degree:
        yield (
            "training.local_batch_size",
            f"gives {micro_batches} pipeline micro-batches of {p.pipeline_parallel_microbatch_size}, fewer than the "
            f"{p.pipeline_parallel_degree} stages; set at least "
            f"{p.pipeline_parallel_degree * p.pipeline_parallel_microbatch_size}",
        )
    if t.disable_cuda_graphs is False and p.pipeline_parallel_degree > 1:
        yield "training.disable_cuda_graphs", "pipeline parallelism doesn't run in CUDA graphs; set true"


def _paths(config: MulaTrainer.Config) -> Iterator[Problem]:
    loaders = {"dataloader": config.dataloader}
    if config.validator.enable:
        loaders["validator.dataloader"] = config.validator.dataloader
    for key, loader in loaders.items():
        if not isinstance(loader, TokenDataLoader.Config):
            continue  # another project's loader checks its own
        if loader.dataset_path and loader.sources:
            yield f"{key}.dataset_path", f"set either this or {key}.sources"
        elif not loader.dataset_path and not loader.sources:
            yield f"{key}.dataset_path", "set the folder that `mula-titan tokenize` wrote"
        elif loader.dataset_path and not _exists(loader.dataset_path):
            yield f"{key}.dataset_path", "no such file or folder; make it with `mula-titan tokenize`"
        for source in loader.sources:
            if not _exists(source.path):
                yield f"{key}.sources", f"{source.path}: no such file or folder; make it with `mula-titan tokenize`"
    if not Path(config.hf_assets_path).is_dir():
        yield "hf_assets_path", "no such folder; it must hold the tokenizer's files (tokenizer.json)"
    elif not any((Path(config.hf_assets_path) / name).is_file() for name in TOKENIZER_FILES):
        yield "hf_assets_path", f"no tokenizer in this folder: none of {', '.join(TOKENIZER_FILES)}"
    initial = config.checkpoint.initial_load_path
    if config.checkpoint.enable and initial and not filesystem.is_remote(initial) and not Path(initial).is_dir():
        yield "checkpoint.initial_load_path", "no such folder; `mula-titan import` and training write checkpoints"
    parent = Path(config.dump_folder).absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        yield "dump_folder", f"cannot be written: {parent} is not a writable folder"


def _exists(path: str) -> bool:
    return bool(glob(path)) if has_magic(path) else Path(path).exists()
