"""Degrees, micro-batches and settings of one run, and which ranks and layers they put together."""

import copy
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed.pipeline_parallel import (
    _generate_llm_fqn_per_model_part,
    _get_pp_rank_to_stage_indices_mapping,
)

from mula_titan.model.args import MulaArgs
from mula_titan.toml_config import AC_MODES

SINGLE_STAGE = ("1F1B", "GPipe")
"""Schedules with one stage a rank; the others have ``stages_per_rank`` of them."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks of one collective: how many, and how the rank order lays them over the nodes."""

    axis: str
    """Name of the mesh axis or axes, as in torchtitan's meshes."""
    size: int
    per_node: int
    """Ranks of the group on one node; 1: each member is on a node of its own."""

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return self.size // self.per_node

    @property
    def link(self) -> str:
        """``node``: inside one node; ``network``: one rank a node; ``both``."""
        if self.nodes == 1:
            return "node"
        return "network" if self.per_node == 1 else "both"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run a model. Degrees are torchtitan's; sizes in tokens, layers or sequences as named."""

    args: MulaArgs
    world_size: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    schedule: str
    stages_per_rank: int
    micro_batch: int
    """Sequences of one forward pass."""
    num_micro_batches: int
    """Forward passes of a rank between two optimizer steps: pipeline micro-batches x accumulation."""
    passes: int
    """Runs of the pipeline schedule in a step (gradient accumulation)."""
    seq_len: int
    ac: str
    sharding: str
    sequence_parallel: bool
    first_less: int
    """Layers that the first pipeline stage has less, for the embedding."""
    last_less: int
    """Layers that the last pipeline stage has less, for the head."""
    param_dtype: str
    dtype: str
    """Of the weights, gradients and states that FSDP shards."""
    grad_dtype: str
    bucket_mib: float
    offload_states: bool
    cpu_offload: bool
    loss_chunks: int
    compiled: bool
    dispatch: str
    """``all_gather`` or ``all_to_all``."""

    @classmethod
    def from_config(cls, config: Any, world_size: int, device_type: str) -> "Layout":
        """The layout of a configuration that :func:`mula_titan.validate.validate` accepts.

        Args:
            config: a ``MulaTrainer.Config``.
            world_size: ranks.
            device_type: ``cuda``, ``xpu`` or ``cpu``; decides ``model.expert_dispatch = "auto"``.
        """
        p, t, o = config.parallelism, config.training, config.optimizer
        fixed = (
            p.data_parallel_replicate_degree
            * p.context_parallel_degree
            * p.tensor_parallel_degree
            * p.pipeline_parallel_degree
        )
        shard = p.data_parallel_shard_degree
        shard = world_size // fixed if shard == -1 else shard
        pp = p.pipeline_parallel_degree
        batch_ranks = max(1, shard * p.data_parallel_replicate_degree)
        passes = 1
        if t.global_batch_size != -1:
            passes = max(1, t.global_batch_size // (t.local_batch_size * batch_ranks))
        micro_batch = p.pipeline_parallel_microbatch_size if pp > 1 else t.local_batch_size
        modes = {config_class: mode for mode, config_class in AC_MODES.items()}
        ac = config.activation_checkpoint
        return cls(
            args=config.model,
            world_size=world_size,
            pp=pp,
            dp_replicate=p.data_parallel_replicate_degree,
            dp_shard=shard,
            cp=p.context_parallel_degree,
            tp=p.tensor_parallel_degree,
            ep=p.expert_parallel_degree,
            schedule=p.pipeline_parallel_schedule,
            stages_per_rank=_stages_per_rank(p, config.model.n_layers),
            micro_batch=micro_batch,
            num_micro_batches=passes * (t.local_batch_size // micro_batch),
            passes=passes,
            seq_len=t.seq_len,
            ac=modes.get(None if ac is None else type(ac), "none"),
            sharding=o.sharding,
            sequence_parallel=p.enable_sequence_parallel,
            first_less=p.pipeline_parallel_first_stage_less_layers,
            last_less=p.pipeline_parallel_last_stage_less_layers,
            param_dtype=t.mixed_precision_param,
            dtype=t.dtype,
            grad_dtype=o.grad_dtype,
            bucket_mib=o.bucket_mib,
            offload_states=o.offload_states,
            cpu_offload=t.enable_cpu_offload,
            loss_chunks=config.loss.num_chunks if isinstance(config.loss, ChunkedLossWrapper.Config) else 1,
            compiled=config.compile.enable and "model" in config.compile.components,
            dispatch=config.model.dispatch_on(device_type),
        )

    def applied_to(self, config: Any) -> Any:
        """A copy of a configuration with this layout, as the trainer would get it."""
        config = copy.deepcopy(config)
        p, t = config.parallelism, config.training
        p.pipeline_parallel_degree, p.pipeline_parallel_schedule = self.pp, self.schedule
        p.data_parallel_replicate_degree, p.data_parallel_shard_degree = self.dp_replicate, self.dp_shard
        p.context_parallel_degree, p.tensor_parallel_degree, p.expert_parallel_degree = self.cp, self.tp, self.ep
        p.pipeline_parallel_first_stage_less_layers = self.first_less
        p.pipeline_parallel_last_stage_less_layers = self.last_less
        p.pipeline_parallel_layers_per_stage = self.layers_per_stage
        p.pipeline_parallel_microbatch_size = self.micro_batch if self.pp > 1 else 1
        t.local_batch_size = self.local_batch_size
        t.global_batch_size = self.sequences_per_step if t.global_batch_size != -1 else -1
        config.optimizer.sharding = self.sharding
        mode: Any = AC_MODES[self.ac]
        if mode is None or not isinstance(config.activation_checkpoint, mode):
            config.activation_checkpoint = None if mode is None else mode()
        return config

    @property
    def is_offloaded(self) -> bool:
        """States (of FSDP, parameters and gradients too) are in host memory."""
        return self.cpu_offload if self.sharding == "fsdp" else self.offload_states

    # -- sizes --------------------------------------------------------------------------------------------------------

    @property
    def fsdp(self) -> int:
        """Ranks of the mesh axis that shards parameters: data and context."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks with the same experts, inside one replica."""
        return self.fsdp * self.tp // self.ep

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world_size // self.pp

    @property
    def num_stages(self) -> int:
        """Pipeline stages, virtual ones included."""
        return self.pp * self.stages_per_rank

    @property
    def layers_per_stage(self) -> int | None:
        """Value of ``pipeline_parallel_layers_per_stage`` that gives these stages; None: torchtitan's default does."""
        if self.stages_per_rank <= 2:
            return None
        return math.ceil((self.args.n_layers + self.first_less + self.last_less) / self.num_stages)

    @property
    def micro_batches_per_pass(self) -> int:
        """Micro-batches of one run of the pipeline schedule."""
        return self.num_micro_batches // self.passes

    @property
    def local_batch_size(self) -> int:
        """Sequences of a rank in one pass, as ``training.local_batch_size`` counts them."""
        return self.micro_batch * self.num_micro_batches // self.passes

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on a rank, before tensor parallelism splits the sequence."""
        return self.micro_batch * self.seq_len // self.cp

    @property
    def sequences_per_step(self) -> int:
        """Sequences between two optimizer steps, on all ranks."""
        return self.data_ranks * self.micro_batch * self.num_micro_batches

    @property
    def tokens_per_step(self) -> int:
        """Tokens between two optimizer steps, on all ranks."""
        return self.sequences_per_step * self.seq_len

    @cached_property
    def stages(self) -> list[list[str]]:
        """Names of the modules of each (virtual) pipeline stage: torchtitan's own division.

        Raises:
            ValueError: more stages than layers can fill.
        """
        if self.num_stages == 1:
            return _generate_llm_fqn_per_model_part(1, self.args.n_layers)
        return _generate_llm_fqn_per_model_part(self.num_stages, self.args.n_layers, self.first_less, self.last_less)

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Stages of a pipeline rank, in the order of its model parts."""
        if self.pp == 1:
            return (0,)
        return _get_pp_rank_to_stage_indices_mapping(pp_rank, self.pp, self.schedule, self.num_stages)

    def layers_of(self, stage: int) -> int:
        """Transformer blocks of a stage."""
        return sum(name.startswith("layers.") for name in self.stages[stage])

    # -- ranks --------------------------------------------------------------------------------------------------------

    def group(self, axis: str, ranks_per_node: int) -> Group:
        """Ranks of a mesh axis, by torchtitan's rank order pp, dp_replicate, fsdp, tp (experts: efsdp, ep).

        Args:
            axis: ``pp``, ``dp_replicate``, ``fsdp``, ``tp``, ``efsdp``, ``ep``, or joined: ``data`` (dp_replicate x
                fsdp), ``expert_data`` (dp_replicate x efsdp), ``stage`` (all ranks of a pipeline stage).
            ranks_per_node: ranks on one node.
        """
        size, stride = {
            "pp": (self.pp, self.stage_ranks),
            "dp_replicate": (self.dp_replicate, self.fsdp * self.tp),
            "fsdp": (self.fsdp, self.tp),
            "tp": (self.tp, 1),
            "efsdp": (self.efsdp, self.ep),
            "ep": (self.ep, 1),
            "data": (self.dp_replicate * self.fsdp, self.tp),
            "expert_data": (self.dp_replicate * self.efsdp, self.ep),
            "stage": (self.stage_ranks, 1),
        }[axis]
        # Members at multiples of the stride; an even number of them must fall on each node.
        per_node = math.gcd(size, ranks_per_node // math.gcd(ranks_per_node, stride) if stride < ranks_per_node else 1)
        return Group(axis=axis, size=size, per_node=max(1, per_node))

    def described(self) -> str:
        """The layout in one line."""
        parts = [f"pp {self.pp}"]
        if self.pp > 1:
            virtual = f" x{self.stages_per_rank}" if self.stages_per_rank > 1 else ""
            parts.append(f"{self.schedule}{virtual}")
        parts += [f"ep {self.ep}", f"tp {self.tp}"] + ([f"cp {self.cp}"] if self.cp > 1 else [])
        parts.append(f"dp {self.dp_replicate} x {self.dp_shard}")
        parts.append(f"{self.num_micro_batches} micro-batches of {self.micro_batch}")
        return ", ".join([*parts, f"ac {self.ac}", self.sharding])

    def flags(self) -> str:
        """Command-line flags that give this layout."""
        values: dict[str, Any] = {
            "parallelism.pipeline_parallel_degree": self.pp,
            "parallelism.expert_parallel_degree": self.ep,
            "parallelism.tensor_parallel_degree": self.tp,
            "parallelism.data_parallel_replicate_degree": self.dp_replicate,
            "parallelism.data_parallel_shard_degree": self.dp_shard,
            "training.local_batch_size": self.local_batch_size,
            "activation_checkpoint.mode": self.ac,
            "optimizer.sharding": self.sharding,
        }
        if self.pp > 1:
            values["parallelism.pipeline_parallel_schedule"] = self.schedule
            values["parallelism.pipeline_parallel_microbatch_size"] = self.micro_batch
            values["parallelism.pipeline_parallel_layers_per_stage"] = self.layers_per_stage or "none"
            values["parallelism.pipeline_parallel_first_stage_less_layers"] = self.first_less
            values["parallelism.pipeline_parallel_last_stage_less_layers"] = self.last_less
        return " ".join(f"--{key} {value}" for key, value in values.items())

    def changed(self, **changes: Any) -> "Layout":
        """The layout with other values in some fields."""
        return replace(self, **changes)


def _stages_per_rank(parallelism: Any, n_layers: int) -> int:
    """As torchtitan: by layers a stage if they are given, else 1 or (schedules with virtual stages) 2."""
    p = parallelism
    if p.pipeline_parallel_degree == 1:
        return 1
    if p.pipeline_parallel_layers_per_stage is not None:
        layers = n_layers + p.pipeline_parallel_first_stage_less_layers + p.pipeline_parallel_last_stage_less_layers
        return math.ceil(layers / p.pipeline_parallel_layers_per_stage) // p.pipeline_parallel_degree
    return 1 if p.pipeline_parallel_schedule in SINGLE_STAGE else 2
