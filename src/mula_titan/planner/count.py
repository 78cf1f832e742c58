"""Counting the real thing: the model with its real transforms, on the meta device, in a fake group of all ranks."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from mula_titan.planner.layout import Layout
from mula_titan.planner.sharded import BYTES, FP32, Held


@contextmanager
def fake_ranks(world_size: int, rank: int) -> Iterator[None]:
    """A process group of any size in this process; its collectives do nothing."""
    previous, hook = logging.root.manager.disable, sys.excepthook
    logging.disable(logging.WARNING)
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        logging.disable(previous)
        sys.excepthook = hook  # each group wraps it once more


def stage_parts(config: Any, layout: Layout) -> list[nn.Module]:
    """Model parts of this process's rank, parallelised, on the meta device; inside :func:`fake_ranks`."""
    config = layout.applied_to(config)
    config.optimizer.implementation = "foreach"
    config.compile.enable = False
    dims = ParallelDims.from_config(config.parallelism, layout.world_size)
    dist_utils.set_spmd_backend("partial_dtensor")
    dims.build_mesh()
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    common: dict[str, Any] = {
        "parallel_dims": dims,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
        "dump_folder": "",
    }
    if layout.pp == 1:
        return [spec.parallelize_fn(model, **common)]
    _, parts, _, _ = spec.pipelining_fn(
        model,
        **common,
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=config.loss.build(compile_config=config.compile),
    )
    return parts


def counted(config: Any, layout: Layout, pp_rank: int) -> tuple[Held, dict[tuple[str, str], tuple[float, int]]]:
    """Bytes of the buffers of the first rank of a pipeline stage, and its messages.

    Args:
        config: a ``MulaTrainer.Config``.
        layout: the layout to build, of any number of ranks.
        pp_rank: pipeline rank.

    Returns:
        Bytes held; and for so and epso (kind, axis) -> (bytes, collectives) of a step.
    """
    with fake_ranks(layout.world_size, pp_rank * layout.stage_ranks):
        parts = stage_parts(config, layout)
        if layout.sharding == "fsdp":
            return _count_fsdp(parts, layout), {}
        return _count_sharded(parts, layout.applied_to(config), layout)


def _count_sharded(parts: list[nn.Module], config: Any, layout: Layout) -> tuple[Held, dict]:
    config.optimizer.implementation = "foreach"
    (optimizer,) = config.optimizer.build(model_parts=parts)
    held = {"parameters": 0.0, "gradients": 0.0, "states": 0.0, "buffers": 0.0}
    messages: dict[tuple[str, str], tuple[float, int]] = {}
    ideal = 0.0

    def add(kind: str, size: int, tensor: torch.Tensor) -> None:
        number, count = messages.get((kind, str(size)), (0.0, 0))
        messages[kind, str(size)] = (number + tensor.numel() * tensor.itemsize, count + 1)

    for bucket in optimizer.buckets:
        for kind, tensors in bucket.tensors().items():
            held[kind] += sum(t.numel() * t.itemsize for t in tensors)
        ideal += 12 * sum(slot.numel for slot in bucket.layout.slots) / bucket.layout.num_shards
        if not bucket.alone:
            add("reduce_scatter", bucket.layout.num_shards, bucket.grads)
            add("all_gather", bucket.layout.num_shards, bucket.params)
        if bucket.owners.copies is not None:
            add("all_reduce", bucket.owners.copies.size(), bucket.grad_shard)
    return Held(**held, ideal_states=ideal), messages


def _count_fsdp(parts: list[nn.Module], layout: Layout) -> Held:
    own = BYTES[layout.dtype]
    named = [(name, p) for part in parts for name, p in part.named_parameters()]
    if not any(isinstance(p, DTensor) for _, p in named):
        size = float(sum(p.numel() * own for _, p in named))
        return Held(parameters=size, gradients=size, states=2 * size, buffers=0.0, ideal_states=2 * size)
    shard = whole = 0
    ideal = 0.0
    blocks: dict[str, int] = {}
    for name, p in named:
        assert isinstance(p, DTensor)
        # Even parts, the last one padded; EP and TP split the parameter itself.
        axes = [i for i, axis in enumerate(p.device_mesh.mesh_dim_names or ()) if axis in ("fsdp", "efsdp")]
        ranks = p.device_mesh.size(axes[0])
        local = p.to_local().numel()
        shard += local
        whole += local * ranks
        split = [p.device_mesh.size(i) for i, placement in enumerate(p.placements) if not placement.is_replicate()]
        ideal += 8 * p.numel() / torch.Size(split).numel()
        block = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name
        blocks[block] = blocks.get(block, 0) + local * ranks
    largest = sorted(blocks.values())[-2:]
    pipelined = layout.pp > 1
    return Held(
        parameters=shard * own,
        gradients=shard * own,
        states=shard * 2 * own,
        buffers=(whole if pipelined else sum(largest)) * BYTES[layout.param_dtype]
        + (whole if pipelined else largest[-1]) * FP32,
        ideal_states=ideal * own / FP32,
    )
