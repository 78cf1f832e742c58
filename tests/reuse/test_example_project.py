"""The example package of docs/reuse.md: Mula models and components under torchtitan's own trainer and command line."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config.override import apply_overrides
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer

from mula_titan.components.experts import KernelGroupedExperts, KernelRoutedExperts
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
    # Port 0: the only rank takes a free one.
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    path = os.pathsep.join([str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torchtitan.train", "--module", "example_project", "--config", "tiny"),
            *("--hf_assets_path", str(ROOT / "assets/tokenizer"), "--dataloader.dataset_path", str(data)),
            *("--dump_folder", str(tmp_path / "out"), "--metrics.log_freq", "1", "--metrics.disable_color_printing"),
        ],
        env={**os.environ, **rank, "PYTHONPATH": path, "MULA_TITAN_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
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


def test_the_page_shows_this_example() -> None:
    code = (HERE / "example_project" / "config_registry.py").read_text(encoding="utf-8").rstrip()
    page = (ROOT / "docs" / "reuse.md").read_text(encoding="utf-8")
    assert f"```python\n{code}\n```" in page, "copy tests/reuse/example_project/config_registry.py into docs/reuse.md"


@pytest.mark.parametrize("name", ["kernel_routed_experts", "kernel_grouped_experts"])
def test_kernels_in_a_model_of_torchtitan(name: str) -> None:
    """One Mixture-of-Experts layer of Qwen3's debug model: the override changes the experts, not the numbers."""
    config = qwen3_moe_debug()
    stock = _moe_layer(config)
    config.override.imports = [f"mula_titan.components.experts.{name}"]
    assert apply_overrides(config.override, config)
    ours = _moe_layer(config)
    assert type(ours.routed_experts.inner_experts) is KernelGroupedExperts
    assert (type(ours.routed_experts) is KernelRoutedExperts) == (name == "kernel_routed_experts")

    torch.manual_seed(0)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    ours.load_state_dict(stock.state_dict())
    dim = config.model_spec.model.dim
    x_BLD = torch.randn(2, 16, dim)
    out_BLD, reference_BLD = ours(x_BLD), stock(x_BLD)
    # torchtitan's experts compute in bfloat16 whatever their parameters are: 8 bits of mantissa.
    assert reference_BLD.abs().max() > 0.01
    torch.testing.assert_close(out_BLD, reference_BLD, rtol=0, atol=2e-2 * reference_BLD.abs().max().item())


def _moe_layer(config: Trainer.Config) -> torch.nn.Module:
    layer = next(layer for layer in config.model_spec.model.layers if layer.moe is not None)
    return layer.moe.build()
