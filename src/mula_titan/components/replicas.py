"""Refuses set-ups that go wrong silently: ranks with other code, libraries, configuration, data or weights."""

import hashlib
import importlib
import importlib.metadata
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config import Configurable
from torchtitan.tools.logging import logger

from mula_titan.components.bad_nodes import host_name
from mula_titan.components.step_trace import bit_sum
from mula_titan.exit_codes import REPLICAS, FatalFault

_EDGE = 65536  # bytes at the beginning and end of a data file that are compared


class ReplicaCheck(Configurable):
    """Compares the ranks at the start, and their weights from time to time."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        at_start: bool = True
        """Before the first step: compare code, library versions, configuration, data and replicated weights."""

        interval: int = 0
        """Compare replicated weights every so many steps too. 0: at the start only."""

        clock_seconds: float = 60.0
        """Warn when the hosts' clocks differ by more, s."""

        def __post_init__(self) -> None:
            if self.interval < 0:
                raise ValueError(f"interval = {self.interval} must be at least 0")

    def __init__(self, config: Config):
        self.config = config

    def start(self, values: dict[str, Any], data_paths: list[str], model_parts: list[nn.Module]) -> None:
        """All comparisons of the start. A collective call.

        Args:
            values: the configuration, as JSON types.
            data_paths: files, folders or patterns.
            model_parts: with weights loaded.

        Raises:
            FatalFault: ranks differ.
        """
        if not self.config.at_start:
            return
        mine = {
            "code": _code_checksum(),
            "configuration": _checksum([json.dumps(values, sort_keys=True, default=str).encode()]),
            "data": _checksum(_data_parts(data_paths)),
            **{f"version of {name}": importlib.metadata.version(name) for name in ("torch", "torchtitan")},
        }
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {**mine, "host": host_name(), "clock": time.time()})
        compare_facts(everyone)
        self._say(everyone)
        self.compare_weights(model_parts)

    def _say(self, everyone: list[dict[str, Any]]) -> None:
        clocks = [facts["clock"] for facts in everyone]
        spread = max(clocks) - min(clocks)
        versions = ", ".join(f"{k.removeprefix('version of ')} {v}" for k, v in everyone[0].items() if "version" in k)
        logger.info(
            f"{len(everyone)} ranks agree: {versions}, code {everyone[0]['code'][:8]}; clocks within {spread:.1f} s."
        )
        if spread > self.config.clock_seconds and dist.get_rank() == 0:
            early, late = (everyone[clocks.index(f(clocks))]["host"] for f in (min, max))
            logger.warning(f"Clocks differ by {spread:.0f} s between {early} and {late}: logs won't line up.")

    def compare_weights(self, model_parts: list[nn.Module]) -> None:
        """Every weight must be the same to the bit on all ranks that hold copies of it. A collective call.

        Raises:
            FatalFault: some aren't; names weights and ranks.
        """
        different = [name for names in _differing_weights(model_parts) for name in names]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, different[:20])
        if any(everyone):
            ranks = [rank for rank, names in enumerate(everyone) if names]
            names = list(dict.fromkeys(name for rank in everyone for name in rank))
            raise FatalFault(
                f"Replicas differ in their weights on ranks {ranks[:16]}: {', '.join(names[:5])}. Load a checkpoint "
                "that all ranks can read, or look at these ranks' hosts.",
                REPLICAS,
            )

    def is_due(self, step: int) -> bool:
        """Whether weights are compared after this step."""
        return self.config.interval > 0 and step % self.config.interval == 0


def compare_facts(everyone: list[dict[str, Any]]) -> None:
    """Facts must be equal on all ranks, but for host and clock.

    Raises:
        FatalFault: names each fact and the ranks that differ from most.
    """
    problems = []
    for fact in everyone[0]:
        if fact in ("host", "clock"):
            continue
        usual, _ = Counter(facts[fact] for facts in everyone).most_common(1)[0]
        odd = [rank for rank, facts in enumerate(everyone) if facts[fact] != usual]
        if odd:
            who = ", ".join(f"rank {rank} ({everyone[rank]['host']}: {everyone[rank][fact][:12]})" for rank in odd[:8])
            problems.append(f"{fact}: {who}, all others {usual[:12]}")
    if problems:
        raise FatalFault(f"Ranks differ in their set-up. {'; '.join(problems)}.", REPLICAS)


def _differing_weights(model_parts: list[nn.Module]) -> Iterator[list[str]]:
    """Names of weights whose copies differ, for each process group that holds copies."""
    by_group: dict[Any, list[tuple[str, torch.Tensor]]] = {}
    for part in model_parts:
        plan = getattr(part, "optimizer_plan", None)  # whole weights on all data ranks, with sharded optimizer states
        for name, parameter in part.named_parameters():
            if plan is not None:
                owners = plan[1].of(parameter).mesh
                if owners.size() > 1:
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    by_group.setdefault(owners.get_group(), []).append((canonical_fqn(name), local.detach()))
            if not isinstance(parameter, DTensor):
                continue
            for axis, placement in enumerate(parameter.placements):
                if placement.is_replicate() and parameter.device_mesh.size(axis) > 1:
                    group = parameter.device_mesh.get_group(axis)
                    by_group.setdefault(group, []).append((canonical_fqn(name), parameter.to_local().detach()))
    for group, weights in by_group.items():
        sums = torch.stack([bit_sum(weight) for _, weight in weights])
        # Non-negative and below 2**31: some backends get the MAX of negative integers wrong.
        low, high = sums.clone(), sums.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        yield [name for (name, _), differs in zip(weights, (low != high).tolist(), strict=True) if differs]


def _checksum(parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _code_checksum() -> str:
    root = Path(__file__).parents[1]
    kernels = importlib.import_module("inductor_kernels").__path__[0]
    paths = [path for folder in (root, Path(kernels)) for path in sorted(folder.rglob("*.py"))]
    return _checksum(part for path in paths for part in (path.name.encode(), path.read_bytes()))


def _data_parts(patterns: list[str]) -> Iterator[bytes]:
    """Name, size, beginning and end of every data file; a tokenised folder's index has checksums of all the rest."""
    for pattern in patterns:
        for root in sorted(glob(pattern)) or [pattern]:
            paths = sorted(Path(root).rglob("*")) if Path(root).is_dir() else [Path(root)]
            for path in paths:
                if path.is_file():
                    size = path.stat().st_size
                    yield f"{path.name} {size}".encode()
                    with path.open("rb") as file:
                        yield file.read(_EDGE)
                        file.seek(max(0, size - _EDGE))
                        yield file.read(_EDGE)
