"""The Triton kernels against the float64 per-token oracle, on a GPU or under Triton's interpreter.

Without a GPU, test_interpreter.py runs this file in a process of its own with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch
from oracle import Problem, assert_matches_oracle, output_and_gradients, random_problem, token_loop
from where import DEVICE, HALF, needs_kernels

from inductor_kernels import moe_experts, reference, sorted_experts, use_path
from inductor_kernels.configs import LayerConfig, layer_config
from inductor_kernels.plan import empty_plan

pytestmark = needs_kernels
# fp32: summation order only. 16 bit: inputs, intermediates and outputs each rounded to 8 (bf16) or 11 (fp16) bits.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def kernels():
    torch.manual_seed(torch.seed() % 2**31)
    with use_path("triton"):
        yield


def experts(problem):
    return moe_experts(*problem)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("T", "K", "E", "D", "F"),
    [
        (40, 2, 5, 24, 40),  # nothing a multiple of a tile
        (33, 1, 3, 48, 32),  # K = 1 scatters straight to tokens
        (19, 3, 4, 20, 12),  # rows too narrow for 16-byte descriptors: pointer path
        (26, 2, 3, 24, 18),  # of F alone
        (26, 2, 3, 18, 24),  # of D alone
        (5, 4, 8, 16, 16),  # fewer tokens than experts
    ],
)
def test_output_and_gradients(T, K, E, D, F, dtype):
    ids_TK = torch.randint(-2, E + 2, (T, K))  # some picks aren't local
    assert_matches_oracle(
        experts, random_problem(T, K, E, D, F, ids=ids_TK, device=DEVICE, dtype=dtype), TOLERANCE[dtype]
    )


@pytest.mark.parametrize(
    "ids_T", [[2] * 37, [-1] * 9, [0, 3] * 10, [0] * 15 + [3] * 16 + [1] * 17], ids=["one", "none", "empty", "ragged"]
)
def test_unbalanced_routing(ids_T):
    ids_TK = torch.tensor(ids_T)[:, None]
    problem = random_problem(len(ids_T), 1, 4, 16, 24, ids=ids_TK, device=DEVICE)
    assert_matches_oracle(experts, problem, TOLERANCE[torch.float32])
    values = output_and_gradients(experts, problem, torch.ones_like(problem.x_TD))
    for e in set(range(4)) - set(ids_T):
        assert all(values[name][e].abs().max() == 0 for name in ("dw1", "dw3", "dw2")), "empty expert has a gradient"


def test_zero_tokens():
    problem = random_problem(0, 2, 3, 16, 16, device=DEVICE)
    values = output_and_gradients(experts, problem, torch.zeros_like(problem.x_TD))
    assert values["out"].shape == (0, 16)
    assert all(values[name].abs().max() == 0 for name in ("dw1", "dw3", "dw2"))


def test_poisoned_memory(monkeypatch):
    """Every allocation starts as NaN: nothing unwritten may reach a result."""

    def poisoned(allocate):
        def run(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)

        return run

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    for T, K in ((21, 2), (21, 1)):
        ids_TK = torch.randint(-1, 4, (T, K))
        ids_TK[ids_TK == 2] = 0
        problem = random_problem(T, K, 4, 16, 24, ids=ids_TK, device=DEVICE)
        assert_matches_oracle(experts, problem, TOLERANCE[torch.float32])


def test_plan_equals_reference():
    from inductor_kernels import index

    several_programs, several_steps = (100, 3, 300, -1), (400, 3, 300, -1)
    for T, K, E, max_rows in ((50, 3, 7, -1), (9, 1, 1, -1), (30, 2, 5, 11), several_programs, several_steps):
        ids_TK = torch.randint(-1, E + 1, (T, K), device=DEVICE)
        plan, truth = (empty_plan(ids_TK, E, 16, max_rows) for _ in range(2))
        index.build_plan(ids_TK, plan)
        reference.build_plan(ids_TK, truth)
        used = int(truth.segment_E1[-1])
        assert torch.equal(plan.slot_of_pick_TK, truth.slot_of_pick_TK)
        assert torch.equal(plan.segment_E1, truth.segment_E1)
        assert torch.equal(plan.expert_of_tile_M, truth.expert_of_tile_M)
        assert torch.equal(plan.segments_by_size_E3, truth.segments_by_size_E3)
        assert torch.equal(plan.pick_of_slot_R[:used], truth.pick_of_slot_R[:used])


@pytest.mark.parametrize("K", [1, 2])
def test_max_rows(K):
    """A sufficient bound changes nothing; too small a one gives NaN in the tokens left out, never a wrong number."""
    T = 60 if DEVICE == "cpu" else 400
    problem = random_problem(T, K, 2, 16, 16, ids=torch.zeros(T, K, dtype=torch.long), device=DEVICE)
    full = experts(problem)
    assert torch.equal(moe_experts(*problem, max_rows=T * K), full)
    short = moe_experts(*problem, max_rows=4)
    left_out = short.isnan().any(dim=1)
    assert left_out.any() and torch.equal(short[~left_out], full[~left_out])


@pytest.mark.parametrize("K", [1, 2])
def test_no_rows_at_all(K):
    """With one expert and no room, no tile and no program of a GEMM is left: tokens must still be filled."""
    problem = random_problem(20, K, 1, 16, 16, ids=torch.arange(20 * K).view(20, K) // 2 % 2, device=DEVICE)
    out = moe_experts(*problem, max_rows=0)
    local = (problem.ids_TK == 0).any(dim=1)
    assert out[local].isnan().all() and (out[~local] == 0).all()
    dx, dweights, dw1 = torch.autograd.grad(out, (problem.x_TD, problem.weights_TK, problem.w1_EFD), out.detach())
    assert dx[local].isnan().all() and (dx[~local] == 0).all() and (dweights == 0).all() and (dw1 == 0).all()


@pytest.fixture
def gathered_copies(monkeypatch):
    """The configs of this device, but with the inputs of all GEMMs gathered beforehand."""

    def config(*args):
        families = vars(layer_config(*args)).items()
        return LayerConfig(**{name: family._replace(gather=False) for name, family in families})

    from inductor_kernels import layer, ops

    for module in (layer, ops):
        monkeypatch.setattr(module, "layer_config", config)


@pytest.mark.parametrize("K", [1, 2])
def test_gathered_copies(gathered_copies, monkeypatch, K):
    from inductor_kernels import layer

    monkeypatch.setattr(layer, "_MAX_COPY_BYTES", 2048)  # several column parts
    problem = random_problem(26, K, 3, 72, 24, ids=torch.randint(-1, 3, (26, K)), device=DEVICE)
    assert_matches_oracle(experts, problem, TOLERANCE[torch.float32])
    test_no_rows_at_all(K)


def test_one_byte_ids():
    """uint8 has no -1, the value of a pick that isn't there, and no 300, a number of experts."""
    ids_TK = torch.randint(0, 256, (30, 2), dtype=torch.uint8)
    ids_TK[0] = 255
    assert_matches_oracle(
        experts, random_problem(30, 2, 300, 16, 16, ids=ids_TK, device=DEVICE), TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize("step", ["down_backward", "gate_up_backward"])
def test_kernels_that_fail_in_backward(step, monkeypatch):
    """Before anything is overwritten the reference computes the gradients; after that the step is refused."""
    from inductor_kernels import grouped_gemm, ops

    def broken(*args):
        raise NotImplementedError("planted")

    monkeypatch.setattr(ops, "_forced_path", None)
    monkeypatch.setattr(ops, "_path_of_device", {DEVICE: "triton"})
    monkeypatch.setattr(grouped_gemm, step, broken)
    problem = random_problem(18, 2, 3, 16, 24, device=DEVICE)
    if step == "gate_up_backward":
        with pytest.raises(NotImplementedError, match="planted") as raised:
            experts(problem).sum().backward()
        assert "This step is lost" in raised.value.__notes__[0]
    assert_matches_oracle(experts, problem, TOLERANCE[torch.float32])
    assert ops._path_of_device == {DEVICE: "reference"}


def test_non_contiguous_inputs():
    x, ids, weights, w1, w3, w2 = random_problem(18, 2, 3, 16, 24, device=DEVICE)

    def transposed(problem):
        strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in problem]
        assert not strided[3].is_contiguous()
        return moe_experts(*strided)

    problem = Problem(x, ids, weights, w1, w3, w2)
    assert_matches_oracle(transposed, problem, TOLERANCE[torch.float32])


def test_weights_in_either_order_of_address():
    """dx reads both weights as one operand with the distance of their addresses as stride."""
    problem = random_problem(18, 2, 3, 16, 24, device=DEVICE)
    both = torch.stack([problem.w3_EFD, problem.w1_EFD]).detach()
    for first, second in ((0, 1), (1, 0)):
        swapped = problem._replace(w1_EFD=both[first].requires_grad_(), w3_EFD=both[second].requires_grad_())
        assert_matches_oracle(experts, swapped, TOLERANCE[torch.float32])


def test_weights_exactly_2_31_elements_apart():
    """The distance -2^31 is an int32, 2^31 isn't. On a CPU the gap of 4 GiB between the weights is never touched."""
    problem = random_problem(18, 2, 3, 16, 24, device=DEVICE, dtype=HALF)
    size = problem.w1_EFD.numel()
    memory = torch.empty(2**31 + size, dtype=HALF, device=DEVICE)
    w3_EFD, w1_EFD = (memory[start : start + size].view_as(problem.w1_EFD) for start in (0, 2**31))
    w1_EFD.copy_(problem.w1_EFD.detach())
    w3_EFD.copy_(problem.w3_EFD.detach())
    apart = problem._replace(w1_EFD=w1_EFD.requires_grad_(), w3_EFD=w3_EFD.requires_grad_())
    assert_matches_oracle(experts, apart, TOLERANCE[HALF])


def test_repeated_runs_are_bitwise_equal():
    problem = random_problem(60, 3, 4, 24, 40, device=DEVICE, dtype=HALF)
    dout_TD = torch.randn_like(problem.x_TD)
    first = output_and_gradients(experts, problem, dout_TD)
    second = output_and_gradients(experts, problem, dout_TD)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_sums_are_fp32():
    """All-positive inputs over a long contraction: 16-bit accumulation would lose most of the sum."""
    T, D, F = (512, 32, 16) if DEVICE == "cpu" else (8192, 256, 128)
    x, ids, weights, w1, w3, w2 = random_problem(T, 1, 1, D, F, device=DEVICE, dtype=HALF)
    problem = Problem(*(t.detach().abs().requires_grad_(t.requires_grad) for t in (x, ids, weights, w1, w3, w2)))
    dout_TD = torch.rand(T, D, device=DEVICE, dtype=HALF)
    values = output_and_gradients(experts, problem, dout_TD)
    with use_path("reference"):
        truth = output_and_gradients(experts, problem.like(torch.float64), dout_TD.double())
    for name in truth:
        error = float((values[name].double() - truth[name]).norm() / truth[name].norm())
        assert error <= TOLERANCE[HALF], (name, error)


def test_sorted_rows_with_a_tail():
    """Rows past the last count give zero rows and zero gradients, whatever they hold."""
    counts_E = torch.tensor([5, 0, 17, 3], device=DEVICE)
    x, _, _, w1, w3, w2 = random_problem(32, 1, 4, 16, 24, device=DEVICE)
    with torch.no_grad():
        x[25:] = 1e30
    ids_T1 = torch.repeat_interleave(
        torch.tensor([0, 1, 2, 3, -1], device=DEVICE), torch.tensor([5, 0, 17, 3, 7], device=DEVICE)
    )[:, None]
    truth_problem = random_problem(32, 1, 4, 16, 24, device=DEVICE)._replace(
        x_TD=x,
        ids_TK=ids_T1,
        weights_TK=torch.ones(32, 1, device=DEVICE, requires_grad=True),
        w1_EFD=w1,
        w3_EFD=w3,
        w2_EDF=w2,
    )
    dout_RD = torch.randn(32, 16, device=DEVICE)
    truth = output_and_gradients(token_loop, truth_problem, dout_RD)
    out_RD = sorted_experts(x, counts_E, w1, w3, w2)
    grads = torch.autograd.grad(out_RD, (x, w1, w3, w2), dout_RD)
    assert out_RD[25:].abs().max() == 0 and grads[0][25:].abs().max() == 0
    for value, name in zip((out_RD, *grads), ("out", "dx", "dw1", "dw3", "dw2"), strict=True):
        torch.testing.assert_close(value, truth[name], rtol=1e-4, atol=1e-5)


def test_second_backward_is_refused():
    problem = random_problem(8, 2, 2, 16, 16, device=DEVICE)
    out = experts(problem)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.skipif(DEVICE != "cuda", reason="needs CUDA memory of 20 GiB: more than 2^31 elements in a buffer")
def test_more_than_2_31_elements(monkeypatch):
    """Row buffers and weights beyond 2^31 elements: the last expert is right and no guard of a buffer was touched."""
    guard, buffers = 4096, []

    def guarded(shape, dtype, device):
        size = torch.Size(shape).numel()
        buffer = torch.full((size + 2 * guard,), 7, dtype=dtype, device=device)
        buffers.append(buffer)
        return buffer[guard : guard + size].view(shape)

    D, F, E, T = 8192, 8192, 40, 150_000
    weights = [torch.zeros(E, a, b, device=DEVICE, dtype=HALF) for a, b in ((F, D), (F, D), (D, F))]
    assert weights[0].numel() > 2**31 and T * 2 * F > 2**31
    for w in weights:
        w[-1].normal_(std=D**-0.5)
        w.requires_grad_()
    x = torch.randn(T, D, device=DEVICE, dtype=HALF, requires_grad=True)
    ids = torch.full((T, 1), E - 1, device=DEVICE)
    scores = torch.rand(T, 1, device=DEVICE, requires_grad=True)
    dout = torch.randn_like(x)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda t: guarded(t.shape, t.dtype, t.device))
        patch.setattr(
            torch.Tensor, "new_empty", lambda t, *shape, dtype=None: guarded(shape, dtype or t.dtype, t.device)
        )
        out = moe_experts(x, ids, scores, *weights)
        grads = torch.autograd.grad(out, (x, scores, *weights), dout)
    assert len(buffers) >= 8
    for buffer in buffers:
        assert (buffer[:guard] == 7).all() and (buffer[-guard:] == 7).all(), "a kernel wrote outside its buffer"
    last = slice(T - 64, T)
    x64, w64 = x[last].double().detach().requires_grad_(), [w[-1].double() for w in weights]
    h = torch.nn.functional.silu(x64 @ w64[0].T) * (x64 @ w64[1].T)
    truth = (h @ w64[2].T) * scores[last].double()
    (dx,) = torch.autograd.grad(truth, x64, dout[last].double())
    assert (out[last].double() - truth).norm() / truth.norm() < TOLERANCE[HALF]
    assert (grads[0][last].double() - dx).norm() / dx.norm() < TOLERANCE[HALF]
    with torch.no_grad():
        h_all = torch.nn.functional.silu(x @ weights[0][-1].T) * (x @ weights[1][-1].T)
        dw2 = (dout * scores).T[:32].float() @ h_all.float()
    assert (grads[4][-1][:32].float() - dw2).norm() / dw2.norm() < TOLERANCE[HALF]
    assert all(g[e].abs().max() == 0 for g in grads[2:] for e in (0, E - 2))


def test_config_tiles_fit_together():
    for dtype in (torch.float32, HALF):
        config = layer_config(torch.device(DEVICE), dtype, 64, 32)
        row_gemms = (config.gate_up, config.down, config.down_backward, config.gate_up_backward)
        assert {c.block_m for c in row_gemms} == {config.row_tile}
        for c in (config.gate_up_weight_grad, config.down_weight_grad):
            assert config.row_tile // 2 % c.block_k == 0, "a contraction block would reach into undefined rows"


def test_programs_with_several_tiles(monkeypatch):
    """Persistent programs: full and half tiles, tiles dealt there and back, experts without picks, several turns."""
    from inductor_kernels import grouped_gemm

    monkeypatch.setattr(grouped_gemm, "num_programs", lambda device: 4)  # divides no number of tiles
    row_tile = layer_config(torch.device(DEVICE), HALF, 48, 72).row_tile
    half = row_tile // 2
    counts = [half + 1, 0, 2 * row_tile, half, 1, 0, row_tile + half]
    ids_TK = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[:, None]
    ids_TK = ids_TK[torch.randperm(ids_TK.shape[0])]
    for dtype in (torch.float32, HALF):
        problem = random_problem(len(ids_TK), 1, len(counts), 48, 72, ids=ids_TK, device=DEVICE, dtype=dtype)
        assert_matches_oracle(experts, problem, TOLERANCE[dtype])
