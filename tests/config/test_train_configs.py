"""The shipped TOML files: all run, and the paper jobs have the paper's values (arXiv 2604.00785)."""

from pathlib import Path
from typing import Any

import pytest

from mula_titan.toml_config import load_config
from mula_titan.validate import validate
from tests.config.cases import ROOT, Place
from tests.config.test_overlay import get

FILES = sorted((ROOT / "train_configs").glob("*.toml"))
PAPER_RANKS = 3072

# Rows of the paper's table of jobs: pipeline, experts, sequences of a rank, checkpoint interval in steps, optimizer.
JOBS = {
    "mula_1b": (1, 1, 1, 1000, "so"),
    "mula_7b_a1b": (1, 1, 1, 1000, "so"),
    "mula_20b_a2b": (1, 12, 1, 1000, "epso"),
    "mula_100b_a7b": (4, 12, 4, 500, "epso"),
    "mula_220b_a10b": (8, 12, 8, 250, "epso"),
}

ALL_JOBS = {
    "training.global_batch_size": 3072,
    "training.seq_len": 2048,
    "training.max_norm": 1.0,
    "training.dtype": "float32",
    "training.mixed_precision_param": "bfloat16",
    "optimizer.lr": 4e-4,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.warmup_steps": 2500,
    "lr_scheduler.decay_type": "cosine",
    "lr_scheduler.min_lr_factor": 0.1,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.spmd_backend": "partial_dtensor",
    "checkpoint.enable": True,
    "checkpoint.last_save_model_only": False,
    "model.document_mask": False,
}


def load(path: Path, place: Place, ranks: int, *flags: str) -> Any:
    config, values = load_config(path, [*place.flags(), *flags])
    validate(config, values, ranks)
    return config


def test_one_file_a_flavor() -> None:
    assert {path.stem for path in FILES} == {"mula_debug", "mula_debug_dense", *JOBS}


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_file_is_sound(path: Path, place: Place) -> None:
    config = load(path, place, PAPER_RANKS if path.stem in JOBS else 2)
    assert config.model.flavor == path.stem


@pytest.mark.parametrize("name", JOBS)
def test_paper_job(name: str, place: Place) -> None:
    config = load(ROOT / "train_configs" / f"{name}.toml", place, PAPER_RANKS)
    pipeline, experts, local_batch, interval, sharding = JOBS[name]
    expected = ALL_JOBS | {
        "parallelism.pipeline_parallel_degree": pipeline,
        "parallelism.pipeline_parallel_microbatch_size": 1,
        "parallelism.expert_parallel_degree": experts,
        "training.local_batch_size": local_batch,
        "checkpoint.interval": interval,
        "optimizer.sharding": sharding,
    }
    if pipeline > 1:
        expected["parallelism.pipeline_parallel_schedule"] = "1F1B"
    assert {key: get(config, key) for key in expected} == expected
    assert config.optimizer.lr * config.lr_scheduler.min_lr_factor == pytest.approx(4e-5, rel=1e-12)
    # One pass of all data-parallel ranks is the global batch, so nothing is accumulated: 6.29 M tokens a step.
    data_ranks = PAPER_RANKS // pipeline
    assert data_ranks * local_batch == config.training.global_batch_size
    assert config.training.global_batch_size * config.training.seq_len == 6_291_456


@pytest.mark.parametrize("name", JOBS)
def test_paper_batch_on_fewer_ranks(name: str, place: Place) -> None:
    load(ROOT / "train_configs" / f"{name}.toml", place, PAPER_RANKS // 16)


def test_paper_job_on_wrong_number_of_ranks(place: Place) -> None:
    with pytest.raises(ValueError, match="must divide the 3071 ranks"):
        load(ROOT / "train_configs" / "mula_100b_a7b.toml", place, PAPER_RANKS - 1)
