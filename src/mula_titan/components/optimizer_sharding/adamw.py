"""AdamW whose states are split over ranks; gradients and parameters travel in flat buckets."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate

from inductor_kernels import kernel_path
from mula_titan.components.grad_norm import GradNorm
from mula_titan.components.optimizer_sharding.buckets import Bucket, kernel_rates
from mula_titan.components.optimizer_sharding.layout import Slot, plan_buckets
from mula_titan.components.optimizer_sharding.owners import OptimizerMeshes
from mula_titan.components.optimizer_sharding.slices import FlatSlice

GRAD_NORM = "grad_norm"
"""Name of the submodule that stands for all gradients; it is in no state dict."""


class _Gradient:
    """Collects one parameter's gradient over the backward passes of a step."""

    def __init__(self, name: str, param: nn.Parameter, bucket: Bucket, slot: Slot) -> None:
        self.name, self.param, self.bucket, self.slot = name, param, bucket, slot
        self.view = bucket.grad_view(slot)
        self.count = 0
        self.expected = 0
        """Gradients that arrive in a step, known after the first one; 0 before."""

    def add(self, contribution: torch.Tensor | None) -> None:
        if self.bucket.is_reduced:
            raise RuntimeError(
                f"{self.name} received more gradients in this step than in earlier ones, after their sum over the "
                "ranks had begun. Keep the number of backward passes in a step constant, or build a new optimizer."
            )
        if contribution is None:
            if self.count == 0:
                self.view.zero_()
        elif self.count == 0:
            self.view.copy_(contribution.reshape(-1))
        else:
            self.view.add_(contribution.reshape(-1))
        self.count += 1

    @property
    def is_complete(self) -> bool:
        return self.count == self.expected > 0


class ShardedAdamW(torch.optim.AdamW):
    """AdamW with master weights and moments in fp32, split flat over the ranks that share a parameter.

    A step: backward passes; :meth:`finish_backward`; any ``clip_grad_norm_`` over the modules' parameters;
    :meth:`step`. From the second step on, a bucket's sum over ranks starts as soon as its last gradient is there, and
    the updated parameters are waited for where the next forward needs them. A parameter without a gradient is updated
    with zero.

    Gradients are sums: nothing is divided by a number of ranks. The update is PyTorch's AdamW on flat tensors: the
    kernel of ``inductor_kernels`` if ``fused`` is asked for and there is one, else ``torch.optim.adamw.adamw``.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        *,
        parts: list[nn.Module],
        meshes: OptimizerMeshes,
        param_dtype: torch.dtype = torch.bfloat16,
        grad_dtype: torch.dtype = torch.float32,
        bucket_mib: float = 256.0,
        offload: bool = False,
        clip_after_step: int = 0,
    ) -> None:
        """Move the parameters into flat buffers; the modules get new ``nn.Parameter`` objects that view them.

        Args:
            param_groups: as ``torch.optim.AdamW`` takes them, each with ``param_names`` beside ``params``.
            parts: the modules that hold the parameters, in the order of the forward pass.
            meshes: owners of each kind of parameter.
            param_dtype: dtype of the modules' parameters from now on.
            grad_dtype: dtype in which gradients are accumulated over micro-batches and summed over ranks.
            bucket_mib: largest bucket of parameters in MiB; a larger parameter is its own bucket.
            offload: keep master weights and moments in pinned host memory and update there.
            clip_after_step: leave gradients unclipped in this many first steps; the norm is computed all the same.
        """
        self.parts, self.meshes = parts, meshes
        self._clip_after_step = clip_after_step
        param_groups = [group for group in param_groups if group["params"]]
        old = {id(p): (name, p, i) for i, g in enumerate(param_groups) for name, p in _named(g)}
        order = list(dict.fromkeys(id(p) for part in parts for p in part.parameters() if id(p) in old))[::-1]
        device = old[order[0]][1].device

        keys = {pid: (meshes.of(old[pid][1]), old[pid][2]) for pid in order}
        layouts = plan_buckets(
            [(old[pid][0], _local(old[pid][1]).numel(), keys[pid]) for pid in order],
            lambda key: key[0].mesh.size(),
            int(bucket_mib * 2**20) // param_dtype.itemsize,
        )
        self.buckets = [
            Bucket(
                layout,
                layout.key[0],
                device=device,
                param_dtype=param_dtype,
                grad_dtype=grad_dtype,
                offload=offload,
                kernels=bool(param_groups[0].get("fused")) and not offload and kernel_path(device) == "triton",
            )
            for layout in layouts
        ]
        homes = {slot.name: (bucket, slot) for bucket in self.buckets for slot in bucket.layout.slots}
        places = _places(parts)
        self._gradients: list[_Gradient] = []
        new: dict[int, nn.Parameter] = {}
        for pid in order:
            name, param, _ = old.pop(pid)
            bucket, slot = homes[name]
            bucket.set_param(slot, _local(param))
            view = bucket.param_view(slot).view(_local(param).shape)
            new[pid] = _swap(param, view, places[pid])
            self._gradients.append(_Gradient(name, new[pid], bucket, slot))
        for part in parts:  # frozen ones
            for param in list(part.parameters()):
                if not param.requires_grad and param.is_floating_point():
                    _swap(param, _local(param).to(param_dtype), places[id(param)])

        super().__init__([{**group, "params": [new[id(p)] for p in group["params"]]} for group in param_groups])
        self._group_of_bucket = [bucket.layout.key[1] for bucket in self.buckets]
        group = self.param_groups[0]
        step_device = device if group["fused"] and not offload else "cpu"
        self._steps = torch.zeros((), dtype=torch.float32, device=step_device)
        self._num_steps = 0
        counted = [float(bucket.owners.counts_in_norm) for bucket in self.buckets]
        self._counts_in_norm = torch.tensor(counted, device=device)
        self._finished = False
        self._missing = dict.fromkeys(self.buckets, 0)
        self._next_to_reduce = 0
        self._masters: dict[str, FlatSlice] = {}
        for gradient in self._gradients:
            self._register(gradient)
        for part in parts:
            self._register_part(part)
        self.grad_norm = GradNorm(meshes.stage, [Replicate()], device)
        parts[0].register_module(GRAD_NORM, self.grad_norm)
        self.zero_grad()

    # -- one step -----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step; buffers need no clearing, because the first gradient overwrites."""
        del set_to_none
        for gradient in self._gradients:
            gradient.param.grad = None
            gradient.count = 0
        for bucket in self.buckets:
            bucket.is_reduced = False
            self._missing[bucket] = len(bucket.layout.slots)
        self._next_to_reduce = 0
        self._finished = False

    def _on_gradient(self, gradient: _Gradient, param: torch.Tensor) -> None:
        """Post-accumulate hook: move the gradient to its bucket and start all sums that are due."""
        assert param.grad is not None
        gradient.add(self.meshes.contribution(param, param.grad))
        param.grad = None
        if gradient.is_complete:
            self._missing[gradient.bucket] -= 1
        # In a fixed order, so that all ranks start the same collectives one after the other.
        while self._next_to_reduce < len(self.buckets) and not self._missing[self.buckets[self._next_to_reduce]]:
            self.buckets[self._next_to_reduce].reduce()
            self._next_to_reduce += 1

    @torch.no_grad()
    def finish_backward(self) -> torch.Tensor:
        """After the step's last backward: complete the sums over ranks and compute the gradient norm.

        Returns:
            Norm over all parameters of this pipeline stage, float32 scalar; ``clip_grad_norm_`` over the parameters of
            the modules adds the other stages and clips.
        """
        self.wait()
        for gradient in self._gradients:
            if gradient.param.grad is not None:  # pipeline schedules with a separate weight pass run no hooks
                gradient.add(self.meshes.contribution(gradient.param, gradient.param.grad))
                gradient.param.grad = None
            elif gradient.count == 0:
                gradient.view.zero_()
            gradient.expected = max(gradient.expected, gradient.count)
        for bucket in self.buckets[self._next_to_reduce :]:
            bucket.reduce()
        self._next_to_reduce = len(self.buckets)
        for bucket in self.buckets:
            bucket.wait_reduced()
        norms = [bucket.norm() for bucket in self.buckets]
        square = (torch.stack(norms).square() * self._counts_in_norm).sum()
        if self.meshes.stage.size() > 1:
            dist.all_reduce(square, group=self.meshes.stage.get_group())
        norm = square.sqrt()
        self.grad_norm.set(norm)
        self._finished = True
        return norm

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures
        """Update this rank's shards and spread the new parameters, buckets in the order of the next forward.

        Raises:
            RuntimeError: :meth:`finish_backward` was not called after the last backward.
        """
        assert closure is None, "no closures: gradients are summed outside of step()"
        if not self._finished:
            raise RuntimeError(
                "ShardedAdamW.step() without finish_backward(): call it after the step's last backward and before "
                "gradients are clipped"
            )
        factor = self.grad_norm.factor() if self._num_steps >= self._clip_after_step else None
        order = list(zip(self.buckets, self._group_of_bucket, strict=True))[::-1]
        for bucket, _ in order:
            bucket.clip(factor)
        has_kernels = any(bucket.has_kernels for bucket in self.buckets)
        rates = [kernel_rates(self._steps, group) if has_kernels else None for group in self.param_groups]
        for bucket, group in order:
            bucket.update(self._steps, self.param_groups[group], rates[group])
            bucket.gather()
        self._steps += 1
        self._num_steps += 1
        self._finished = False

    def wait(self) -> None:
        """Wait until all parameters are up to date. Forward passes and state dicts do so by themselves."""
        for bucket in self.buckets:
            bucket.wait_gathered()

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _register(self, gradient: _Gradient) -> None:
        param, bucket, slot = gradient.param, gradient.bucket, gradient.slot
        param.register_post_accumulate_grad_hook(partial(self._on_gradient, gradient))
        self._masters[gradient.name] = bucket.slice_of(slot, param, bucket.master)
        self.state[param] = {
            "step": self._steps.clone(),
            "exp_avg": bucket.slice_of(slot, param, bucket.exp_avg),
            "exp_avg_sq": bucket.slice_of(slot, param, bucket.exp_avg_sq),
        }

    def _register_part(self, part: nn.Module) -> None:
        bucket_of = {id(g.param): g.bucket for g in self._gradients}
        for unit in (part, *_units(part)):
            own = [bucket_of[id(p)] for p in unit.parameters(recurse=unit is not part) if id(p) in bucket_of]
            if buckets := list(dict.fromkeys(own)):
                unit.register_forward_pre_hook(partial(_wait_for, buckets))
        name_of = {id(g.param): g.name for g in self._gradients}
        # All names of a tied parameter.
        slices = {
            _canonical(name): self._masters[name_of[id(p)]]
            for name, p in part.named_parameters(remove_duplicate=False)
            if id(p) in name_of
        }
        part.register_state_dict_post_hook(partial(_show_masters, slices))
        part.register_load_state_dict_pre_hook(partial(self._load_masters, slices))

    def _load_masters(self, slices: dict[str, FlatSlice], part: nn.Module, state: dict, prefix: str, *_: Any) -> None:
        """Before a module loads its state: the values go to the master weights, and from there to the parameters."""
        found = {name: piece for name, piece in slices.items() if prefix + name in state}
        for name, piece in found.items():
            value = state[prefix + name]
            piece.load(value)
            if isinstance(value, FlatSlice):
                del state[prefix + name]
        if found:
            self.refresh()

    def refresh(self) -> None:
        """Parameters anew from the master weights; a collective call."""
        for bucket in self.buckets:
            bucket.gather()
        self.wait()

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As AdamW's; moments are :class:`FlatSlice` views."""
        for state in self.state.values():
            state["step"].copy_(self._steps)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take moments (slices, or whole parameters' tensors), step count and hyper-parameters.

        Raises:
            ValueError: parameters with different step counts.
        """
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
        params = [p for group in self.param_groups for p in group["params"]]
        steps = set()
        for index, saved in state_dict["state"].items():
            own = self.state[params[index]]
            own["exp_avg"].load(saved["exp_avg"])
            own["exp_avg_sq"].load(saved["exp_avg_sq"])
            steps.add(float(saved["step"]))
        if len(steps) > 1:
            raise ValueError(
                f"the checkpoint's parameters have made {sorted(steps)} steps: optimizer.sharding = 'so' and 'epso' "
                "keep one count for all; load it with 'fsdp'"
            )
        if steps:
            self._num_steps = int(steps.pop())
            self._steps.fill_(self._num_steps)


def _named(group: dict[str, Any]) -> Iterator[tuple[str, nn.Parameter]]:
    return zip(group["param_names"], group["params"], strict=True)


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local().detach() if isinstance(param, DTensor) else param.detach()


def _canonical(name: str) -> str:
    # The segment that torch's activation checkpoint wrapper puts into names.
    return name.replace("_checkpoint_wrapped_module.", "")


def _places(parts: list[nn.Module]) -> dict[int, list[tuple[nn.Module, str]]]:
    """Modules and attributes that hold each parameter: more than one for tied parameters."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in parts:
        for module in part.modules():
            for attribute, param in module._parameters.items():
                if param is not None:
                    places.setdefault(id(param), []).append((module, attribute))
    return places


def _swap(param: nn.Parameter, local: torch.Tensor, places: list[tuple[nn.Module, str]]) -> nn.Parameter:
    """Put a parameter with other local values (and dtype) in the place of another."""
    data: torch.Tensor = local
    if isinstance(param, DTensor):
        data = DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
    new = nn.Parameter(data, requires_grad=param.requires_grad)
    new.__dict__.update(param.__dict__)
    for module, attribute in places:
        module._parameters[attribute] = new
    return new


def _units(part: nn.Module) -> Iterator[nn.Module]:
    """Modules that a forward calls one after the other: the children, and those of lists and dicts."""
    for child in part.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield child


@torch.compiler.disable
def _wait_for(buckets: list[Bucket], *_: Any) -> None:
    for bucket in buckets:
        bucket.wait_gathered()


def _show_masters(slices: dict[str, FlatSlice], part: nn.Module, state: dict, prefix: str, *_: Any) -> None:
    """In a module's state the parameters are the fp32 master weights, split as they lie."""
    for name, piece in slices.items():
        state[prefix + name] = piece
    state.pop(f"{prefix}{GRAD_NORM}.value", None)
