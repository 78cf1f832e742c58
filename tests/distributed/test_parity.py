"""Every parallelism computes what one process computes: loss, gradients, norm, weights, counters.

The reference is plain torch (``training.reference``); the parallel side is the program's own trainer.
"""

from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_on_ranks
from tests.distributed.training import Layout, Result, reference, train, write_tokens

P = "parallelism."
SHARD, REPLICATE = P + "data_parallel_shard_degree", P + "data_parallel_replicate_degree"
TP, EP, PP = (P + f"{kind}_parallel_degree" for kind in ("tensor", "expert", "pipeline"))
SP, SCHEDULE, PP_MB = (
    P + "enable_sequence_parallel",
    P + "pipeline_parallel_schedule",
    P + "pipeline_parallel_microbatch_size",
)
BATCH = "training.local_batch_size"
AC = "activation_checkpoint.mode"

ALL_GATHER = {"expert_dispatch": "all_gather"}
GLOBAL = {"load_balance_scope": "global_batch"}
TOP_1 = {"top_k": 1}
AS_ONE = {"reference_micro_batch": 8}
PER_LAYER = {"load_balance_per_layer": True}
DENSE = {"num_experts": 0, "top_k": 0, "norm": "layer_no_affine", "qk_norm": False}


def pipeline(schedule: str, **more: Any) -> dict[str, Any]:
    """Flags of two pipeline ranks over micro-batches of 2; each data rank's share of the batch is one call."""
    return {PP: 2, SCHEDULE: schedule, PP_MB: 2} | more


CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one": {},
        "full_ac": {"flags": {AC: "full"}},
        "selective_ac": {"flags": {AC: "selective"}},
        "compile": {"flags": {"compile.enable": True}},
        "per_layer": {"model": PER_LAYER},
        "route_norm_gqa": {"model": {"route_norm": True, "n_kv_heads": 2}},
        "tied": {"model": {"tie_embeddings": True}},
        "local_batch": {"model": {"load_balance_scope": "local_batch"}},
        "causal": {"model": {"document_mask": False}},
    },
    2: {
        "fsdp": {},
        "fsdp_dense": {"flavor": "mula_debug_dense", "model": DENSE},
        "replicate": {"flags": {REPLICATE: 2}},
        "ep": {"flags": {EP: 2}},
        "ep_full_ac": {"flags": {EP: 2, AC: "full"}},
        "ep_selective_ac_compile": {"flags": {EP: 2, AC: "selective", "compile.enable": True}},
        "tp": {"flags": {TP: 2}},
        "tp_no_sp": {"flags": {TP: 2, SP: False}},
        "tp_dense": {"flags": {TP: 2}, "flavor": "mula_debug_dense", "model": DENSE},
        "tp_gqa": {"flags": {TP: 2}, "model": {"n_kv_heads": 2}},
        "tp_ep": {"flags": {TP: 2, EP: 2}},
        "gpipe": {"flags": pipeline("GPipe", **{BATCH: 8}), "model": PER_LAYER},
        "1f1b": {"flags": pipeline("1F1B", **{BATCH: 8}), "model": PER_LAYER},
        "1f1b_accumulate": {"flags": pipeline("1F1B", **{BATCH: 4}), "model": PER_LAYER},
        "interleaved": {"flags": pipeline("Interleaved1F1B", **{BATCH: 8}), "model": PER_LAYER},
        "zbv_dense": {"flags": pipeline("ZBVZeroBubble", **{BATCH: 8}), "flavor": "mula_debug_dense", "model": DENSE},
        "ep_all_gather": {"flags": {EP: 2}, "model": ALL_GATHER},
        "ep_all_gather_full_ac": {"flags": {EP: 2, AC: "full"}, "model": ALL_GATHER},
        "ep_all_gather_compile": {"flags": {EP: 2, "compile.enable": True}, "model": ALL_GATHER},
    },
    4: {
        "fsdp4": {},
        "hsdp": {"flags": {REPLICATE: 2}},
        "hsdp_ep": {"flags": {REPLICATE: 2, EP: 2}},
        "ep2": {"flags": {EP: 2}},
        # The reference sees the four ranks' micro-batches as one: the statistics of a step without accumulation.
        "global_batch": {"flags": {EP: 2}, "model": GLOBAL, **AS_ONE},
        "global_batch_tp": {"flags": {TP: 2, EP: 2, BATCH: 4}, "model": GLOBAL, **AS_ONE},
        "ep_is_world": {"flags": {EP: 4}},
        "ep_is_world_all_gather": {"flags": {EP: 4}, "model": ALL_GATHER},
        "ep4_tp2_all_gather": {"flags": {EP: 4, TP: 2}, "model": ALL_GATHER},
        "ep2_tp2": {"flags": {EP: 2, TP: 2}},
        "ep4_tp2": {"flags": {EP: 4, TP: 2}},
        "ep4_tp2_no_sp": {"flags": {EP: 4, TP: 2, SP: False}},
        "ep2_tp2_full_ac": {"flags": {EP: 2, TP: 2, AC: "full"}},
        "pp_ep": {"flags": pipeline("1F1B", **{BATCH: 4, EP: 2}), "model": PER_LAYER},
        "pp_tp": {"flags": pipeline("1F1B", **{BATCH: 8, TP: 2}), "model": PER_LAYER},
        "interleaved_ep_full_ac": {
            "flags": pipeline("Interleaved1F1B", **{BATCH: 4, EP: 2, AC: "full"}),
            "model": PER_LAYER,
        },
        # All tokens on one expert: the other ranks receive none, seven experts have zero gradients.
        "one_expert": {"flags": {EP: 4}, "model": TOP_1, "constant": True},
        "one_expert_all_gather": {"flags": {EP: 4}, "model": TOP_1 | ALL_GATHER, "constant": True},
        "one_expert_tp": {"flags": {EP: 4, TP: 2}, "model": TOP_1, "constant": True},
        "one_expert_pp": {
            "flags": pipeline("1F1B", **{BATCH: 4, EP: 2}),
            "model": TOP_1 | PER_LAYER,
            "constant": True,
        },
        # What an Intel GPU runs by default, under the rules of its collectives.
        "xpu_ep": {"flags": {EP: 4, AC: "full"}, "model": ALL_GATHER, "xpu_rules": True},
        "xpu_hsdp_ep": {"flags": {REPLICATE: 2, EP: 2}, "model": ALL_GATHER | GLOBAL, "xpu_rules": True, **AS_ONE},
        "xpu_pp_ep": {
            "flags": pipeline("1F1B", **{BATCH: 4, EP: 2}),
            "model": ALL_GATHER | PER_LAYER,
            "xpu_rules": True,
        },
        "xpu_tp_ep": {"flags": {TP: 2, EP: 4}, "model": ALL_GATHER, "xpu_rules": True},
    },
    8: {
        "hsdp_tp_ep": {"flags": {REPLICATE: 2, TP: 2, EP: 4, "training.local_batch_size": 2}},
        "pp_hsdp_ep": {
            "flags": pipeline("1F1B", **{PP_MB: 1, BATCH: 2, REPLICATE: 2, EP: 2, AC: "selective"}),
            "model": PER_LAYER,
            "reference_micro_batch": 1,
        },
        "interleaved_tp_ep": {
            "flags": pipeline("Interleaved1F1B", **{BATCH: 4, TP: 2, EP: 4}),
            "model": PER_LAYER | ALL_GATHER,
        },
    },
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def constant_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("constant"), constant=True)


@pytest.fixture(scope="module")
def layout(data: str, constant_data: str):
    def of_case(case: dict[str, Any]) -> Layout:
        fields = {key: value for key, value in case.items() if key != "constant"}
        return Layout(data=constant_data if case.get("constant") else data, **fields)

    return of_case


@pytest.fixture(scope="module")
def results(layout: Any, tmp_path_factory: pytest.TempPathFactory):
    @cache
    def of_world(world: int) -> dict[str, list[Result | str]]:
        """Results of all cases on so many ranks, started once; a world that dies fails each of its cases."""
        cases = [(name, layout(case)) for name, case in CASES[world].items()]
        return run_on_ranks(world, train, cases, tmp_path_factory.mktemp(f"world{world}"))

    return of_world


@pytest.fixture(scope="module")
def expected(layout: Any):
    known: dict[str, Result] = {}

    def of_case(case: dict[str, Any]) -> Result:
        model = {key: value for key, value in case.items() if key not in ("flags", "xpu_rules")}
        key = repr(model)
        if key not in known:
            known[key] = reference(layout(model))
        return known[key]

    return of_case


def _assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rtol: float, what: str) -> None:
    """Relative error of each tensor by norm, with the largest expected norm's rounding as the floor."""
    scale = max(float(w.norm()) for w in want.values())
    for name, g in got.items():
        w = want[name]
        assert g.shape == w.shape, f"{what} {name}: shape {tuple(g.shape)} != {tuple(w.shape)}"
        error = float((g - w).norm())
        assert error <= rtol * float(w.norm()) + 1e-7 * scale, (
            f"{what} {name}: error {error:.3g}, norm {float(w.norm()):.3g}"
        )


def _merged(ranks: list[Result], field: str) -> dict[str, torch.Tensor]:
    """Union over ranks; where several ranks hold a tensor, they must agree to the bit."""
    union: dict[str, torch.Tensor] = {}
    for rank, result in enumerate(ranks):
        for name, tensor in getattr(result, field).items():
            if name in union:
                assert torch.equal(union[name], tensor), f"rank {rank} holds another {field} {name}"
            union[name] = tensor
    return union


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in CASES.items() for name in cases])
def test_equals_one_process(world: int, name: str, results: Any, expected: Any) -> None:
    if torch.accelerator.is_available() and world > torch.accelerator.device_count():
        pytest.skip(f"needs {world} devices")
    ranks = results(world)[name]
    for rank, result in enumerate(ranks):
        assert not isinstance(result, str), f"rank {rank} of {name}:\n{result}"
    want = expected(CASES[world][name])

    initial = _merged(ranks, "initial")
    assert initial.keys() == want.initial.keys()
    assert all(torch.equal(initial[name], want.initial[name]) for name in initial)
    last = [r for r in ranks if r.losses[0] > 0]  # pipeline ranks without the last stage report -1
    for result in last:
        assert result.losses == pytest.approx(want.losses, rel=2e-6)
    for result in ranks:
        assert result.grad_norms == pytest.approx(want.grad_norms, rel=1e-5)
    counts = _merged(ranks, "counts")
    assert counts.keys() == want.counts.keys()
    assert all(torch.equal(counts[layer], want.counts[layer]) for layer in counts)
    biases = _merged(ranks, "biases")
    assert biases.keys() == want.biases.keys()
    assert all(torch.allclose(biases[n], want.biases[n], rtol=0, atol=1e-7) for n in biases)
    for result in ranks:
        assert len(result.reports) == len(want.reports)
        for got_step, want_step in zip(result.reports, want.reports, strict=True):
            assert [asdict(r) for r in got_step] == [pytest.approx(asdict(r), rel=1e-4) for r in want_step]
    gradients = _merged(ranks, "gradients")
    assert gradients.keys() == want.gradients.keys()
    _assert_close(gradients, want.gradients, 1e-5, "gradient of")
    weights = _merged(ranks, "weights")
    assert weights.keys() == want.weights.keys()
    # Where equal tokens make a gradient zero, Adam turns its rounding noise into whole steps.
    largest = max(float(g.norm()) for g in want.gradients.values())
    noise = {name for name, g in want.gradients.items() if float(g.norm()) < 1e-5 * largest}
    assert not noise or CASES[world][name].get("constant")
    _assert_close({n: w for n, w in weights.items() if n not in noise}, want.weights, 1e-4, "weight")
