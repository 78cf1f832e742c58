"""Which ranks sum a parameter's gradient and split its optimizer states.

Axes of torchtitan's meshes: a pipeline stage's ranks are ``dp_replicate x fsdp x tp`` and, seen by the experts,
``dp_replicate x efsdp x ep``; ``fsdp`` holds data and context ranks. With TP = 1 ``fsdp = efsdp x ep``.

| parameter                        | gradient summed over    | states split over: epso  | so                       |
|----------------------------------|-------------------------|--------------------------|--------------------------|
| expert, split over ``ep``        | dp_replicate x efsdp    | dp_replicate x efsdp     | dp_replicate x efsdp     |
| split over ``tp``                | dp_replicate x fsdp     | dp_replicate x fsdp      | dp_replicate x fsdp      |
| equal on all ranks of the stage  | whole stage             | whole stage              | dp_replicate x efsdp     |

``so`` keeps the states of the last kind once for each expert rank (arXiv 2604.00785 calls this the sharded optimizer);
``epso`` splits them over these ranks too.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

Sharding = Literal["so", "epso"]


@dataclass(frozen=True)
class Owners:
    """Ranks that share the states of a parameter."""

    mesh: DeviceMesh
    """1-D; the gradient is summed over its ranks, the states are split over them."""

    copies: DeviceMesh | None = None
    """1-D; further ranks that the gradient is summed over, each with the same states. None: there are none."""

    @property
    def counts_in_norm(self) -> bool:
        """Whether this rank's shard enters the gradient norm: one of the copies does."""
        return self.copies is None or self.copies.get_local_rank() == 0


@dataclass(frozen=True)
class OptimizerMeshes:
    """Owners of every kind of parameter on this rank."""

    stage: DeviceMesh
    """1-D: all ranks of this pipeline stage."""
    expert: Owners
    split: Owners
    replicated: Owners
    tp_rank: int

    @classmethod
    def from_parallel_dims(cls, parallel_dims: Any, sharding: Sharding) -> "OptimizerMeshes":
        """Take the groups from torchtitan's ``ParallelDims`` (``spmd_backend = "partial_dtensor"``).

        Raises:
            ValueError: ``so`` with tensor and expert parallelism together.
        """
        if sharding == "so" and parallel_dims.ep > 1 and parallel_dims.tp > 1:
            raise ValueError(
                "optimizer.sharding = 'so' has no owners for tensor-parallel parameters beside expert ranks; "
                "use 'epso', or set tensor_parallel_degree or expert_parallel_degree to 1"
            )

        def flat(name: str, *axes: str) -> DeviceMesh:
            mesh = parallel_dims.get_optional_mesh(list(axes), include_singleton_axes=True)
            return mesh._flatten(f"optimizer_{name}")

        stage = flat("stage", "dp_replicate", "fsdp", "tp")
        replicated = Owners(stage)
        split = Owners(flat("data", "dp_replicate", "fsdp")) if parallel_dims.tp > 1 else replicated
        expert = Owners(flat("expert_data", "dp_replicate", "efsdp")) if parallel_dims.ep > 1 else replicated
        if sharding == "so" and parallel_dims.ep > 1:
            replicated = split = Owners(expert.mesh, copies=parallel_dims.get_mesh("ep"))
        tp_rank = parallel_dims.get_mesh("tp").get_local_rank() if parallel_dims.tp > 1 else 0
        return cls(stage=stage, expert=expert, split=split, replicated=replicated, tp_rank=tp_rank)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> "OptimizerMeshes":
        """Data parallelism alone, over a 1-D mesh."""
        owners = Owners(mesh)
        return cls(stage=mesh, expert=owners, split=owners, replicated=owners, tp_rank=0)

    def of(self, param: torch.Tensor) -> Owners:
        """Owners of a parameter: by its DTensor placement; a plain tensor is equal on all ranks of the stage."""
        if not isinstance(param, DTensor):
            return self.replicated
        assert param.device_mesh.mesh_dim_names is not None
        if "ep" in param.device_mesh.mesh_dim_names:
            return self.expert
        return self.split if any(isinstance(p, Shard) for p in param.placements) else self.replicated

    def contribution(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
        """What this rank adds to the gradient's sum over its owners; None for nothing.

        A replicated parameter's gradient is partial on tensor-parallel ranks, and then all of them add theirs; or it is
        whole on each, and then only the first does.
        """
        if not isinstance(grad, DTensor):
            return grad if self.tp_rank == 0 else None
        assert isinstance(param, DTensor)
        if any(isinstance(p, Shard) for p in param.placements):
            if grad.placements != param.placements:
                grad = grad.redistribute(placements=param.placements)
            return grad.to_local()
        if not all(isinstance(p, Partial) and p.reduce_op == "sum" for p in grad.placements):
            grad = grad.redistribute(placements=[Replicate()] * len(grad.placements))
            return grad.to_local() if self.tp_rank == 0 else None
        return grad.to_local()
