"""The update is torch.optim.AdamW's to the last bit; what goes wrong says so."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.distributed.utils import clip_grad_norm_

from mula_titan.components.optimizer_sharding.slices import FlatSlice
from tests.distributed.ranks import run_on_ranks
from tests.optimizer.synthetic import Synthetic, backward, model, reference, run, sharded

CASES = {
    "float32": Synthetic(),
    "float32_fused": Synthetic(fused=True),
    "bfloat16_fused": Synthetic(fused=True, param_dtype=torch.bfloat16),
    "bfloat16": Synthetic(param_dtype=torch.bfloat16),
    "bfloat16_gradients": Synthetic(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16),
    # On a CPU the host's copies lie beside the device's: all but pinned memory and streams.
    "float32_offloaded": Synthetic(offload=True),
    "bfloat16_offloaded": Synthetic(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16, offload=True),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    return run_on_ranks(3, run, list(CASES.items()), tmp_path_factory.mktemp("ranks"))


def _assert_equal(got: dict[str, torch.Tensor] | str, want: dict[str, torch.Tensor]) -> None:
    assert not isinstance(got, str), got
    assert got.keys() == want.keys() and len(got) == 7
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("name", CASES)
def test_update_is_adamw_to_the_bit_on_one_process(name: str, alone: None) -> None:
    _assert_equal(run(CASES[name]), reference(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_update_is_adamw_to_the_bit_on_three_ranks(name: str, on_ranks: dict[str, list]) -> None:
    for result in on_ranks[name]:
        _assert_equal(result, reference(CASES[name]))


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_clipping_is_the_loops_own(max_norm: float, alone: None) -> None:
    net, plain = model(), model()
    optimizer = sharded(net)
    backward(net, 0, 0, mine=True)
    backward(plain, 0, 0, mine=True)
    optimizer.finish_backward()
    norm = clip_grad_norm_(net.parameters(), max_norm, foreach=True)
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, foreach=True)
    assert float(norm) == pytest.approx(float(want), rel=1e-6)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    assert torch.equal(optimizer.grad_norm.factor(), coefficient)
    assert (float(coefficient) < 1) == (max_norm == 0.5)


def test_clipping_can_begin_later(alone: None) -> None:
    results = []
    for clip_after_step in (0, 1, 2):
        net = model()
        optimizer = sharded(net, clip_after_step=clip_after_step)
        moments = []
        for step in range(2):
            optimizer.zero_grad()
            backward(net, step, 0, mine=True)
            optimizer.finish_backward()
            norm = clip_grad_norm_(net.parameters(), 1e-3)
            assert float(norm) > 1
            optimizer.step()
            moments.append(optimizer.state[net["up"].weight]["exp_avg"].values.clone())
        results.append(moments)
    (clipped, _), (later, then), (never, at_last) = results
    assert float(later.norm()) > 100 * float(clipped.norm())
    assert torch.equal(later, never)
    assert torch.allclose(then, 0.9 * later, atol=1e-3) and not torch.allclose(at_last, 0.9 * later, atol=1e-2)


def test_chunked_backwards_are_added_up_before_the_sum_begins(alone: None) -> None:
    """A loss in chunks gives the head several gradients in one backward pass."""
    net, plain = model(), model()
    optimizer = sharded(net)
    for step in range(3):
        optimizer.zero_grad()
        for m in (net, plain):
            for chunk in range(3):
                (m["down"].weight * (chunk + step)).sum().backward()
            (m["norm"].weight * 2).sum().backward()
        assert optimizer._next_to_reduce <= len(optimizer.buckets)
        optimizer.finish_backward()
        (own,) = [g for g in optimizer._gradients if g.name == "down.weight"]
        assert torch.equal(own.view.view_as(plain["down"].weight), plain["down"].weight.grad)
        (missing,) = [g for g in optimizer._gradients if g.name == "up.weight"]
        assert not missing.view.any()
        plain.zero_grad()


def test_late_gradient_is_refused(alone: None) -> None:
    net = model()
    optimizer = sharded(net)
    for step in range(2):
        optimizer.zero_grad()
        backward(net, step, 0, mine=True)
        optimizer.finish_backward()
    optimizer.zero_grad()
    backward(net, 2, 0, mine=True)
    with pytest.raises(RuntimeError, match=r"received more gradients in this step than in earlier ones"):
        backward(net, 2, 1, mine=True)


def test_step_without_finished_gradients_is_refused(alone: None) -> None:
    net = model()
    optimizer = sharded(net)
    backward(net, 0, 0, mine=True)
    with pytest.raises(RuntimeError, match=r"without finish_backward\(\)"):
        optimizer.step()


def test_modules_keep_tied_and_frozen_parameters(alone: None) -> None:
    net, plain = model(), model()
    names = list(dict(net.named_parameters()))
    sharded(net, param_dtype=torch.bfloat16)
    assert [n for n, _ in net.named_parameters() if not n.startswith("grad_norm")] == names
    assert net["head"].weight is net["embed"].weight
    assert not net["frozen"].weight.requires_grad
    for (name, got), want in zip(net.named_parameters(), plain.parameters(), strict=False):
        assert torch.equal(got, want.to(torch.bfloat16)), name


def test_state_of_the_model_is_the_master_weights(alone: None) -> None:
    net, other = model(), model()
    sharded(net, param_dtype=torch.bfloat16)
    state = net.state_dict()
    assert set(state) == set(other.state_dict())
    for name, value in other.state_dict().items():
        if "frozen" in name:
            continue
        assert isinstance(state[name], FlatSlice)
        assert torch.equal(state[name].values, value.flatten()), name
    # Whole tensors, as another project's file may hold, reach masters and parameters.
    changed = {name: value + 0.125 for name, value in other.state_dict().items()}
    net.load_state_dict(changed)
    for name, value in net.state_dict().items():
        if "frozen" not in name:
            assert torch.equal(value.values, changed[name].flatten()), name
    for name, p in net.named_parameters():
        if "frozen" not in name and "grad_norm" not in name:
            assert torch.equal(p, changed[name].to(torch.bfloat16)), name


def test_steps_must_agree(alone: None) -> None:
    net = model()
    optimizer = sharded(net)
    state = optimizer.state_dict()
    state["state"][0]["step"] = torch.tensor(3.0)
    with pytest.raises(ValueError, match=r"have made \[0.0, 3.0\] steps"):
        optimizer.load_state_dict(state)


def test_module_that_is_no_list_waits_for_its_parameters(alone: None) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.layers = nn.ModuleDict({"0": nn.Linear(3, 3)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers["0"](x * self.scale)

    net = Net()
    optimizer = sharded(net)
    waited = []
    for bucket in optimizer.buckets:
        bucket.wait_gathered = lambda b=bucket: waited.append(b)
    net(torch.ones(3))
    assert set(waited) == set(optimizer.buckets)
