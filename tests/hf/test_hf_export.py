import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, OlmoeForCausalLM, OlmoForCausalLM

from mula_titan.hf.checkpoint_info import write_checkpoint_info
from mula_titan.hf.export import ExportOptions, export
from tests.hf.tiny_models import MODELS, TOKENIZER, assert_same_logits, random_model, save, tiny_args, tokens


def run(checkpoint, output, **options):
    return export(ExportOptions(checkpoint=checkpoint, output=output, **{"dtype": "float32"} | options))


def from_pretrained(folder, **options):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_those_of_transformers(saved, tmp_path, kind):
    model, args, checkpoint = saved(kind)
    theirs = from_pretrained(run(checkpoint, tmp_path / "hf"))
    assert type(theirs) is (OlmoeForCausalLM if args.num_experts else OlmoForCausalLM)
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        assert_same_logits(model(tokens()), theirs(tokens()).logits)


def test_greedy_tokens_equal(saved, tmp_path):
    model, _, checkpoint = saved("moe")
    theirs = from_pretrained(run(checkpoint, tmp_path / "hf"))
    prompts = tokens()[:, :5]
    ours = prompts
    with torch.no_grad():
        for _ in range(8):
            ours = torch.cat([ours, model(ours)[:, -1].argmax(-1, keepdim=True)], dim=1)
    generated = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=8, do_sample=False)
    assert torch.equal(generated, ours)


def test_each_expert_goes_to_its_own_name(tmp_path):
    args = tiny_args("moe")
    model = random_model(args)
    for layer, block in enumerate(model.layers.values()):
        experts = block.moe.routed_experts.inner_experts
        for kind, weight in enumerate((experts.w1_EFD, experts.w2_EDF, experts.w3_EFD), start=1):
            weight.data[:] = torch.arange(8.0)[:, None, None] + 10 * kind + 100 * layer
    written = load_file(run(save(model, args, tmp_path / "step-1"), tmp_path / "hf") / "model.safetensors")
    for layer in range(2):
        for expert in range(8):
            for kind, (name, shape) in enumerate(
                [("gate_proj", (24, 32)), ("down_proj", (32, 24)), ("up_proj", (24, 32))], start=1
            ):
                weight = written[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"]
                assert torch.equal(weight, torch.full(shape, expert + 10.0 * kind + 100 * layer))


def test_files_hold_every_tensor_once_and_stay_below_the_limit(saved, tmp_path):
    model, _, checkpoint = saved("moe")
    folder = run(checkpoint, tmp_path / "hf", shard_gb=300e-6)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    sizes = {}
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            assert {key for key, where in index["weight_map"].items() if where == name} == set(file.keys())
            sizes[name] = sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118
    assert sum(sizes.values()) == index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    assert max(sizes.values()) <= 300_000
    with torch.no_grad():
        assert_same_logits(model(tokens()), from_pretrained(folder)(tokens()).logits)


def test_default_dtype_is_bfloat16_and_keep_changes_nothing(saved, tmp_path):
    model, _, checkpoint = saved("moe")
    key, native = "model.layers.1.self_attn.k_proj.weight", model.layers["1"].attention.qkv_linear.wk.weight
    rounded = load_file(run(checkpoint, tmp_path / "bf16", dtype=ExportOptions.dtype) / "model.safetensors")
    assert {w.dtype for w in rounded.values()} == {torch.bfloat16}
    assert torch.equal(rounded[key], native.bfloat16())
    assert from_pretrained(tmp_path / "bf16").dtype == torch.bfloat16
    kept = load_file(run(checkpoint, tmp_path / "keep", dtype="keep") / "model.safetensors")
    assert kept[key].dtype == torch.float32 and torch.equal(kept[key], native)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.1.ffn_norm.weight": None}, r"missing: layers\.1\.ffn_norm\.weight"),
        ({"layers.1.moe.shared.w1": torch.zeros(2)}, r"left over: layers\.1\.moe\.shared\.w1"),
        ({"layers.2.ffn_norm.weight": torch.zeros(32)}, r"left over: layers\.2\.ffn_norm\.weight"),
        ({"lm_head.weight": torch.zeros(2048, 31)}, r"shape of lm_head\.weight: \(2048, 31\).*\(2048, 32\)"),
    ],
    ids=["missing", "unknown", "extra_layer", "reshaped"],
)
def test_tensors_that_do_not_fit_are_listed_and_nothing_is_written(tmp_path, change, message):
    args = tiny_args("moe")
    checkpoint = save(random_model(args), args, tmp_path / "step-1", **change)
    with pytest.raises(ValueError, match=message):
        run(checkpoint, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1"]


def test_balancing_bias_needs_a_decision(saved, tmp_path):
    model, args, _ = saved("moe_bias")
    model.layers["1"].moe.expert_bias_E[3] = -0.25
    checkpoint = save(model, args, tmp_path / "biased")
    with pytest.raises(ValueError, match=r"layers\.1\.moe\.expert_bias_E is up to 0\.25.*--drop-expert-bias"):
        run(checkpoint, tmp_path / "hf")
    model.layers["1"].moe.expert_bias_E.zero_()
    with torch.no_grad():
        theirs = from_pretrained(run(checkpoint, tmp_path / "hf", drop_expert_bias=True))(tokens()).logits
        assert_same_logits(model(tokens()), theirs)


def test_tied_description_of_an_untied_checkpoint_is_refused(saved, tmp_path):
    _, args, checkpoint = saved("moe")
    write_checkpoint_info(checkpoint, replace(args, tie_embeddings=True), None)
    with pytest.raises(
        ValueError, match=r"tie_embeddings is true, but tok_embeddings\.weight and lm_head\.weight differ"
    ):
        run(checkpoint, tmp_path / "hf")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("moe", {"qk_norm": False}, r"OlmoeForCausalLM.*model\.qk_norm = False \(it needs True\)"),
        ("dense", {"norm": "rms"}, r"OlmoForCausalLM.*model\.norm = 'rms' \(it needs 'layer_no_affine'\)"),
        ("dense", {"norm_eps": 1e-6}, r"model\.norm_eps = 1e-06 \(it needs 1e-05\)"),
    ],
)
def test_models_that_transformers_lacks_are_refused(saved, tmp_path, kind, change, message):
    _, _, checkpoint = saved(kind, **change)
    with pytest.raises(ValueError, match=message):
        run(checkpoint, tmp_path / "hf")


def test_tokenizer_comes_along(saved, tmp_path):
    _, _, checkpoint = saved("moe")
    folder = run(checkpoint, tmp_path / "hf")
    ours, source = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(TOKENIZER)
    text = "It is a truth universally acknowledged"
    assert ours(text).input_ids == source(text).input_ids
    config = json.loads((folder / "config.json").read_text())
    assert (
        config["eos_token_id"]
        == source.eos_token_id
        == json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    )
    assert config["pad_token_id"] == source.pad_token_id and config["bos_token_id"] is None


def test_tokenizer_with_more_ids_than_embedding_rows_is_refused(saved, tmp_path):
    _, _, checkpoint = saved("moe", vocab_size=2000)
    with pytest.raises(ValueError, match=r"token id 2047, but the model has 2000 embedding rows"):
        run(checkpoint, tmp_path / "hf")


def test_occupied_folders_are_kept_unless_an_export_may_be_replaced(saved, tmp_path):
    _, _, checkpoint = saved("dense")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    for overwrite, message in ((False, "isn't empty"), (True, "holds no config.json")):
        with pytest.raises(ValueError, match=message):
            run(checkpoint, foreign, overwrite=overwrite)
    assert (foreign / "thesis.tex").read_text() == "x"

    folder = run(checkpoint, tmp_path / "hf")
    (folder / "stale.safetensors").write_text("")
    with pytest.raises(ValueError, match="isn't empty"):
        run(checkpoint, folder)
    run(checkpoint, folder, overwrite=True)
    assert not (folder / "stale.safetensors").exists() and (folder / "model.safetensors").is_file()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_wrong_checkpoint_path_names_the_right_one(saved, tmp_path):
    _, _, checkpoint = saved("dense")
    with pytest.raises(ValueError, match=r"checkpoint is no complete checkpoint\. Did you mean .*step-5"):
        run(checkpoint.parent, tmp_path / "hf")
    with pytest.raises(ValueError, match="doesn't exist"):
        run(tmp_path / "nowhere", tmp_path / "hf")


def test_one_native_tensor_is_read_at_a_time(saved, tmp_path, monkeypatch):
    import torch.distributed.checkpoint as dcp

    loads, original = [], dcp.load
    monkeypatch.setattr(dcp, "load", lambda state, **options: (loads.append(list(state)), original(state, **options)))
    model, _, checkpoint = saved("moe")
    run(checkpoint, tmp_path / "hf", shard_gb=100e-6)
    assert loads == [[name] for name in model.state_dict()]
