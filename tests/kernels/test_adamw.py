"""The AdamW kernel against torch's fused kernel and float64, on a GPU or under Triton's interpreter.

Without a GPU, test_interpreter.py runs this file in a process of its own with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch
from where import DEVICE, HALF, needs_kernels

pytestmark = needs_kernels
OPTIONS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LR = 3e-3
GUARD = 64


def guarded(values: torch.Tensor) -> torch.Tensor:
    """The values in the middle of a buffer of NaN, aligned to 16 bytes as allocations are."""
    buffer = torch.full((values.numel() + 2 * GUARD,), float("nan"), dtype=values.dtype, device=DEVICE)
    inside = buffer[GUARD:-GUARD]
    return inside.copy_(values)


def assert_guards_untouched(x: torch.Tensor) -> None:
    whole = torch.as_strided(x, (x.numel() + 2 * GUARD,), (1,), 0)
    assert whole[:GUARD].isnan().all() and whole[-GUARD:].isnan().all()


def update(*tensors: torch.Tensor, step: int, **options) -> None:
    from inductor_kernels.adamw import adamw, update_rates

    options = {**OPTIONS, **options}
    steps = torch.full((2,), float(step), device=DEVICE)
    rates = update_rates(steps, LR, options["betas"], options.pop("weight_decay"))
    adamw(*tensors, rates[1], **options)


def in_float64(param, grad, exp_avg, exp_avg_sq, step, factor, betas, eps, weight_decay):
    """AdamW as the paper has it (arXiv 1711.05101, algorithm 2), with coefficients that were rounded to float32."""
    betas = [torch.tensor(beta).double() for beta in betas]
    param, grad, exp_avg, exp_avg_sq = (x.double() for x in (param, grad, exp_avg, exp_avg_sq))
    grad = grad * factor
    exp_avg = betas[0] * exp_avg + (1 - betas[0]) * grad
    exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1]) * grad**2
    mean, square = exp_avg / (1 - betas[0] ** step), exp_avg_sq / (1 - betas[1] ** step)
    return param - LR * weight_decay * param - LR * mean / (square.sqrt() + eps), exp_avg, exp_avg_sq


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("numel", "step", "options"),
    [
        (1, 1, {}),
        (2049, 7, {"betas": (0.0, 0.999)}),
        (8192, 100_000, {"weight_decay": 0.0, "eps": 1e-3}),
        (20_003, 3, {}),
    ],
)
def test_update_against_float64(numel, step, options, dtype):
    start = [torch.randn(numel), torch.randn(numel), torch.randn(numel), torch.rand(numel)]
    tensors = [guarded(x.to(dtype)) for x in start]
    copy = guarded(torch.zeros(numel, dtype=HALF))
    factor = torch.rand((), device=DEVICE)
    want = in_float64(*(x.clone() for x in tensors), step, factor.double(), **{**OPTIONS, **options})
    update(*tensors, step=step, factor=factor, copy_N=copy, **options)
    param, grad, exp_avg, exp_avg_sq = tensors
    precision = 4 * torch.finfo(dtype).eps
    for got, expected in zip((param, exp_avg, exp_avg_sq), want, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=precision, atol=precision)
    torch.testing.assert_close(copy.double(), want[0], rtol=torch.finfo(HALF).eps, atol=torch.finfo(HALF).eps)
    assert torch.equal(grad, start[1].to(dtype).to(DEVICE))
    for x in (*tensors, copy):
        assert_guards_untouched(x)


@pytest.mark.skipif(DEVICE == "cpu", reason="torch's kernel for GPUs is what must be met to the bit")
@pytest.mark.parametrize("numel", [5, 4_000_037])
def test_update_is_torchs_to_the_bit(numel):
    param = torch.randn(numel, device=DEVICE)
    peer = param.clone().requires_grad_()
    optimizer = torch.optim.AdamW([peer], lr=LR, fused=True, **OPTIONS)
    exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
    for step in range(1, 6):
        grad = torch.randn(numel, device=DEVICE)
        factor = torch.rand((), device=DEVICE)
        peer.grad = grad * factor
        optimizer.step()
        update(param, grad, exp_avg, exp_avg_sq, step=step, factor=factor)
        assert torch.equal(exp_avg, optimizer.state[peer]["exp_avg"])
        assert torch.equal(exp_avg_sq, optimizer.state[peer]["exp_avg_sq"])
        assert torch.equal(param, peer)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_square_sum(dtype):
    from inductor_kernels.adamw import square_sum

    tensors = [guarded(torch.randn(n).to(dtype)) for n in (1, 0, 70_001, 2048)]
    got = square_sum(tensors)
    want = sum(x.double().square().sum() for x in tensors)
    assert got.dtype == torch.float32 and float(got) == pytest.approx(float(want), rel=1e-6)
    assert torch.equal(got, square_sum(tensors))
    tensors[2][70_000] = float("inf")
    assert square_sum(tensors).isinf()
    assert square_sum([x[:0] for x in tensors]) == 0


def test_rates_whatever_the_default_dtype():
    from inductor_kernels.adamw import update_rates

    steps = torch.arange(1.0, 5.0, device=DEVICE)
    rates = update_rates(steps, LR, OPTIONS["betas"], OPTIONS["weight_decay"])
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(update_rates(steps, LR, OPTIONS["betas"], OPTIONS["weight_decay"]), rates)
    finally:
        torch.set_default_dtype(default)
