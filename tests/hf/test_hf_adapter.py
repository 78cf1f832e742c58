import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from mula_titan.hf.adapter import MulaStateDictAdapter
from mula_titan.hf.description import write_description
from mula_titan.hf.export import ExportOptions, export
from mula_titan.hf.hf_config import to_hf_config
from mula_titan.hf.import_ import ImportOptions, import_checkpoint
from mula_titan.model.spec import model_spec
from tests.hf.tiny_models import MODELS, TOKENIZER, assert_same_logits, build, random_model, tiny_args, tokens

W1 = "layers.0.moe.routed_experts.inner_experts.w1_EFD"
GATE = "model.layers.0.mlp.experts.{}.gate_proj.weight"


def adapter(args):
    return MulaStateDictAdapter(model_spec(args).model, None)


@pytest.mark.parametrize("kind", MODELS)
def test_plain_state_dict_goes_out_to_the_names_of_transformers_and_back(kind):
    args = tiny_args(kind)
    model = random_model(args)
    theirs = AutoModelForCausalLM.from_config(_config(args))
    hf = adapter(args).to_hf(model.state_dict())
    # transformers keeps experts stacked in memory but saves them one by one.
    expected = {name for name in theirs.state_dict() if ".experts." not in name}
    if args.tie_embeddings:
        expected.remove("lm_head.weight")
    for layer in range(args.n_layers):
        for e in range(args.num_experts):
            expected |= {f"model.layers.{layer}.mlp.experts.{e}.{p}_proj.weight" for p in ("gate", "up", "down")}
    assert hf.keys() == expected
    back = adapter(args).from_hf(hf)
    assert back.keys() == {name for name in model.state_dict() if "expert_bias_E" not in name}
    assert all(torch.equal(back[name], model.state_dict()[name]) for name in back)


def _config(args):
    from transformers import AutoConfig

    config = to_hf_config(args)
    return AutoConfig.for_model(config.pop("model_type"), **config, pad_token_id=None)


@contextmanager
def rank_of(mesh_shape, names, rank):
    """A mesh as seen by one of its ranks, in a process group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh_shape))
    try:
        yield init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


LAYOUTS = {
    "fsdp": ((4,), ("fsdp",), [Shard(0)]),
    "fsdp_uneven": ((3,), ("fsdp",), [Shard(0)]),
    "more_ranks_than_experts": ((12,), ("fsdp",), [Shard(0)]),
    "ep": ((4,), ("ep",), [Shard(0)]),
    "fsdp_ep": ((2, 4), ("efsdp", "ep"), [_StridedShard(0, split_factor=4), Shard(0)]),
    "fsdp_of_width_ep": ((3, 4), ("efsdp", "ep"), [Shard(1), Shard(0)]),
    "fsdp_of_width_uneven": ((5, 2), ("efsdp", "ep"), [Shard(1), Shard(0)]),
    "hsdp_ep": ((2, 2, 2), ("dp_replicate", "efsdp", "ep"), [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]),
}


def distribute(full, mesh, placements):
    """This rank's part of a tensor, cut innermost mesh dimension first as FSDP over EP does."""
    local = full
    for dim in reversed(range(mesh.ndim)):
        if not isinstance(placements[dim], Replicate):
            chunks = local.chunk(mesh.size(dim), dim=placements[dim].dim)
            index = mesh.get_coordinate()[dim]
            local = chunks[index] if index < len(chunks) else local.narrow(placements[dim].dim, 0, 0)
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_has_its_own_experts_under_their_names(layout):
    mesh_shape, names, placements = LAYOUTS[layout]
    full = torch.arange(8 * 24 * 32.0).view(8, 24, 32)  # the values tell expert and row
    seen = {e: torch.zeros(24, 32) for e in range(8)}
    for rank in range(math.prod(mesh_shape)):
        with rank_of(mesh_shape, names, rank) as mesh:
            weights = distribute(full, mesh, placements)
            convert = adapter(tiny_args("moe"))
            hf = convert.to_hf({W1: weights})
            for name, value in hf.items():
                expert = int(name.split(".")[5])
                assert name == GATE.format(expert) and value.shape == (24, 32)
                local = value.to_local() if isinstance(value, DTensor) else value
                if not local.numel():
                    continue
                assert local.untyped_storage().data_ptr() == weights.to_local().untyped_storage().data_ptr()
                first = int(local.flatten()[0].item()) // 32 - expert * 24
                assert torch.equal(local, full[expert, first : first + len(local)])
                seen[expert][first : first + len(local)] = local
            if not hf:
                continue
            back = convert.from_hf(hf)[W1]
            assert back.shape == full.shape and back.placements == weights.placements
            assert torch.equal(back.to_local(), weights.to_local())
    assert torch.equal(torch.stack([*seen.values()]), full)


def test_loading_fills_the_shards_in_place():
    full = torch.randn(8, 24, 32)
    with rank_of((2, 2), ("efsdp", "ep"), 3) as mesh:
        target = distribute(torch.zeros(8, 24, 32), mesh, [Shard(1), Shard(0)])
        for name, value in adapter(tiny_args("moe")).to_hf({W1: target}).items():
            source = distribute_tensor(
                full[int(name.split(".")[5])], value.device_mesh, value.placements, src_data_rank=None
            )
            value.to_local().copy_(source.to_local())
        assert torch.equal(target.to_local(), full[4:, 12:])


def test_unknown_and_missing_tensors_are_named():
    convert = adapter(tiny_args("moe"))
    with pytest.raises(ValueError, match=r"no Hugging Face name for \['layers\.0\.moe\.shared\.w1'\]"):
        convert.to_hf({"layers.0.moe.shared.w1": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"unknown Hugging Face tensors \['model\.layers\.0\.mlp\.shared\.weight'\]"):
        convert.from_hf({"model.layers.0.mlp.shared.weight": torch.zeros(1)})
    experts = {GATE.format(e): torch.zeros(24, 32) for e in range(9) if e != 5}
    with pytest.raises(ValueError, match=r"w1_EFD: experts \[5\] are missing, \[8\] are left over"):
        convert.from_hf(experts)
    with pytest.raises(ValueError, match=r"expert_bias_E is up to 0\.5"):
        convert.to_hf({"layers.0.moe.expert_bias_E": torch.tensor([0.0, -0.5])})


def manager(model, args, folder, **config):
    """torchtitan's own checkpoint manager for a model alone."""
    from torchtitan.components.checkpointer import CheckpointManager

    return CheckpointManager(
        CheckpointManager.Config(enable=True, folder="checkpoint", keep_latest_k=0, **config),
        dataloader=None,
        model_parts=[model],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=adapter(args),
        base_folder=str(folder),
    )


@pytest.mark.parametrize("kind", ["moe", "moe_bias", "dense_tied"])
def test_torchtitan_loads_what_export_and_import_write(saved, tmp_path, kind):
    model, args, checkpoint = saved(kind)
    hf = export(ExportOptions(checkpoint=checkpoint, output=tmp_path / "hf", dtype="keep", shard_gb=100e-6))
    step_0 = import_checkpoint(ImportOptions(source=hf, checkpoint=tmp_path / "run" / "checkpoint" / "step-0"))
    ways = {
        "hf": ("a", {"initial_load_in_hf": True, "initial_load_path": str(hf)}),
        "initial": ("b", {"initial_load_path": str(step_0)}),
        "step-0": ("run", {}),
    }
    for way, (folder, config) in ways.items():
        fresh = build(args)
        assert manager(fresh, args, tmp_path / folder, **config).load(), way
        for name, value in model.state_dict().items():
            assert torch.equal(fresh.state_dict()[name], value), (way, name)


def test_torchtitan_saves_what_transformers_loads(tmp_path):
    args = tiny_args("moe")
    model = random_model(args)
    saver = manager(model, args, tmp_path, last_save_in_hf=True, last_save_model_only=True)
    assert saver.save(7, last_step=True)
    folder = tmp_path / "checkpoint" / "step-7"
    write_description(folder, args, TOKENIZER, torch.float32)
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        assert_same_logits(model(tokens()), theirs.eval()(tokens()).logits)


def test_files_of_a_saved_checkpoint_follow_the_index_of_the_assets(saved, tmp_path):
    _, args, checkpoint = saved("dense_tied")
    hf = export(ExportOptions(checkpoint=checkpoint, output=tmp_path / "hf", shard_gb=150e-6))
    mapping = MulaStateDictAdapter(model_spec(args).model, str(hf)).fqn_to_index_mapping
    assert mapping.keys() == adapter(args).to_hf(random_model(args).state_dict()).keys()
    assert mapping["model.embed_tokens.weight"] == 1 and max(mapping.values()) == 2
    assert MulaStateDictAdapter(model_spec(args).model, str(TOKENIZER)).fqn_to_index_mapping is None
