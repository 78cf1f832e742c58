"""The optimizers with the update kernel, on CPUs: this file runs itself in a process with Triton's interpreter."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchtitan.distributed.utils import clip_grad_norm_

from inductor_kernels import use_path
from mula_titan.components.kernel_adamw import KernelAdamW, make_adamw
from tests.distributed.ranks import run_on_ranks
from tests.interpreted import run_interpreted
from tests.optimizer.synthetic import COMMON, Synthetic, groups, model, reference, run

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="test_under_the_interpreter runs it in a new process")
MAX_NORM = 0.5
STEPS = 3
CASES = [
    ("float32", Synthetic(fused=True)),
    ("half", Synthetic(fused=True, param_dtype=torch.float16)),  # the interpreter cuts bf16 off instead of rounding
]


@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_under_the_interpreter() -> None:
    assert "8 passed" in run_interpreted(Path(__file__))


def _sharded(case: Synthetic) -> dict[str, torch.Tensor]:
    with use_path("triton"):
        return run(case)


def _parameters() -> nn.ParameterList:
    """DTensors on two meshes of three ranks, as dense and expert weights have them: split unevenly, and whole."""
    torch.manual_seed(1)
    whole = [torch.randn(7, 33), torch.randn(2, 64), torch.randn(50), torch.randn(3, 16)]
    dense, experts = (init_device_mesh("cpu", (3,), mesh_dim_names=(name,)) for name in ("fsdp", "ep"))
    places = [(dense, Shard(0)), (dense, Shard(1)), (dense, Replicate()), (experts, Shard(0))]
    return nn.ParameterList(distribute_tensor(x, mesh, [p]) for x, (mesh, p) in zip(whole, places, strict=True))


def _clipped_steps(kernels: bool) -> dict[str, Any]:
    """Norms and whole parameters after steps of KernelAdamW, or of torch's AdamW and clipping."""
    params = _parameters()
    options = {"params": list(params), "lr": 1e-2, "weight_decay": 0.1, "fused": True, **COMMON}
    with use_path("triton" if kernels else "reference"):
        optimizer = make_adamw([options])
    assert isinstance(optimizer, KernelAdamW) == kernels
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for i, p in enumerate(params):
            torch.manual_seed(100 * step + i)
            p.grad = distribute_tensor(torch.randn(p.shape), p.device_mesh, p.placements)
        clipped = optimizer.norms() if isinstance(optimizer, KernelAdamW) else list(params)
        norms.append(clip_grad_norm_(clipped, MAX_NORM, foreach=True, ep_enabled=True))
        if step == 1:  # a parameter without gradient stays as it is
            params[2].grad = None
        optimizer.step()
    found = {f"p{i}": p.full_tensor().detach() for i, p in enumerate(params) if isinstance(p, DTensor)}
    moments = {f"m{i}": optimizer.state[p]["exp_avg_sq"].full_tensor() for i, p in enumerate(params)}
    return {**found, **moments, "norms": torch.stack(norms), "steps": optimizer.state[params[2]]["step"]}


def _clipped_both_ways(_: None) -> tuple[dict[str, Any], dict[str, Any]]:
    return _clipped_steps(kernels=True), _clipped_steps(kernels=False)


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    folder = tmp_path_factory.mktemp("ranks")
    return {
        **run_on_ranks(3, _sharded, CASES, folder / "sharded"),
        **run_on_ranks(3, _clipped_both_ways, [("clipped", None)], folder / "clipped"),
    }


@needs_interpreter
@pytest.mark.parametrize(("name", "case"), CASES)
def test_sharded_update_with_kernels(name: str, case: Synthetic, on_ranks: dict[str, list]) -> None:
    want = reference(case)
    start = {n: p.detach() for n, p in model(32, 64).named_parameters()}
    for got in on_ranks[name]:
        assert not isinstance(got, str), got
        for key, value in want.items():
            assert not torch.equal(value.float(), start[key])
            precision = 2 * torch.finfo(case.param_dtype).eps
            torch.testing.assert_close(got[key], value, rtol=precision, atol=precision)


@needs_interpreter
def test_kernel_adamw_is_adamw_and_clipping_on_dtensors(on_ranks: dict[str, list]) -> None:
    for result in on_ranks["clipped"]:
        assert not isinstance(result, str), result
        got, want = result
        assert got.keys() == want.keys() and (want["norms"] > MAX_NORM).all() and float(got["steps"]) == STEPS - 1
        for key in want:
            torch.testing.assert_close(got[key], want[key], rtol=2e-6, atol=2e-7)


@needs_interpreter
def test_loops_that_clip_gradients_themselves() -> None:
    nets = [model(32, 64) for _ in range(2)]
    with use_path("triton"):
        mine = make_adamw(groups(nets[0], fused=True))
    plain = torch.optim.AdamW(groups(nets[1], fused=True))
    assert isinstance(mine, KernelAdamW)
    for step in range(STEPS):
        for net, optimizer in zip(nets, (mine, plain), strict=True):
            for i, p in enumerate(net.parameters()):
                torch.manual_seed(step * 10 + i)
                p.grad = torch.randn(p.shape) if p.requires_grad else None
            torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
            optimizer.step()
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-7)


@needs_interpreter
def test_states_travel_between_both() -> None:
    net = model(32, 64)
    with use_path("triton"):
        mine = make_adamw(groups(net, fused=True))
    for p in net.parameters():
        p.grad = torch.randn(p.shape) if p.requires_grad else None
    mine.step()
    plain = torch.optim.AdamW(groups(net, fused=True))
    plain.load_state_dict(mine.state_dict())
    with use_path("triton"):
        again = make_adamw(groups(net, fused=True))
    again.load_state_dict(plain.state_dict())
    for p in (p for p in net.parameters() if p.requires_grad):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(again.state[p][key], mine.state[p][key]), key


@needs_interpreter
@pytest.mark.parametrize("change", [{"amsgrad": True}, {"maximize": True}, {"fused": False}])
def test_what_the_kernel_lacks_is_torchs(change: dict[str, bool]) -> None:
    with use_path("triton"):
        optimizer = make_adamw([{**group, **change} for group in groups(model(), fused=True)])
    assert type(optimizer) is torch.optim.AdamW
