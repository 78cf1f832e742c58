import json
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import OlmoConfig, OlmoeConfig, OlmoeForCausalLM, OlmoForCausalLM

from mula_titan.hf.checkpoint_info import read_checkpoint_info
from mula_titan.hf.export import ExportOptions, export
from mula_titan.hf.hf_config import from_hf_config, to_hf_config
from mula_titan.hf.import_ import ImportOptions, import_checkpoint
from tests.hf.tiny_models import MODELS, assert_same_logits, load, tiny_args, tokens

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "rms_norm_eps": 1e-3}
THEIRS = {
    "dense": OlmoConfig(**SIZES),
    "dense_tied": OlmoConfig(**SIZES, tie_word_embeddings=True),
    "moe": OlmoeConfig(**SIZES, **EXPERTS),
    "moe_tied": OlmoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=True),
    "moe_gqa_route_norm": OlmoeConfig(**SIZES, **EXPERTS, num_key_value_heads=2, norm_topk_prob=True),
}


def theirs_saved(kind, folder, **options):
    """A random model of transformers, saved by its own ``save_pretrained``."""
    torch.manual_seed(3)
    config = THEIRS[kind]
    model = (OlmoeForCausalLM if config.model_type == "olmoe" else OlmoForCausalLM)(config).eval()
    for param in model.parameters():
        if param.ndim == 1:
            param.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder, **options)
    return model


def run(source, checkpoint, **options):
    return import_checkpoint(ImportOptions(source=source, checkpoint=checkpoint, **options))


@contextmanager
def edited(folder):
    """The tensors of ``model.safetensors``, saved again after the block."""
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("shard", [{}, {"max_shard_size": "150KB"}], ids=["one_file", "sharded"])
def test_logits_equal_those_of_transformers(tmp_path, kind, shard):
    theirs = theirs_saved(kind, tmp_path / "hf", **shard)
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file() == bool(shard)
    checkpoint = run(tmp_path / "hf", tmp_path / "step-0")
    args = read_checkpoint_info(checkpoint).args
    with torch.no_grad():
        assert_same_logits(load(args, checkpoint)(tokens()), theirs(tokens()).logits)


@pytest.mark.parametrize("kind", MODELS)
def test_export_then_import_is_bitwise(saved, tmp_path, kind):
    model, args, checkpoint = saved(kind)
    folder = export(ExportOptions(checkpoint=checkpoint, output=tmp_path / "hf", dtype="keep", shard_gb=100e-6))
    again = run(folder, tmp_path / "step-0")
    info = read_checkpoint_info(again)
    assert info.hf_assets_path == str(folder)
    assert to_hf_config(info.args) == to_hf_config(args)
    loaded = load(args, again).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name


def test_imported_checkpoint_serves_runs_with_and_without_balancing_bias(tmp_path):
    theirs_saved("moe", tmp_path / "hf")
    checkpoint = run(tmp_path / "hf", tmp_path / "step-0")
    args = tiny_args("moe_bias", top_k=3)
    loaded = load(args, checkpoint)
    assert torch.equal(loaded.layers["1"].moe.expert_bias_E, torch.zeros(8))
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    assert stored.keys() == loaded.state_dict().keys()
    # Zero biases don't keep it from being exported again.
    export(ExportOptions(checkpoint=checkpoint, output=tmp_path / "again"))


def test_values_are_read_one_at_a_time(tmp_path, monkeypatch):
    from torch.distributed.checkpoint import filesystem

    theirs_saved("moe", tmp_path / "hf", dtype=torch.float32)
    sizes, original = [], filesystem._write_item

    def spy(transforms, stream, data, *rest):
        sizes.append(data.numel())
        return original(transforms, stream, data, *rest)

    monkeypatch.setattr(filesystem, "_write_item", spy)
    run(tmp_path / "hf", tmp_path / "step-0")
    # Embedding and head; each expert's three matrices on their own, never a stack of all experts.
    assert max(sizes) == 2048 * 32 and sizes.count(24 * 32) == 2 * 8 * 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"clip_qkv": 8.0}, r"clip_qkv = 8\.0 \(queries, keys and values aren't clipped"),
        ({"attention_bias": True}, r"attention_bias = True \(the projections have no bias"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu' \(the feed-forward is SwiGLU"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_scaling = \{'type': 'linear'.*plain rotary"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, r"rope_parameters = \{'rope_type': 'yarn'"),
        ({"attention_dropout": 0.1}, r"attention_dropout = 0\.1"),
        ({"head_dim": 16}, r"head_dim = 16"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config"),
        ({"hidden_size": None}, r"hidden_size is missing"),
        ({"model_type": "llama"}, r"model_type = 'llama'; only 'olmo' and 'olmoe'"),
        ({"num_attention_heads": 5}, r"model\.n_heads = 5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_settings_are_refused(tmp_path, setting, message):
    theirs_saved("moe", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    if "rope_scaling" in setting:
        del config["rope_parameters"]
    path.write_text(json.dumps(config | setting))
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "hf", tmp_path / "step-0")


def test_config_of_transformers_4_is_read():
    config = to_hf_config(tiny_args("moe_gqa"))
    assert config["rope_theta"] == 500.0 and "rope_parameters" not in config
    args = from_hf_config(config)
    assert (args.rope_theta, args.n_kv_heads, args.top_k, args.num_experts) == (500.0, 2, 2, 8)
    assert from_hf_config({k: v for k, v in config.items() if k != "rope_theta"}).rope_theta == 10000.0


def test_tensors_that_do_not_fit_are_listed_and_nothing_is_written(tmp_path):
    theirs_saved("moe", tmp_path / "hf")
    gate = "model.layers.1.mlp.experts.5.gate_proj.weight"
    with edited(tmp_path / "hf") as tensors:
        del tensors[gate]
        tensors["model.layers.1.mlp.shared.weight"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(31)
    with pytest.raises(ValueError) as error:
        run(tmp_path / "hf", tmp_path / "step-0")
    for line in (
        f"missing: {gate}",
        "left over: model.layers.1.mlp.shared.weight",
        "shape of model.norm.weight: (31,), the model has (32,)",
    ):
        assert line in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_experts_of_several_dtypes_are_refused(tmp_path):
    theirs_saved("moe", tmp_path / "hf")
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    with edited(tmp_path / "hf") as tensors:
        tensors[name] = tensors[name].bfloat16()
    with pytest.raises(ValueError, match=r"w3_EFD have several dtypes: \['torch.bfloat16', 'torch.float32'\]"):
        run(tmp_path / "hf", tmp_path / "step-0")


def test_stored_tied_head_must_be_the_embedding(tmp_path):
    theirs_saved("dense_tied", tmp_path / "hf")
    with edited(tmp_path / "hf") as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    run(tmp_path / "hf", tmp_path / "step-0")
    with edited(tmp_path / "hf") as tensors:
        tensors["lm_head.weight"][0, 0] += 1
    with pytest.raises(ValueError, match=r"left over: lm_head\.weight"):
        run(tmp_path / "hf", tmp_path / "step-0", overwrite=True)
    assert (tmp_path / "step-0" / ".metadata").is_file()


def test_index_and_files_must_agree(tmp_path):
    theirs_saved("dense", tmp_path / "hf", max_shard_size="150KB")
    path = tmp_path / "hf" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "model.layers.0.self_attn.q_proj.weight"
    del index["weight_map"][name]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"disagree about \['model\.layers\.0\.self_attn\.q_proj\.weight'\]"):
        run(tmp_path / "hf", tmp_path / "step-0")
    index["weight_map"][name] = "absent.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"can't read .*absent\.safetensors"):
        run(tmp_path / "hf", tmp_path / "step-0")
