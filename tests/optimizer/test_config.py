"""Settings of so and epso that cannot work are refused with the remedy; optimizers that don't fit are too."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torchtitan.components.optimizer import ParamGroupConfig

from mula_titan.components.optimizer import AdamWContainer
from mula_titan.toml_config import ConfigError, load_config
from mula_titan.validate import validate
from tests.distributed.test_parity import EP, TP
from tests.distributed.training import Layout, _flags

SO, EPSO = {"optimizer.sharding": "so"}, {"optimizer.sharding": "epso"}
REFUSED = {
    "bucket": (EPSO | {"optimizer.bucket_mib": 0}, "optimizer.bucket_mib = 0.0: must be positive"),
    "clip": (EPSO | {"optimizer.clip_after_step": -1}, "optimizer.clip_after_step = -1: must be at least 0"),
    "fsdp": ({"optimizer.offload_states": True}, "has no effect with optimizer.sharding = 'fsdp'"),
    "offload": (EPSO | {"training.enable_cpu_offload": True}, "set false and optimizer.offload_states = true"),
    "graphs": (EPSO | {"training.disable_cuda_graphs": False}, "training.disable_cuda_graphs = False"),
    "moments": (EPSO | {"optimizer.implementation": "fused_opt_states_bf16"}, "set 'fused': moments are float32"),
    "export": (EPSO | {"checkpoint.last_save_in_hf": True}, "set false and use `mula-titan export`"),
    "so_tp_ep": (SO | {TP: 2, EP: 2}, "has no owners for tensor-parallel weights beside expert ranks; use 'epso'"),
    "kind": ({"optimizer.sharding": "zero"}, "expected one of 'fsdp', 'so', 'epso'"),
}


def _check(tmp_path: Path, flags: dict, world_size: int = 4) -> None:
    (tmp_path / "tokens.npy").touch()
    layout = Layout(data=str(tmp_path / "tokens.npy"), flags=flags)
    config, values = load_config(None, _flags(layout, str(tmp_path)))
    validate(config, values, world_size)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_the_run(name: str, tmp_path: Path) -> None:
    flags, message = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        _check(tmp_path, flags)
    assert message in str(error.value)


def test_good_settings_pass(tmp_path: Path) -> None:
    options = {"grad_dtype": "bfloat16", "bucket_mib": 64, "offload_states": True, "clip_after_step": 100}
    _check(tmp_path, EPSO | {TP: 2, EP: 4} | {f"optimizer.{key}": value for key, value in options.items()})
    _check(tmp_path, SO | {EP: 4})


def test_model_that_fsdp_shards_is_refused() -> None:
    config = AdamWContainer.Config(sharding="epso")
    with pytest.raises(ValueError, match=r"'epso', but the model is prepared for 'fsdp'.*replicate_parameters"):
        config.build(model_parts=[nn.Linear(2, 2)])


def test_other_optimizers_are_refused() -> None:
    part = nn.Linear(2, 2)
    part.optimizer_plan = ("epso", None, torch.float32)
    group = ParamGroupConfig(pattern=".*", optimizer_name="Adam", optimizer_kwargs={"lr": 1.0})
    config = replace(AdamWContainer.Config(sharding="epso"), param_groups=[group])
    with pytest.raises(ValueError, match=r"uses \['Adam'\].* has only AdamW"):
        config.build(model_parts=[part])
