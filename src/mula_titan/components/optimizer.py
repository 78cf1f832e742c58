"""AdamW as an ``OptimizersContainer``: scalars instead of parameter-group tables; sharding by FSDP, SO or EPSO."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.distributed import ParallelDims

from mula_titan.components.kernel_adamw import KernelAdamW, make_adamw
from mula_titan.components.optimizer_sharding import OptimizerMeshes, ShardedAdamW
from mula_titan.components.optimizer_sharding.owners import Sharding

NO_DECAY_PATTERN = r"(norm|tok_embeddings)\.weight$"
"""Parameters without weight decay: every norm's weight and the input embedding."""


def replicate_parameters(
    model: nn.Module, parallel_dims: ParallelDims, *, sharding: Sharding, param_dtype: torch.dtype
) -> None:
    """In a model's parallelize function, in place of FSDP: parameters stay whole on every data rank.

    Leaves a note on the model, by which :class:`AdamWContainer` finds the ranks that share its states.

    Args:
        model: model or pipeline stage, after tensor and expert parallelism.
        parallel_dims: the run's meshes.
        sharding: ``"so"`` or ``"epso"``.
        param_dtype: dtype of the parameters in training; they get it when the optimizer is built.

    Raises:
        ValueError: degrees that the sharding cannot have.
    """
    meshes = OptimizerMeshes.from_parallel_dims(parallel_dims, sharding)
    model.optimizer_plan = (sharding, meshes, param_dtype)  # type: ignore[assignment]  # a plain attribute


class AdamWContainer(OptimizersContainer):
    """torchtitan's optimizer container with PyTorch's AdamW (arXiv 1711.05101) on all parameters.

    With ``sharding = "fsdp"`` it is torchtitan's, on parameters that FSDP2 shards. With ``"so"`` and ``"epso"`` (arXiv
    2604.00785) it holds one :class:`ShardedAdamW`; the model's parallelize function calls :func:`replicate_parameters`
    and the trainer :meth:`finish_backward`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        lr: float = 4e-4
        """Peak learning rate."""

        beta1: float = 0.9
        """Decay of the first moment."""

        beta2: float = 0.95
        """Decay of the second moment."""

        eps: float = 1e-8
        """Added to the root of the second moment."""

        weight_decay: float = 0.1
        """Decoupled weight decay, multiplied by the learning rate."""

        decay_all: bool = False
        """Decay norms and embeddings too, as Optimus did."""

        sharding: Literal["fsdp", "so", "epso"] = "fsdp"
        """
        fsdp: parameters, gradients and states sharded over data ranks (FSDP2). so, epso: whole parameters on every data
        rank, fp32 master weights and moments sharded: over the experts' data ranks (so), or all but the experts' over
        all data ranks (epso).
        """

        grad_dtype: Literal["float32", "bfloat16"] = "float32"
        """so and epso: dtype in which gradients are accumulated over micro-batches and summed over ranks."""

        bucket_mib: float = 256.0
        """so and epso: parameters per collective, MiB; a larger parameter travels alone."""

        offload_states: bool = False
        """so and epso: master weights and moments in pinned host memory, updated by the CPU."""

        clip_after_step: int = 0
        """so and epso: optimizer steps before gradient clipping begins (Optimus clips after warm-up)."""

        def groups(self) -> list[ParamGroupConfig]:
            """``param_groups`` if given, else one group without decay and one with it."""
            if self.param_groups:
                return self.param_groups
            kwargs = {
                "lr": self.lr,
                "betas": (self.beta1, self.beta2),
                "eps": self.eps,
                "weight_decay": self.weight_decay,
            }
            decayed = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=kwargs)
            if self.decay_all:
                return [decayed]
            undecayed = {**kwargs, "weight_decay": 0.0}
            return [
                ParamGroupConfig(pattern=NO_DECAY_PATTERN, optimizer_name="AdamW", optimizer_kwargs=undecayed),
                decayed,
            ]

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        config = replace(config)
        config.param_groups = config.groups()
        if config.sharding == "fsdp":
            super().__init__(config, model_parts=model_parts)
            return
        self.model_parts = model_parts
        self.optimizers = [self._sharded_adamw(config, model_parts)]
        params = [p for group in self.optimizers[0].param_groups for p in group["params"]]
        self._validate_params(params)
        self._post_init(params)

    def _sharded_adamw(self, config: Config, model_parts: list[nn.Module]) -> ShardedAdamW:
        groups = []
        meshes: Any = None
        param_dtype: Any = None
        for part in model_parts:
            sharding, meshes, param_dtype = getattr(part, "optimizer_plan", (None, None, None))
            if sharding != config.sharding:
                raise ValueError(
                    f"optimizer.sharding = {config.sharding!r}, but the model is prepared for {sharding or 'fsdp'!r}: "
                    "its parallelize function must call replicate_parameters(..., sharding=...) in place of FSDP"
                )
            by_name, _ = self._build_param_groups(part, config.param_groups, self._build_impl_kwargs(config))
            if unknown := by_name.keys() - {"AdamW"}:
                raise ValueError(
                    f"optimizer.param_groups uses {sorted(unknown)}: optimizer.sharding = {config.sharding!r} has only "
                    "AdamW; use 'fsdp'"
                )
            groups += by_name["AdamW"]
        return ShardedAdamW(
            groups,
            parts=model_parts,
            meshes=meshes,
            param_dtype=param_dtype,
            grad_dtype=getattr(torch, config.grad_dtype),
            bucket_mib=config.bucket_mib,
            offload=config.offload_states,
            clip_after_step=config.clip_after_step,
        )

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        return make_adamw if name == "AdamW" else OptimizersContainer._resolve_optimizer_factory(name)

    def parameters_to_clip(self) -> list[nn.Parameter]:
        """What the loop's ``clip_grad_norm_`` takes: all parameters, or stand-ins where the update itself scales."""
        kernels = [o for o in self.optimizers if isinstance(o, KernelAdamW)]
        if len(kernels) < len(self.optimizers):
            return [p for part in self.model_parts for p in part.parameters()]
        return [p for optimizer in kernels for p in optimizer.norms()]

    def wait(self) -> None:
        """Before parameters are read other than by a forward pass or a state dict: wait until they are up to date."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, ShardedAdamW):
                optimizer.wait()

    def finish_backward(self) -> None:
        """After a step's last backward, before gradients are clipped: finish the sums over ranks. FSDP has done so."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, ShardedAdamW):
                optimizer.finish_backward()

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        """As torchtitan's, but a pattern may match nothing on a pipeline stage (a dense one has no norm weights)."""
        names = [name for name, param in model.named_parameters() if param.requires_grad]
        claimed: set[str] = set()
        used = []
        for group in param_group_configs:
            matched = {name for name in names if name not in claimed and re.search(group.pattern, name)}
            if matched:
                claimed |= matched
                used.append(group)
        return OptimizersContainer._build_param_groups(model, used, impl_kwargs)
