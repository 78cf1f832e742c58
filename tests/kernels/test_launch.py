"""Launches remember compiled kernels, and never use one that was compiled for other arguments."""

from __future__ import annotations

import pytest
import torch

launch = pytest.importorskip("inductor_kernels.launch", reason="this build of torch brings no triton")


class Recorder:
    """Stands for triton's kernel and for what it compiles: `kernel[grid](...)` of either is recorded."""

    arg_names = ("x_ptr", "n", "A", "B")

    def __init__(self, calls: list, name: str) -> None:
        self.calls, self.name = calls, name

    def __getitem__(self, grid):
        def run(*args, **options):
            self.calls.append((self.name, grid, args, options))
            return Recorder(self.calls, "compiled")

        return run


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(launch, "JITFunction", Recorder)
    monkeypatch.setattr(launch, "_compiled", {})
    return []


def test_second_launch_goes_past_triton(calls):
    kernel, x = Recorder(calls, "kernel"), torch.empty(8)
    for grid in ((3,), (4, 5)):
        launch.launch(kernel, grid, x, 7, B=2, A=1, num_warps=4)
    first, second = calls
    assert first == ("kernel", (3,), (x, 7), {"A": 1, "B": 2, "num_warps": 4, "num_stages": 3})
    assert second == ("compiled", (4, 5, 1), (x, 7, 1, 2), {})  # constants in the kernel's order


@pytest.mark.parametrize(
    "changed",
    [
        {"x": torch.empty(8, dtype=torch.bfloat16)},
        {"x": torch.empty(9)[1:]},  # not aligned to 16 bytes
        {"n": 1},
        {"n": 16},
        {"n": 2**31},
        {"A": 3},
        {"num_warps": 8},
    ],
    ids=str,
)
def test_other_traits_are_compiled_anew(changed, calls):
    kernel = Recorder(calls, "kernel")
    usual = {"x": torch.empty(8), "n": 7, "A": 1, "B": 2, "num_warps": 4}
    for given in (usual, usual | changed, usual):
        given = dict(given)
        launch.launch(kernel, (1,), given.pop("x"), given.pop("n"), **given)
    assert [name for name, *_ in calls] == ["kernel", "kernel", "compiled"]


def test_other_numbers_of_the_same_traits_are_not(calls):
    kernel = Recorder(calls, "kernel")
    for n in (7, 9, 2**31 - 1):
        launch.launch(kernel, (1,), torch.empty(8), n, A=1, B=2, num_warps=4)
    assert [name for name, *_ in calls] == ["kernel", "compiled", "compiled"]
