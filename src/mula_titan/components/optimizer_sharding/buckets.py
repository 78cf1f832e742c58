"""Flat buffers of one bucket and what happens to them in a step: reduce, update, gather."""

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from mula_titan.components.optimizer_sharding.layout import ALIGN, BucketLayout, Slot
from mula_titan.components.optimizer_sharding.owners import Owners
from mula_titan.components.optimizer_sharding.slices import FlatSlice


def _kernels() -> Any:
    """The kernels' module, which imports triton."""
    return importlib.import_module("inductor_kernels.adamw")


def kernel_rates(steps: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """What `Bucket.update` hands to the kernel, the same for all buckets of a parameter group."""
    return _kernels().update_rates((steps + 1)[None], float(group["lr"]), group["betas"], group["weight_decay"])[0]


class Bucket:
    """Parameters, gradients and this rank's shard of the optimizer states, each one flat tensor.

    All collectives are plain sums or gathers of equal parts. Sizes in elements: N = padded bucket, S = N / owners.
    """

    def __init__(
        self,
        layout: BucketLayout,
        owners: Owners,
        *,
        device: torch.device,
        param_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        offload: bool,
        kernels: bool,
    ) -> None:
        """``kernels``: norm and update by those of ``inductor_kernels``; states on the device only."""
        self.layout, self.owners = layout, owners
        self.rank = owners.mesh.get_local_rank()
        self.params = torch.zeros(layout.numel, dtype=param_dtype, device=device)
        self.grads = torch.zeros(layout.numel, dtype=grad_dtype, device=device)
        self.alone = layout.num_shards == 1
        size = layout.shard_numel
        self.grad_shard = self.grads if self.alone else torch.zeros(size, dtype=grad_dtype, device=device)
        home: dict[str, Any] = {"dtype": torch.float32, "device": device}
        if offload:
            home = {"dtype": torch.float32, "device": "cpu", "pin_memory": device.type != "cpu"}
        # Alone in fp32 the parameters themselves are the master weights.
        is_master = self.alone and param_dtype == torch.float32 and not offload
        self.master = self.params if is_master else torch.zeros(size, **home)
        self.exp_avg, self.exp_avg_sq = torch.zeros(size, **home), torch.zeros(size, **home)
        # What the gather sends; the master itself unless it has to be cast or copied to the device.
        self._sent = self.params if self.alone else self.master
        if not self.alone and (param_dtype != torch.float32 or offload):
            self._sent = torch.zeros(size, dtype=param_dtype, device=device)
        self.has_kernels = kernels
        self._factor: torch.Tensor | None = None
        self._is_sent_current = False
        self._host_grad = torch.zeros(size, **home) if offload else None
        self._on_host: torch.Event | None = None
        self._reducing: dist.Work | None = None
        self._gathering: dist.Work | None = None
        self.is_reduced = False

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Distinct buffers that the bucket holds for good, by purpose."""
        states = [self.exp_avg, self.exp_avg_sq] + ([self.master] if self.master is not self.params else [])
        buffers = [] if self.alone else [self.grad_shard]
        if self._sent is not self.master and self._sent is not self.params:
            buffers.append(self._sent)
        return {"parameters": [self.params], "gradients": [self.grads], "states": states, "buffers": buffers}

    def param_view(self, slot: Slot) -> torch.Tensor:
        """A parameter's place in the parameter buffer, 1-D."""
        return self.params[slot.offset : slot.offset + slot.numel]

    def grad_view(self, slot: Slot) -> torch.Tensor:
        """A parameter's place in the gradient buffer, 1-D."""
        return self.grads[slot.offset : slot.offset + slot.numel]

    def slice_of(self, slot: Slot, param: torch.Tensor, shard: torch.Tensor) -> FlatSlice:
        """The piece of a parameter that lies in a flat shard of this bucket: master or a moment."""
        start, stop = slot.owned(self.rank, self.layout.shard_numel)
        position = slot.offset + start - self.rank * self.layout.shard_numel if stop > start else 0
        return FlatSlice.of(param, start, shard[position : position + stop - start])

    @torch.no_grad()
    def set_param(self, slot: Slot, local: torch.Tensor) -> None:
        """Take a parameter's initial value: into the buffer and, unrounded, into the master weights."""
        flat = local.reshape(-1)
        self.param_view(slot).copy_(flat)
        start, stop = slot.owned(self.rank, self.layout.shard_numel)
        if stop > start and self.master is not self.params:
            position = slot.offset + start - self.rank * self.layout.shard_numel
            self.master[position : position + stop - start].copy_(flat[start:stop])

    def reduce(self) -> None:
        """Start summing the gradients; each owner receives its shard."""
        self.is_reduced = True
        if not self.alone:
            group = self.owners.mesh.get_group()
            self._reducing = dist.reduce_scatter_single(self.grad_shard, self.grads, group=group, async_op=True)

    def wait_reduced(self) -> None:
        """Make the current stream (on a CPU: the caller) wait for the sum."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None
        if self.owners.copies is not None:
            dist.all_reduce(self.grad_shard, group=self.owners.copies.get_group())

    def norm(self) -> torch.Tensor:
        """Norm of this rank's shard of the gradient, float32 scalar."""
        if self.has_kernels:
            return _kernels().square_sum([self.grad_shard]).sqrt()
        # Norms of norms: torch's CPU kernel sums a long vector with an error that grows (1 % at 1e8 elements).
        rows = torch.linalg.vector_norm(self.grad_shard.view(-1, ALIGN), dim=1, dtype=torch.float32)
        return torch.linalg.vector_norm(rows)

    def clip(self, factor: torch.Tensor | None) -> None:
        """Scale this rank's gradients, or let the update do it; with offloaded states start their way to the host."""
        if self.has_kernels:
            self._factor = factor
            return
        if factor is not None:
            self.grad_shard.mul_(factor)
        if self._host_grad is not None:
            self._host_grad.copy_(self.grad_shard, non_blocking=True)
            if self.grad_shard.device.type != "cpu":
                self._on_host = torch.Event(self.grad_shard.device)
                self._on_host.record()

    def update(self, steps: torch.Tensor, group: dict[str, Any], rates_4: torch.Tensor | None) -> None:
        """PyTorch's AdamW on this rank's shard.

        Args:
            steps: fp32 scalar, updates before this one.
            group: options of the shard's parameters.
            rates_4: `kernel_rates` of both, where the kernels update.
        """
        beta1, beta2 = group["betas"]
        if self.has_kernels:
            self._is_sent_current = self._sent is not self.master
            _kernels().adamw(
                self.master,
                self.grad_shard,
                self.exp_avg,
                self.exp_avg_sq,
                rates_4,
                betas=(beta1, beta2),
                eps=group["eps"],
                factor=self._factor,
                copy_N=self._sent if self._is_sent_current else None,
            )
            return
        grad = self.grad_shard
        if self._host_grad is not None:
            if self._on_host is not None:
                self._on_host.synchronize()
            grad = self._host_grad
        adamw(
            [self.master],
            [grad.float()],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [steps.clone()],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def gather(self) -> None:
        """Start spreading the updated master weights, cast to the parameters' dtype, to all ranks."""
        if self._sent is not self.master and not self._is_sent_current:
            self._sent.copy_(self.master, non_blocking=True)
        self._is_sent_current = False
        if self.alone:
            return
        # Not in place: the input is no part of the output, which oneCCL would have to be told.
        group = self.owners.mesh.get_group()
        self._gathering = dist.all_gather_single(self.params, self._sent, group=group, async_op=True)

    def wait_gathered(self) -> None:
        """Make the current stream (on a CPU: the caller) wait for the parameters."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
