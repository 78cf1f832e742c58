"""The example package of docs/reuse.md: Mula models and components under torchtitan's own trainer and command line."""

import importlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.trainer import Trainer

from mula_titan.components.experts import KernelRoutedExperts
from mula_titan.data.tokenize import TokenizeOptions, tokenize

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def test_example_trains_with_torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    config = importlib.import_module("example_project.config_registry").tiny()
    assert type(config) is Trainer.Config
    assert type(config.checkpoint) is CheckpointManager.Config
    assert isinstance(config.model_spec.model.layers[0].moe.routed_experts, KernelRoutedExperts.Config)

    data = tmp_path / "data"
    tokenize(TokenizeOptions(inputs=[str(ROOT / "assets/austen/validation.jsonl")], output=data, workers=1))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torchtitan.train", "--module", "example_project", "--config", "tiny"),
            *("--hf_assets_path", str(ROOT / "assets/tokenizer"), "--dataloader.dataset_path", str(data)),
            *("--dump_folder", str(tmp_path / "out"), "--metrics.log_freq", "1", "--metrics.disable_color_printing"),
        ],
        env={**os.environ, **rank, "PYTHONPATH": str(HERE), "MULA_TITAN_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    log = run.stdout + run.stderr
    assert run.returncode == 0, log[-4000:]
    losses = [float(loss) for loss in re.findall(r"step: *\d+ +loss: +([\d.]+)", log)]
    assert len(losses) == 20
    # It starts from the uniform distribution over 2048 tokens: ln 2048 = 7.62.
    assert losses[0] == pytest.approx(7.62, abs=0.05)
    assert losses[-1] < losses[0] - 1.0

    # The bias moves every expert's score by at most its rate a step, and the moves of a layer are centred.
    bias_E = torch.zeros(8)
    dcp.load({"layers.0.moe.expert_bias_E": bias_E}, checkpoint_id=tmp_path / "out" / "checkpoint" / "step-20")
    assert 1e-3 <= bias_E.abs().max() <= 20 * 2e-3
    assert bias_E.sum().abs() < 1e-6
