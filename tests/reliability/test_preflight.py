"""Preflight finds a device that computes wrongly, memory and links that change bits, and slow ones."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from mula_titan.exit_codes import PREFLIGHT
from mula_titan.preflight import PreflightOptions, RankReport, check, good_hosts, main, show, slow
from tests.distributed.ranks import run_on_ranks

SMALL = PreflightOptions(matmul_size=64, memory_mib=1, message_mib=1, repeats=1, tolerance=0.0)


def checked(fault: str) -> list[list[str]]:
    """Problems by rank, with a fault on rank 1."""
    matmul, reduce, exchange = torch.Tensor.__matmul__, dist.all_reduce, dist.all_to_all_single

    def wrong_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = matmul(a, b)
        c[3, 4] += 1
        return c

    def wrong_sum(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reduce(x, *args, **kwargs)
        x[7] += 1

    def wrong_exchange(out: torch.Tensor, x: torch.Tensor) -> None:
        exchange(out, x)
        out[-1] += 1  # the part of the last rank

    faults = {
        "matmul": mock.patch("torch.Tensor.__matmul__", wrong_matmul),
        "all-reduce": mock.patch("torch.distributed.all_reduce", wrong_sum),
        "all-to-all": mock.patch("torch.distributed.all_to_all_single", wrong_exchange),
        "memory": mock.patch("torch.Tensor.fill_", lambda x, v: x.zero_()),
    }
    if fault in faults and dist.get_rank() == 1:
        with faults[fault]:
            reports = check(SMALL, torch.device("cpu"))
    else:
        reports = check(SMALL, torch.device("cpu"))
    return [report.problems for report in reports]


def test_faults_are_found_on_the_right_rank(tmp_path: Path) -> None:
    kinds = ("none", "matmul", "all-reduce", "all-to-all", "memory")
    results = run_on_ranks(2, checked, [(kind, kind) for kind in kinds], tmp_path)
    count = 2**20 // 4
    assert results["none"] == [[[], []]] * 2
    assert (
        results["matmul"]
        == [
            [
                [],
                [f"1 of 4096 entries of a torch.{dtype} matrix product are wrong" for dtype in ("float32", "bfloat16")],
            ]
        ]
        * 2
    )
    assert results["all-reduce"] == [[[], [f"all-reduce: 1 of {count} sums are wrong"]]] * 2
    assert results["all-to-all"] == [[[], ["all-to-all: what rank 1 sent arrived changed"]]] * 2
    assert [len(problems) for problems in results["memory"][0]] == [0, 3]
    assert "memory don't keep -0x1" in results["memory"][0][1][0]


def test_slow_ones_are_measured_against_the_median() -> None:
    speeds = [(100, 5), (100, 5), (69, 5), (71, 5), (100, 3.4), (110, 5)]
    reports = [
        RankReport(rank, f"host{rank // 2}", "x", [], tflops=tflops, memory_gbps=10, link_gbps=link)
        for rank, (tflops, link) in enumerate(speeds)
    ]
    slow(reports, 0.7)
    assert [r.problems for r in reports] == [
        [], [], ["matrix product at 69 TFLOP/s, median 100"], [], ["link at 3.4 GB/s, median 5"], [],
    ]  # fmt: skip
    assert good_hosts(reports) == ["host0"]
    with Console(width=160).capture() as text:
        show(reports, console := Console(width=160, record=True))
    assert "median 100" in console.export_text()
    assert text.get() == ""


def test_one_rank_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MULA_TITAN_HOST", "node7")
    words = ["--matmul-size", "64", "--memory-mib", "1", "--good-hosts", str(tmp_path / "good.txt")]
    main(words)
    assert (tmp_path / "good.txt").read_text() == "node7\n"
    assert "1 of 1 ranks pass; good hosts: node7" in capsys.readouterr().out
    with (
        mock.patch("torch.Tensor.fill_", lambda x, v: x.zero_()),
        pytest.raises(SystemExit) as caught,
    ):
        main(words)
    assert caught.value.code == PREFLIGHT
    assert (tmp_path / "good.txt").read_text() == ""


def test_sizes_must_be_exact() -> None:
    with pytest.raises(ValueError, match="--matmul-size 100: must be a power of two"):
        PreflightOptions(matmul_size=100)
