"""The rules that the XPU cases of test_parity run under do refuse what they should."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single, reduce_scatter_single

from tests.distributed.ranks import run_on_ranks
from tests.distributed.xpu_rules import XpuRules

GROUP = dist.group


def _avg(rules: XpuRules) -> None:
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.AVG)


def _functional_avg(rules: XpuRules) -> None:
    reduce_scatter_single(torch.ones(2), "avg", 0, GROUP.WORLD)


def _premul_sum(rules: XpuRules) -> None:
    dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(0.5))


def _uneven(rules: XpuRules) -> None:
    splits = [1, 2] if dist.get_rank() == 0 else [2, 1]
    all_to_all_single(torch.ones(3), [1, 2] if dist.get_rank() == 0 else [2, 1], splits, GROUP.WORLD)


def _empty(rules: XpuRules) -> None:
    all_to_all_single(torch.ones(0), [0, 0], [0, 0], GROUP.WORLD)


def _sums(rules: XpuRules) -> None:
    dist.all_reduce(torch.ones(2))
    all_to_all_single(torch.ones(2), [1, 1], [1, 1], GROUP.WORLD).sum()
    assert sum(rules.seen.values()) >= 2


CASES = {
    "avg": (_avg, "reduces with AVG"),
    "functional_avg": (_functional_avg, "reduces with AVG"),
    "premul_sum": (_premul_sum, "reduces with PREMUL_SUM"),
    "uneven": (_uneven, "uneven splits"),
    "empty": (_empty, "empty messages"),
    "sums": (_sums, None),
}


def _under_rules(name: str) -> str | None:
    try:
        with XpuRules() as rules:
            CASES[name][0](rules)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str | None]]:
    folder: Path = tmp_path_factory.mktemp("rules")
    return run_on_ranks(2, _under_rules, [(name, name) for name in CASES], folder)


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str, messages: dict[str, list[str | None]]) -> None:
    want = CASES[name][1]
    for got in messages[name]:
        assert got is None if want is None else got is not None and want in got
