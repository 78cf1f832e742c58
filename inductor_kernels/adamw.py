"""One AdamW update of one flat tensor in one pass over memory, and the squared norm of gradients.

The update is torch's fused AdamW (arXiv 1711.05101), step for step. Beside it, for no further pass: the gradient's
clipping factor, and a copy of the new parameter in another dtype (bf16 parameters of fp32 master weights).

Shape suffixes: N elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .launch import cdiv, constants, launch


@triton.jit
def _adamw_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    copy_ptr,
    rates_ptr,
    factor_ptr,
    N,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    CLIP: tl.constexpr,
    COPY: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """EXACT: IEEE roots and quotients, which a 16-bit result can do without."""
    decay = tl.load(rates_ptr)
    step_size = tl.load(rates_ptr + 1)
    correction2_root = tl.load(rates_ptr + 2)
    if CLIP:
        factor = tl.load(factor_ptr).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    for i in range(STEPS):
        index = first + i * BLOCK + tl.arange(0, BLOCK)
        inside = index < N
        grad = tl.load(grad_ptr + index, mask=inside, other=0.0).to(tl.float32)
        param = tl.load(param_ptr + index, mask=inside, other=0.0).to(tl.float32)
        exp_avg = tl.load(exp_avg_ptr + index, mask=inside, other=0.0).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + index, mask=inside, other=0.0).to(tl.float32)
        if CLIP:
            grad = grad * factor
        square = grad * grad
        # Rounded where torch rounds: these are its fused multiply-adds.
        param = tl.fma(-decay, param, param)
        exp_avg = tl.fma(exp_avg, BETA1, tl.fma(grad, -BETA1, grad))
        exp_avg_sq = tl.fma(exp_avg_sq, BETA2, tl.fma(square, -BETA2, square))
        if EXACT:
            root = tl.div_rn(tl.sqrt_rn(exp_avg_sq), correction2_root)
            param -= tl.div_rn(step_size * exp_avg, root + EPS)
        else:
            param -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) / correction2_root + EPS)
        tl.store(param_ptr + index, param.to(param_ptr.dtype.element_ty), mask=inside)
        tl.store(exp_avg_ptr + index, exp_avg.to(exp_avg_ptr.dtype.element_ty), mask=inside)
        tl.store(exp_avg_sq_ptr + index, exp_avg_sq.to(exp_avg_sq_ptr.dtype.element_ty), mask=inside)
        if COPY:
            tl.store(copy_ptr + index, param.to(copy_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _square_sum_kernel(x_ptr, partial_ptr, first_partial, N, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    squares = tl.zeros((BLOCK,), tl.float32)
    for i in range(STEPS):
        index = first + i * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + index, mask=index < N, other=0.0).to(tl.float32)
        squares += x * x
    tl.store(partial_ptr + first_partial + tl.program_id(0), tl.sum(squares, axis=0))


_BLOCK = 2048
_UPDATE_STEPS = 4
_NORM_STEPS = 16


def update_rates(steps_S: torch.Tensor, lr: float, betas: tuple[float, float], weight_decay: float) -> torch.Tensor:
    """What `adamw` needs to know of step numbers and hyper-parameters; nothing is read by the host.

    Args:
        steps_S: float32 on the device, updates so far with the coming one, for each of S parameters.

    Returns:
        (S, 4) float32: lr * weight_decay, lr / (1 - beta1^step), sqrt(1 - beta2^step), and 0 for alignment.
    """
    # torch's kernel has fp32 ones
    lr, beta1, beta2, weight_decay = torch.tensor([lr, *betas, weight_decay], dtype=torch.float32).tolist()
    rates_S4 = torch.zeros(steps_S.shape[0], 4, dtype=torch.float32, device=steps_S.device)
    rates_S4[:, 0] = float(torch.tensor(lr, dtype=torch.float32) * weight_decay)
    # A tensor as base: torch then takes the same float32 power as in its AdamW.
    rates_S4[:, 1] = torch.full_like(steps_S, lr) / (1 - torch.full_like(steps_S, beta1) ** steps_S)
    rates_S4[:, 2] = (1 - torch.full_like(steps_S, beta2) ** steps_S).sqrt()
    return rates_S4


def adamw(
    param_N: torch.Tensor,
    grad_N: torch.Tensor,
    exp_avg_N: torch.Tensor,
    exp_avg_sq_N: torch.Tensor,
    rates_4: torch.Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    factor: torch.Tensor | None = None,
    copy_N: torch.Tensor | None = None,
) -> None:
    """Update a parameter and its moments in place.

    On fp32 parameters equal to torch 2.14's fused CUDA kernel to the last bit; on 16-bit ones all but roots and
    quotients, which may differ in the last of fp32's bits before the result is rounded.

    Args:
        param_N: parameter (or fp32 master weight), contiguous, of any shape.
        grad_N: gradient, as many elements, any float dtype.
        exp_avg_N: first moment; `exp_avg_sq_N`: second moment.
        rates_4: the parameter's row of `update_rates`.
        betas: decay of the moments.
        factor: float32 scalar on the device that the gradient is multiplied with first, or None.
        copy_N: also gets the new parameter, cast to its dtype, or None.
    """
    numel = param_N.numel()
    if numel == 0:
        return
    launch(
        _adamw_kernel,
        (cdiv(numel, _BLOCK * _UPDATE_STEPS),),
        constants(
            BETA1=betas[0],
            BETA2=betas[1],
            EPS=eps,
            CLIP=factor is not None,
            COPY=copy_N is not None,
            EXACT=param_N.dtype == torch.float32,
            BLOCK=_BLOCK,
            STEPS=_UPDATE_STEPS,
            num_warps=8,
        ),
        param_N,
        grad_N,
        exp_avg_N,
        exp_avg_sq_N,
        param_N if copy_N is None else copy_N,
        rates_4,
        rates_4 if factor is None else factor,
        numel,
    )


def square_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of the squares of all elements of contiguous tensors on one device: float32 scalar, the same in every run."""
    sizes = [cdiv(x.numel(), _BLOCK * _NORM_STEPS) for x in tensors]
    partials = torch.empty(sum(sizes), dtype=torch.float32, device=tensors[0].device)
    first = 0
    for x, size in zip(tensors, sizes, strict=True):
        if size:
            launch(
                _square_sum_kernel,
                (size,),
                constants(BLOCK=_BLOCK, STEPS=_NORM_STEPS, num_warps=8),
                x,
                partials,
                first,
                x.numel(),
            )
        first += size
    return partials.sum()
