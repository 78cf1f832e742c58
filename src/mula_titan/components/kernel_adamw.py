"""torch.optim.AdamW with the update kernel of ``inductor_kernels``: one pass over memory, clipping included."""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from inductor_kernels import kernel_path
from mula_titan.components.grad_norm import GradNorm
from mula_titan.components.guard import local_part


def make_adamw(param_groups: list[dict[str, Any]], **kwargs: Any) -> torch.optim.AdamW:
    """:class:`KernelAdamW` where ``fused`` is asked for and there are kernels, else ``torch.optim.AdamW``."""
    has_kernels = all(
        group.get("fused", kwargs.get("fused")) and kernel_path(p.device) == "triton" and local_part(p).is_contiguous()
        for group in param_groups
        for p in group["params"]
    )
    others = {"amsgrad", "maximize", "capturable", "differentiable"}
    plain = not any(options.get(name) for options in (kwargs, *param_groups) for name in others)
    return (KernelAdamW if has_kernels and plain else torch.optim.AdamW)(param_groups, **kwargs)


def _gradient(param: torch.Tensor) -> torch.Tensor:
    """This rank's values of the gradient, split as the parameter is."""
    grad = param.grad
    assert grad is not None
    if isinstance(grad, DTensor):
        assert isinstance(param, DTensor)
        grad = grad.redistribute(placements=param.placements)
    return local_part(grad).contiguous()


class KernelAdamW(torch.optim.AdamW):
    """PyTorch's fused AdamW with its states and checkpoints; gradients can be clipped by the update itself.

    A loop calls ``clip_grad_norm_`` on :meth:`norms` in place of the parameters, or clips parameters as usual.
    """

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self._norms: dict[Any, GradNorm] = {}
        self._factor: GradNorm | None = None

    @torch.no_grad()
    def norms(self) -> list[nn.Parameter]:
        """Parameters whose gradients have the norm of all gradients; :meth:`step` applies the factor that scales them.

        One for each mesh and kind of placement. Reads all gradients once; nothing waits.
        """
        from inductor_kernels.adamw import square_sum  # needs triton

        grads: dict[Any, list[torch.Tensor]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                key: tuple[Any, ...] = (None,)
                if isinstance(p, DTensor):
                    key = (p.device_mesh, *(isinstance(x, Replicate) for x in p.placements))
                grads.setdefault(key, []).append(_gradient(p))
        found = []
        for key, values in grads.items():
            if key not in self._norms:
                mesh, *replicated = key
                placements = [Replicate() if whole else Shard(0) for whole in replicated]
                self._norms[key] = GradNorm(mesh, placements, values[0].device)
            self._norms[key].set(square_sum(values).sqrt())
            found.append(self._norms[key])
        self._factor = found[0] if found else None
        return [norm.value for norm in found]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures
        """Update all parameters that have gradients."""
        from inductor_kernels.adamw import adamw, update_rates

        assert closure is None
        factor = None if self._factor is None else self._factor.factor()
        self._factor = None
        for group in self.param_groups:
            params: list[torch.Tensor] = []
            exp_avgs: list[torch.Tensor] = []
            exp_avg_sqs: list[torch.Tensor] = []
            steps: list[torch.Tensor] = []
            # torch's own, so that states are as its checkpoints have them.
            self._init_group(group, params, [], exp_avgs, exp_avg_sqs, [], steps)
            if not params:
                continue
            torch._foreach_add_(steps, 1)
            rates = update_rates(torch.stack(steps), float(group["lr"]), group["betas"], group["weight_decay"])
            for p, exp_avg, exp_avg_sq, rates_4 in zip(params, exp_avgs, exp_avg_sqs, rates.unbind(), strict=True):
                adamw(
                    local_part(p),
                    _gradient(p),
                    local_part(exp_avg),
                    local_part(exp_avg_sq),
                    rates_4,
                    betas=group["betas"],
                    eps=group["eps"],
                    factor=factor,
                )
