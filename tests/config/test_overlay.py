"""TOML over registry, flags over TOML, and every key can be set and keeps its type."""

import importlib.util
import types
import typing
from dataclasses import is_dataclass
from typing import Any, Literal

import pytest

from mula_titan import config_registry
from mula_titan.toml_config import AC_SECTION, load_config, settable_fields
from mula_titan.validate import DERIVED
from tests.config.cases import ROOT, Place

_spec = importlib.util.spec_from_file_location("document_config", ROOT / "scripts" / "document_config.py")
document_config = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(document_config)


def test_registry_then_file_then_flag(place: Place) -> None:
    assert place.load("").training.steps == config_registry.mula_debug().training.steps == 10000
    assert place.load("training.steps = 7").training.steps == 7
    assert place.load("training.steps = 7", "--training.steps", "9").training.steps == 9
    assert place.load("training.steps = 7", "--training.seq_len=64").training.steps == 7
    assert place.load("", "--training.steps=9", "--training.steps=11").training.steps == 11


FLAGS = [
    (["--training.steps=9"], "training.steps", 9),
    (["--training.local-batch-size", "3"], "training.local_batch_size", 3),
    (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
    (["--optimizer.lr", "3e-4"], "optimizer.lr", 3e-4),
    (["--optimizer.decay_all"], "optimizer.decay_all", True),
    (["--optimizer.decay_all", "--training.steps=9"], "optimizer.decay_all", True),
    (["--optimizer.decay_all", "True"], "optimizer.decay_all", True),
    (["--model.document_mask", "false"], "model.document_mask", False),
    (["--model.document_mask=False"], "model.document_mask", False),
    (["--compile.components", "model,loss"], "compile.components", ["model", "loss"]),
    (["--compile.components", "loss"], "compile.components", ["loss"]),
    (["--compile.components", '["loss"]'], "compile.components", ["loss"]),
    (["--dump_folder", "2024"], "dump_folder", "2024"),
    (["--dump_folder", "2024-01-01"], "dump_folder", "2024-01-01"),
    (["--checkpoint.folder", "1e3"], "checkpoint.folder", "1e3"),
    (["--checkpoint.folder", "a b"], "checkpoint.folder", "a b"),
    (["--debug.seed", "None"], "debug.seed", None),
    (["--parallelism.context_parallel_load_balancer", "none"], "parallelism.context_parallel_load_balancer", None),
    (["--parallelism.data_parallel_shard_degree", "-1"], "parallelism.data_parallel_shard_degree", -1),
    (
        ["--optimizer.optimizer_factory_kwargs_by_name", "{AdamW = {}}"],
        "optimizer.optimizer_factory_kwargs_by_name",
        {"AdamW": {}},
    ),
]


@pytest.mark.parametrize(("flags", "key", "value"), FLAGS, ids=[" ".join(case[0]) for case in FLAGS])
def test_flags_keep_the_type_of_their_key(place: Place, flags: list[str], key: str, value: Any) -> None:
    result = get(place.load("", *flags), key)
    assert result == value
    assert type(result) is type(value)


def get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every settable key but the activation checkpointing's, with its value."""
    found = {}
    for name in settable_fields(config):
        value = getattr(config, name)
        if is_dataclass(value):
            found |= leaves(value, f"{prefix}{name}.")
        elif name != AC_SECTION:
            found[prefix + name] = value
    return found


# Keys whose changed value must be this one, and keys that are only accepted beside others.
CHANGED = {
    "checkpoint.initial_load_path": "/some/where",
    "model.n_heads": 2,
    "model.n_kv_heads": 2,
    "model.dim": 64,
}
BESIDE = {
    "model.n_heads": {"model.n_kv_heads": 2},
    "compile.enable_async_tensor_parallel": {"compile.enable": True},
    "checkpoint.last_save_in_hf": {"checkpoint.last_save_model_only": True},
    "checkpoint.initial_load_in_hf_quantized": {
        "checkpoint.initial_load_in_hf": True,
        "checkpoint.initial_load_path": "/some/where",
    },
    "checkpoint.load_only": {"checkpoint.enable": True},
}
REFUSED = {
    "dataloader.dataset",
    "validator.dataloader.dataset",
    "debug.batch_invariant",
    "parallelism.enable_fsdp_symm_mem",  # without a GPU
    "model.flavor",  # names the registry function
}
TABLES = {
    "dataloader.sources",
    "validator.dataloader.sources",
    "optimizer.param_groups",
    "optimizer.optimizer_factory_kwargs_by_name",
    "parallelism.module_fqns_per_model_part",
    "override.imports",
}
KEYS = [key for key in document_config.keys_of(config_registry.mula_debug()) if key.name not in REFUSED | TABLES]
SCALARS = [key for key in KEYS if not key.name.startswith("activation_checkpoint.")]


def changed(key: Any) -> Any:
    """Another value of the key's type."""
    if key.name in CHANGED:
        return CHANGED[key.name]
    hint = key.hint
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is Literal:
        return next((option for option in typing.get_args(hint) if option != key.default), key.default)
    if typing.get_origin(hint) is list:
        return [7, 9] if typing.get_args(hint) == (int,) else ["something", "else"]
    return {bool: lambda old: not old, int: lambda old: (old or 1) + 5, float: lambda old: (old or 0) + 0.25}.get(
        hint, lambda old: f"{old or ''}x"
    )(key.default)


def toml_value(value: Any) -> str:
    return repr(value).lower() if isinstance(value, bool) else repr(value)


@pytest.mark.parametrize("key", SCALARS, ids=[key.name for key in SCALARS])
def test_every_scalar_can_be_set_and_changes_nothing_else(place: Place, key: Any) -> None:
    new = {key.name: changed(key), **BESIDE.get(key.name, {})}
    before = leaves(config_registry.mula_debug())
    place.toml.write_text(
        "model.flavor = 'mula_debug'\n" + "".join(f"{name} = {toml_value(value)}\n" for name, value in new.items())
    )
    after = leaves(load_config(place.toml)[0])
    for derived, source in DERIVED.items():
        if derived in new:
            new[derived] = before[derived]  # the trainer's word counts; validate() refuses this key
        elif source in new:
            new[derived] = new[source]
    assert type(after[key.name]) is type(new[key.name])
    assert after == before | new


def test_tables(place: Place) -> None:
    config = place.load(
        """
        parallelism.module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]
        override.imports = ["a.b", ["c.d", {x = 1}]]
        [[dataloader.sources]]
        path = "web"
        weight = 3
        [[dataloader.sources]]
        path = "code"
        dtype = "uint16"
        eos_id = 5
        [[optimizer.param_groups]]
        pattern = ".*"
        optimizer_name = "AdamW"
        optimizer_kwargs = {lr = 1e-3, betas = [0.9, 0.99]}
        """.replace('"web"', f"'{place.folder}'").replace('"code"', f"'{place.folder}'"),
        "--dataloader.dataset_path=none",
    )
    web, code = config.dataloader.sources
    assert (web.path, web.weight, web.dtype, web.eos_id) == (str(place.folder), 3.0, "", None)
    assert isinstance(web.weight, float)
    assert (code.weight, code.dtype, code.eos_id) == (1.0, "uint16", 5)
    assert config.parallelism.module_fqns_per_model_part[1] == ["layers.1", "norm", "lm_head"]
    assert config.override.imports == ["a.b", ("c.d", {"x": 1})]
    (group,) = config.optimizer.param_groups
    assert (group.pattern, group.optimizer_name, group.optimizer_kwargs["lr"]) == (".*", "AdamW", 1e-3)
    assert config.optimizer.groups() == [group]


def test_activation_checkpoint_modes(place: Place) -> None:
    def mode(text: str, *flags: str, flavor: str = "mula_debug") -> Any:
        return place.load(text, *flags, flavor=flavor, ranks=1).activation_checkpoint

    assert mode("") is None
    assert type(mode("activation_checkpoint.mode = 'full'")).__qualname__ == "FullAC.Config"
    assert type(mode("activation_checkpoint = 'full'")).__qualname__ == "FullAC.Config"
    assert type(mode("", "--activation_checkpoint.mode=selective")).__qualname__ == "SelectiveAC.Config"
    budget = mode("compile.enable = true\n[activation_checkpoint]\nmode = 'memory_budget'\nmemory_budget = 0.25")
    assert type(budget).__qualname__ == "MemoryBudgetAC.Config"
    assert budget.memory_budget == 0.25
    # A registry's mode stays where only its fields are set, and goes where another is chosen.
    full = mode("activation_checkpoint.preserve_rng_state = false", flavor="mula_100b_a7b")
    assert type(full).__qualname__ == "FullAC.Config"
    assert full.preserve_rng_state is False
    assert mode("activation_checkpoint.mode = 'none'", flavor="mula_100b_a7b") is None
    message = place.refusal("[activation_checkpoint]\nmode = 'memory_budget'\nmemory_budget = 1.5", "--compile.enable")
    assert message == "run.toml: activation_checkpoint.memory_budget = 1.5: must lie in 0..1"


def test_registry_of_another_package(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    package = place.folder / "another_project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "config_registry.py").write_text(
        "from mula_titan.config_registry import mula_debug\n\n"
        "def narrow():\n    config = mula_debug()\n    config.training.steps = 77\n    return config\n\n"
        "def _hidden():\n    pass\n"
    )
    monkeypatch.syspath_prepend(place.folder)
    text = "module = 'another_project'\nconfig = 'narrow'\n"
    config = place.load(text + "training.seq_len = 64")
    assert (config.training.steps, config.training.seq_len) == (77, 64)
    assert place.load(text, "--training.steps=8").training.steps == 8
    assert place.load("", "--config=narrow", "--module=another_project").training.steps == 77
    # Imported and private functions are no configurations.
    message = place.refusal(text.replace("narrow", "mula_debug"))
    assert message == "run.toml: config = 'mula_debug': choose one of 'narrow'"
    assert "choose one of 'narrow'" in place.refusal(text.replace("narrow", "_hidden"))
