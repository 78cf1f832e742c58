"""A small model with awkward sizes, and steps with given gradients."""

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from mula_titan.components.optimizer_sharding import OptimizerMeshes, ShardedAdamW

STEPS, MICRO_BATCHES = 3, 2
DECAYED, UNDECAYED = {"lr": 3e-3, "weight_decay": 0.1}, {"lr": 1e-3, "weight_decay": 0.0}
COMMON = {"betas": (0.9, 0.95), "eps": 1e-8}


@dataclass
class Synthetic:
    """A case: dtype of the parameters and options of the optimizer."""

    param_dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    fused: bool = False
    """torch's fused CPU kernel rounds the elements beyond its last whole vector differently, so it needs even sizes."""
    offload: bool = False


def model(width: int = 7, hidden: int = 13) -> nn.Module:
    """Sizes that no vector width divides; a frozen layer; the last weight is the first one."""
    torch.manual_seed(0)
    net = nn.ModuleDict(
        {
            "embed": nn.Embedding(11, width),
            "up": nn.Linear(width, hidden),
            "norm": nn.LayerNorm(hidden),
            "down": nn.Linear(hidden, width),
        }
    )
    net["frozen"] = nn.Linear(width, width).requires_grad_(False)
    net["head"] = nn.Linear(width, 11, bias=False)
    net["head"].weight = net["embed"].weight
    return net


def groups(net: nn.Module, fused: bool = False) -> list[dict[str, Any]]:
    """Matrices decay; the others have another learning rate and no decay."""
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    parts = ([x for x in named if x[1].ndim > 1], [x for x in named if x[1].ndim < 2])
    return [
        {"params": [p for _, p in part], "param_names": [n for n, _ in part], **COMMON, **options, "fused": fused}
        for part, options in zip(parts, (DECAYED, UNDECAYED), strict=True)
    ]


def gradient(name: str, shape: torch.Size, step: int, micro_batch: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers that depend on the arguments alone."""
    generator = torch.Generator().manual_seed(crc32(f"{name} {step} {micro_batch}".encode()))
    return torch.randn(shape, generator=generator).to(dtype)


def sharded(net: nn.Module, fused: bool = False, **options: Any) -> ShardedAdamW:
    """The optimizer over all ranks of the current process group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    options = {"param_dtype": torch.float32, "bucket_mib": 0.0005} | options
    return ShardedAdamW(groups(net, fused), parts=[net], meshes=OptimizerMeshes.from_mesh(mesh), **options)


def backward(net: nn.Module, step: int, micro_batch: int, *, mine: bool) -> None:
    """Give every trainable parameter its gradient, through autograd; zero on ranks whose gradient it isn't."""
    loss = torch.zeros(())
    for name, p in net.named_parameters():
        if p.requires_grad:
            g = gradient(name, p.shape, step, micro_batch, p.dtype)
            loss = loss + (p * (g if mine else torch.zeros_like(g))).sum()
    loss.backward()


def _model_of(case: Synthetic) -> nn.Module:
    return model(32, 64) if case.fused else model()


def run(case: Synthetic) -> dict[str, torch.Tensor]:
    """Parameters after the steps. Only rank 1 (or the only one) has gradients, so that all sums are exact."""
    net = _model_of(case)
    optimizer = sharded(net, case.fused, param_dtype=case.param_dtype, grad_dtype=case.grad_dtype, offload=case.offload)
    mine = dist.get_rank() == min(1, dist.get_world_size() - 1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro_batch in range(MICRO_BATCHES):
            backward(net, step, micro_batch, mine=mine)
        optimizer.finish_backward()
        optimizer.step()
    optimizer.wait()
    return {name: p.detach().clone() for name, p in net.named_parameters() if p.requires_grad}


def reference(case: Synthetic) -> dict[str, torch.Tensor]:
    """torch.optim.AdamW on fp32 parameters, with the gradients that parameters of the case's dtype give."""
    net = _model_of(case)
    optimizer = torch.optim.AdamW(groups(net, case.fused))
    for step in range(STEPS):
        for name, p in net.named_parameters():
            if p.requires_grad:
                given = [gradient(name, p.shape, step, m, case.param_dtype) for m in range(MICRO_BATCHES)]
                total = given[0].to(case.grad_dtype)
                for g in given[1:]:
                    total = total + g.to(case.grad_dtype)
                p.grad = total.float()
        optimizer.step()
    return {name: p.detach().to(case.param_dtype) for name, p in net.named_parameters() if p.requires_grad}
