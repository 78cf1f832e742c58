"""The ops on CPU: the plain-torch path, autograd, torch.compile, activation checkpointing, fallback and refusals."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from oracle import assert_matches_oracle, output_and_gradients, random_problem
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import inductor_kernels
from inductor_kernels import kernel_path, moe_experts, ops, plan, sorted_experts, use_path


def experts(problem):
    return moe_experts(*problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("T", "K", "E", "D", "F"), [(40, 2, 5, 24, 40), (33, 1, 3, 36, 20), (3, 8, 16, 8, 8)])
def test_output_and_gradients(T, K, E, D, F, dtype):
    ids_TK = torch.randint(-2, E + 2, (T, K))
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-6, torch.bfloat16: 1e-2}[dtype]  # routing weights stay fp32
    assert_matches_oracle(experts, random_problem(T, K, E, D, F, ids=ids_TK, dtype=dtype), tolerance)


def test_empty_expert_has_zero_gradient():
    problem = random_problem(12, 1, 3, 16, 16, ids=torch.tensor([[0], [2]] * 6))
    values = output_and_gradients(experts, problem, torch.ones(12, 16))
    assert all(values[name][1].abs().max() == 0 and values[name][0].abs().max() > 0 for name in ("dw1", "dw3", "dw2"))


def test_no_grad_saves_nothing():
    problem = random_problem(12, 2, 3, 16, 16)
    saved = torch.ops.inductor_kernels.moe_experts(*problem, -1, False, 0)[1]
    assert saved.numel() == 0
    with torch.no_grad():
        assert torch.equal(experts(problem), experts(problem.like(torch.float32)).detach())


def test_op_registration():
    # One expert and a full last tile: no output element is left undefined, so that outputs can be compared.
    problem = random_problem(16, 1, 1, 16, 16)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.inductor_kernels.moe_experts.default, (*problem, -1, True, 0), test_utils=utilities)
    out, *saved = torch.ops.inductor_kernels.moe_experts(*(t.detach() for t in problem), -1, True, 0)
    inputs = (torch.randn_like(out), *(t.detach() for t in problem.leaves()))
    torch.library.opcheck(
        torch.ops.inductor_kernels.moe_experts_backward.default, (*inputs, *saved), test_utils=utilities
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic):
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for T in (20, 24, 31):
        problem = random_problem(T, 2, 4, 16, 24)
        dout_TD = torch.randn(T, 16)
        eager, traced = (output_and_gradients(f, problem, dout_TD) for f in (experts, compiled))
        assert all(torch.equal(eager[name], traced[name]) for name in eager)


def test_compiled_code_of_another_version_is_left(monkeypatch):
    """An upgrade that changes the plan's size meets the code that the version before compiled."""
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", True)
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", True)
    problem = random_problem(20, 2, 4, 16, 24)
    dout_TD = torch.randn(20, 16)
    head_size = plan._head_size
    found = []
    with fresh_cache():
        for version, extra in ((1, 0), (1, 0), (2, 16)):
            monkeypatch.setattr(ops, "_VERSION", version)
            monkeypatch.setattr(plan, "_head_size", lambda E, extra=extra: head_size(E) + extra)
            torch._dynamo.reset()
            counters.clear()
            compiled = torch.compile(experts, fullgraph=True)
            eager, traced = (output_and_gradients(f, problem, dout_TD) for f in (experts, compiled))
            assert all(torch.equal(eager[name], traced[name]) for name in eager)
            found.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert found == [0, 1, 0]


@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing(compiled):
    def checkpointed(problem):
        return checkpoint(moe_experts, *problem, use_reentrant=False)

    function = torch.compile(checkpointed, fullgraph=True, backend="aot_eager") if compiled else checkpointed
    problem = random_problem(20, 2, 4, 16, 24)
    dout_TD = torch.randn(20, 16)
    plain, recomputed = (output_and_gradients(f, problem, dout_TD) for f in (experts, function))
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_second_backward_is_refused():
    out = experts(random_problem(8, 2, 2, 16, 16))
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_backward_behind_hooks_is_refused():
    """Hooks that hand out the saved tensor itself keep torch's own check of versions from seeing it."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        out = experts(random_problem(8, 2, 2, 16, 16))
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward through moe_experts"):
        out.sum().backward()


def test_other_derivatives_are_refused():
    problem = random_problem(8, 2, 2, 16, 16)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(experts(problem).sum(), problem.x_TD, create_graph=True)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        experts(problem._replace(x_TD=forward_ad.make_dual(problem.x_TD, torch.ones_like(problem.x_TD))))


def test_autocast_changes_nothing():
    problem, dout_TD = random_problem(20, 2, 3, 16, 24), torch.randn(20, 16)
    plain = output_and_gradients(experts, problem, dout_TD)
    with torch.autocast("cpu", torch.bfloat16):
        cast = output_and_gradients(experts, problem, dout_TD)
    assert all(torch.equal(plain[name], cast[name]) for name in plain)


def test_sorted_rows_equal_slices():
    counts = [5, 0, 9]
    x, _, _, w1, w3, w2 = random_problem(16, 1, 3, 16, 24)
    out = sorted_experts(x, torch.tensor(counts), w1, w3, w2)
    silu = torch.nn.functional.silu
    start = 0
    for e, count in enumerate(counts):
        rows = x[start : start + count]
        truth = (silu(rows @ w1[e].T) * (rows @ w3[e].T)) @ w2[e].T
        torch.testing.assert_close(out[start : start + count], truth, rtol=1e-5, atol=1e-6)
        start += count
    assert out[start:].abs().max() == 0


def test_counts_in_16_bit_floats():
    """Each count is exact in bf16, their sum 257 isn't."""
    counts_E = torch.tensor([256, 1, 2])
    x, _, _, w1, w3, w2 = random_problem(260, 1, 3, 16, 24)
    assert torch.equal(
        sorted_experts(x, counts_E.bfloat16(), w1, w3, w2),
        sorted_experts(x, counts_E, w1, w3, w2),
    )


def test_path_without_triton_is_logged_once(monkeypatch, caplog):
    """A device that should have kernels but has no triton takes the reference and says so in one line."""
    monkeypatch.setattr(ops, "_path_of_device", {})

    def missing():
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(ops, "_kernels", missing)
    with caplog.at_level(logging.INFO, logger="inductor_kernels"):
        assert [kernel_path(torch.device("xpu")) for _ in range(3)] == ["reference"] * 3
    assert len(caplog.records) == 1
    assert "xpu: reference path (Triton cannot be imported: No module named 'triton')" in caplog.text


def test_failing_kernel_falls_back_and_is_logged_once(monkeypatch, caplog):
    class Broken:
        def __getattr__(self, name):
            raise NotImplementedError("grouped kernels")

    monkeypatch.setattr(ops, "_path_of_device", {"cpu": "triton"})
    monkeypatch.setattr(ops, "_kernels", Broken)
    with caplog.at_level(logging.INFO, logger="inductor_kernels"):
        for _ in range(2):
            assert_matches_oracle(experts, random_problem(12, 2, 3, 16, 16), 2e-6)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "reference path from now on, the kernels raised NotImplementedError('grouped kernels')" in caplog.text


def test_forced_path_does_not_fall_back(monkeypatch):
    def missing():
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(ops, "_kernels", missing)
    with use_path("triton"), pytest.raises(ImportError):
        experts(random_problem(4, 1, 2, 16, 16))


def test_import_needs_torch_alone():
    code = "import sys; sys.modules['triton'] = None; import inductor_kernels as k; print(sorted(k.__all__))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(sorted(inductor_kernels.__all__))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w3_EFD": torch.zeros(3, 25, 16)}, r"expert weights must be w1 \(E, F, D\).*\(3, 25, 16\)"),
        ({"x_TD": torch.zeros(6, 17)}, r"x must be \(T, 16\).*\(6, 17\)"),
        ({"weights_TK": torch.zeros(6, 3)}, r"both be \(T, K\) with T = 6.*\(6, 3\)"),
        ({"x_TD": torch.zeros(6, 16, dtype=torch.bfloat16)}, r"one dtype.*bfloat16.*cast x first"),
        ({"ids_TK": torch.zeros(6, 2)}, r"ids must be signed integers or uint8.*torch.float32"),
        ({"ids_TK": torch.zeros(6, 2, dtype=torch.bool)}, r"ids must be signed integers or uint8.*torch.bool"),
        (
            {"ids_TK": torch.zeros(6, 2, dtype=torch.complex64)},
            r"ids must be signed integers or uint8.*torch.complex64",
        ),
        ({"weights_TK": torch.ones(6, 2, device="meta")}, r"on one device, got \['cpu', 'meta'\]"),
        ({"w1_EFD": torch.zeros(24, 16)}, r"expert weights must be w1 \(E, F, D\).*\(24, 16\)"),
        ({"w1_EFD": torch.zeros(0, 24, 16)}, r"E > 0.*\(0, 24, 16\)"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        experts(random_problem(6, 2, 3, 16, 24)._replace(**change))


def test_float64_is_refused_where_kernels_run():
    with use_path("triton"), pytest.raises(ValueError, match="float32, not"):
        experts(random_problem(6, 2, 3, 16, 24, dtype=torch.float64))
