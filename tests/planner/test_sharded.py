"""Bytes by formula equal the bytes of the real model with its real transforms in a fake group of all ranks."""

import pytest

from mula_titan.planner.count import counted
from mula_titan.planner.layout import Layout
from mula_titan.planner.parameters import Inventory
from mula_titan.planner.sharded import sharded
from tests.planner.cases import make_config

# ranks, pp, dp_replicate, ep, tp, schedule
LAYOUTS = [
    (1, 1, 1, 1, 1, "1F1B"),
    (8, 1, 1, 1, 1, "1F1B"),
    (12, 1, 1, 4, 1, "1F1B"),
    (16, 1, 2, 4, 1, "1F1B"),
    (16, 2, 1, 2, 1, "Interleaved1F1B"),
    (16, 1, 2, 1, 2, "1F1B"),
    (16, 2, 1, 4, 2, "1F1B"),
]


def config_of(ranks: int, pp: int, replicate: int, ep: int, tp: int, schedule: str, sharding: str, **more):
    return make_config(
        model__n_layers=6,
        parallelism__pipeline_parallel_degree=pp,
        parallelism__data_parallel_replicate_degree=replicate,
        parallelism__expert_parallel_degree=ep,
        parallelism__tensor_parallel_degree=tp,
        parallelism__pipeline_parallel_schedule=schedule,
        optimizer__sharding=sharding,
        optimizer__bucket_mib=0.5,
        training__local_batch_size=8,
        training__mixed_precision_param="bfloat16",
        **more,
    )


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
@pytest.mark.parametrize("sharding", ["epso", "so", "fsdp"])
def test_formula_equals_count(case, sharding) -> None:
    ranks, pp, _, ep, tp, _ = case
    if sharding == "so" and ep > 1 and tp > 1:
        return  # refused
    config = config_of(*case, sharding)
    layout = Layout.from_config(config, ranks, "cpu")
    inventory = Inventory(config, ep=ep > 1, tp=tp > 1)
    for pp_rank in range(pp):
        if sharding == "fsdp" and case[0] == 12:
            with pytest.raises(ValueError, match="cuts the experts' width 128 over 3 ranks"):
                sharded(inventory, layout, pp_rank)
            with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
                counted(config, layout, pp_rank)
            continue
        held, messages = sharded(inventory, layout, pp_rank)
        real, sent = counted(config, layout, pp_rank)
        assert held == real
        if sharding != "fsdp":
            mine: dict[str, tuple[float, float]] = {}
            for m in messages:
                if m.axis != "stage" or m.kind != "all_reduce":  # the norm is no bucket's
                    size, count = mine.get(m.kind, (0.0, 0.0))
                    mine[m.kind] = (size + m.bytes, count + m.count)
            theirs: dict[str, tuple[float, float]] = {}
            for (kind, _), (size, count) in sent.items():
                before = theirs.get(kind, (0.0, 0.0))
                theirs[kind] = (before[0] + size, before[1] + count)
            assert mine == theirs


def test_bf16_on_one_rank_without_fsdp() -> None:
    config = config_of(1, 1, 1, 1, 1, "1F1B", "fsdp", training__dtype="bfloat16")
    layout = Layout.from_config(config, 1, "cpu")
    held, messages = sharded(Inventory(config, ep=False, tp=False), layout, 0)
    assert held == counted(config, layout, 0)[0]
    assert held.states == 2 * held.parameters and not messages


@pytest.mark.parametrize(
    ("sharding", "key", "kinds"),
    [
        ("epso", "optimizer__offload_states", ["states"]),
        ("fsdp", "training__enable_cpu_offload", ["parameters", "gradients", "states"]),
    ],
)
def test_what_is_offloaded_is_in_host_memory(sharding: str, key: str, kinds: list[str]) -> None:
    both = []
    for on in (False, True):
        config = config_of(8, 1, 1, 2, 1, "1F1B", sharding, **{key: on})
        both.append(sharded(Inventory(config, ep=True, tp=False), Layout.from_config(config, 8, "cuda"), 0)[0])
    usual, offloaded = both
    assert offloaded.host == sum(getattr(usual, kind) for kind in kinds) and usual.host == 0
    assert all(getattr(offloaded, kind) == 0 for kind in kinds)
    assert offloaded.total == pytest.approx(usual.total - offloaded.host)


def test_the_paper_s_largest_job_on_12288_ranks() -> None:
    config = make_config(
        "mula_220b_a10b",
        parallelism__pipeline_parallel_degree=8,
        parallelism__expert_parallel_degree=12,
        optimizer__sharding="epso",
        training__local_batch_size=8,
    )
    layout = Layout.from_config(config, 12288, "xpu")
    held, messages = sharded(Inventory(config, ep=True, tp=False), layout, 1)
    assert held == counted(config, layout, 1)[0]
    # docs/optimizer.md: 5.79 GB of parameters, 11.58 of gradients, 0.242 of states.
    assert held.parameters == pytest.approx(5.79e9, rel=1e-3) and held.gradients == 2 * held.parameters
    assert held.states == pytest.approx(0.242e9, rel=2e-3)
    assert sum(m.count for m in messages) == 63
