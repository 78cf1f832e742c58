"""Launches remember compiled kernels, and never use one that was compiled for other arguments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

launch = pytest.importorskip("inductor_kernels.launch", reason="this build of torch brings no triton")


class Recorder:
    """Stands for triton's kernel and for what it compiles: launches of either are recorded."""

    arg_names = ("x_ptr", "n", "A", "B")
    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: list, name: str) -> None:
        self.calls, self.name = calls, name

    def __getitem__(self, grid):
        def run(*args, **options):
            self.calls.append((self.name, grid, args, options))
            return Recorder(self.calls, "compiled")

        return run

    def run(self, *args):
        self.calls.append(("run", args))


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(launch, "JITFunction", Recorder)
    monkeypatch.setattr(launch, "_compiled", {})
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: "stream"))
    monkeypatch.setattr(launch, "driver", driver)
    return []


def test_second_launch_goes_past_triton(calls):
    kernel, x, how = Recorder(calls, "kernel"), torch.empty(8), launch.constants(B=2, A=1, num_warps=4)
    for grid in ((3,), (4, 5)):
        launch.launch(kernel, grid, how, x, 7)
    first, second = calls
    assert first == ("kernel", (3,), (x, 7), {"A": 1, "B": 2, "num_warps": 4, "num_stages": 3})
    # Constants in the kernel's order.
    assert second == ("run", (4, 5, 1, "stream", "function", "metadata", None, None, None, x.data_ptr(), 7, 1, 2))


def test_profilers_see_every_launch(calls):
    """With a launch hook, as Proton sets it, launches go triton's own way, which calls the hook."""
    kernel, x, how = Recorder(calls, "kernel"), torch.empty(8), launch.constants(B=2, A=1, num_warps=4)
    for hooks in (launch.knobs.runtime.launch_enter_hook, launch.knobs.runtime.launch_exit_hook):
        launch.launch(kernel, (3,), how, x, 7)
        hooks.add(print)
        try:
            launch.launch(kernel, (4, 5), how, x, 7)
        finally:
            hooks.remove(print)
        assert calls[-1] == ("compiled", (4, 5, 1), (x, 7, 1, 2), {})


@pytest.mark.parametrize(
    "changed",
    [
        {"x": torch.empty(8, dtype=torch.bfloat16)},
        {"x": torch.empty(9)[1:]},  # not aligned to 16 bytes
        {"x": SimpleNamespace(dtype=torch.float32, data_ptr=lambda: 16, get_device=lambda: 1)},  # not the kernel's
        {"n": 1},
        {"n": 16},
        {"n": 2**31},
        {"A": 3},
        {"num_warps": 8},
        {"num_stages": 2},
    ],
    ids=str,
)
def test_other_traits_are_compiled_anew(changed, calls):
    kernel = Recorder(calls, "kernel")
    usual = {"x": torch.empty(8), "n": 7, "A": 1, "B": 2, "num_warps": 4}
    for given in (usual, usual | changed, usual):
        given = dict(given)
        x, n = given.pop("x"), given.pop("n")
        launch.launch(kernel, (1,), launch.constants(**given), x, n)
    assert [name for name, *_ in calls] == ["kernel", "kernel", "run"]


def test_other_numbers_of_the_same_traits_are_not(calls):
    kernel = Recorder(calls, "kernel")
    for n in (7, 9, 2**31 - 1):
        launch.launch(kernel, (1,), launch.constants(A=1, B=2, num_warps=4), torch.empty(8), n)
    assert [name for name, *_ in calls] == ["kernel", "run", "run"]
