"""The kept choice of tile sizes: per device kind and expert size, read back, never a candidate that fails."""

from __future__ import annotations

import json

import pytest
import torch

from inductor_kernels import configs
from inductor_kernels.configs import GemmConfig

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def h200(monkeypatch, tmp_path):
    monkeypatch.setenv("INDUCTOR_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for function in (configs.layer_config, configs.load_tuned):
        function.cache_clear()
    yield tmp_path / "NVIDIA-H200.json"
    for function in (configs.layer_config, configs.load_tuned):
        function.cache_clear()


def test_tuned_choice_replaces_the_built_in_one(h200):
    built_in = configs.layer_config(DEVICE, torch.bfloat16, 2048, 1024)
    tuned = {"block_m": 128, "block_n": 64, "block_k": 32, "num_stages": 2}
    h200.write_text(json.dumps({"bfloat16-D2048-F1024": {"down": tuned}}))
    configs.layer_config.cache_clear()
    configs.load_tuned.cache_clear()
    config = configs.layer_config(DEVICE, torch.bfloat16, 2048, 1024)
    assert config.down == GemmConfig(**tuned) and config.gate_up == built_in.gate_up
    assert configs.layer_config(DEVICE, torch.bfloat16, 3072, 1536) == built_in


def test_fastest_passes_over_what_fails(monkeypatch):
    tune = pytest.importorskip("inductor_kernels.tune", reason="this build of torch brings no triton")
    start = GemmConfig(block_m=128, block_n=256, block_k=64)
    configs_ = tune.candidates(start)
    assert configs_[0] == start and len(set(configs_)) == len(configs_) and {c.block_m for c in configs_} == {128}
    times = {c: 5.0 - i * 0.01 for i, c in enumerate(configs_)}
    broken, winner = configs_[7], configs_[5]
    times[broken], times[winner] = 0.1, 1.0

    def run(config):
        if config == broken:
            raise RuntimeError("out of shared memory")
        return times[config]

    monkeypatch.setattr(tune, "device_ms", lambda call: call())
    assert tune.fastest(run, configs_) == (winner, 1.0)
