"""Per-token oracle of the routed experts, written without any of the product's code, and problem generators.

Shape suffixes: T tokens, K picks per token, D model width, F expert width, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

GRADIENTS = ("dx", "dweights", "dw1", "dw3", "dw2")


class Problem(NamedTuple):
    x_TD: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    w1_EFD: torch.Tensor
    w3_EFD: torch.Tensor
    w2_EDF: torch.Tensor

    def leaves(self) -> tuple[torch.Tensor, ...]:
        """The differentiable inputs, in the order of `GRADIENTS`."""
        return (self.x_TD, self.weights_TK, self.w1_EFD, self.w3_EFD, self.w2_EDF)

    def like(self, dtype: torch.dtype) -> Problem:
        """Detached copy in another dtype, with fresh leaves."""
        return Problem(*(t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t for t in self))


def random_problem(
    T: int, K: int, E: int, D: int, F: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32, ids=None
) -> Problem:
    """Fresh random inputs with outputs of order one; `ids` overrides uniformly drawn experts."""
    ids_TK = torch.randint(0, E, (T, K), device=device) if ids is None else ids.to(device)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * scale).to(dtype).requires_grad_()

    return Problem(
        normal(T, D),
        ids_TK,
        torch.rand(T, K, device=device).requires_grad_(),
        normal(E, F, D, scale=D**-0.5),
        normal(E, F, D, scale=D**-0.5),
        normal(E, D, F, scale=F**-0.5),
    )


def token_loop(problem: Problem) -> torch.Tensor:
    """One token and one pick at a time, in the dtype of the inputs; ids outside [0, E) contribute nothing."""
    x_TD, ids_TK, weights_TK, w1_EFD, w3_EFD, w2_EDF = problem
    out = []
    for x_D, ids_K, weights_K in zip(x_TD, ids_TK.tolist(), weights_TK, strict=True):
        out_D = x_D * 0  # keeps a token without local picks in the graph
        for e, weight in zip(ids_K, weights_K, strict=True):
            if 0 <= e < w1_EFD.shape[0]:
                h_F = F.silu(w1_EFD[e] @ x_D) * (w3_EFD[e] @ x_D)
                out_D = out_D + weight * (w2_EDF[e] @ h_F)
        out.append(out_D)
    return torch.stack(out) if out else x_TD * 1.0


def output_and_gradients(function, problem: Problem, dout_TD: torch.Tensor) -> dict[str, torch.Tensor]:
    """`out` and the gradients of <out, dout> for all differentiable inputs, by name."""
    out_TD = function(problem)
    grads = torch.autograd.grad(out_TD, problem.leaves(), dout_TD.to(out_TD.dtype), allow_unused=True)
    grads = (torch.zeros_like(t) if g is None else g for t, g in zip(problem.leaves(), grads, strict=True))
    return {"out": out_TD.detach(), **dict(zip(GRADIENTS, grads, strict=True))}


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """||value - truth|| / ||truth|| in float64; exact zero truth demands exact zero. NaN compares as infinity."""
    error = (value.double() - truth.double()).norm()
    scale = truth.double().norm()
    ratio = error / scale if scale > 0 else (error > 0).double() * float("inf")
    return float("inf") if torch.isnan(ratio) and not (scale == 0 and error == 0) else float(torch.nan_to_num(ratio))


def assert_matches_oracle(function, problem: Problem, tolerance: float) -> None:
    """Compare `function` with the float64 oracle for the output and every gradient."""
    dout_TD = torch.randn(problem.x_TD.shape, device=problem.x_TD.device)
    truth = output_and_gradients(token_loop, problem.like(torch.float64), dout_TD.double())
    values = output_and_gradients(function, problem, dout_TD.to(problem.x_TD.dtype))
    errors = {name: relative_error(values[name], truth[name]) for name in truth}
    assert all(error <= tolerance for error in errors.values()), errors
