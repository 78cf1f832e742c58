"""Which rank owns which elements of which parameter: plain arithmetic, no tensors.

Parameters that have the same owners and hyper-parameters are laid one after the other into buckets. A bucket is cut
into equal contiguous shards, one a rank, so that every collective is even. Parameters are never split over buckets.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

ALIGN = 64
"""Elements; parameters and shards start at multiples of it, 128 bytes in bf16, so that vector kernels stay aligned."""


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Slot:
    """Place of one parameter (this rank's part of it under EP or TP) in a bucket, in elements."""

    name: str
    numel: int
    offset: int

    def owned(self, rank: int, shard_numel: int) -> tuple[int, int]:
        """Range of the parameter's flat elements that lies in a rank's shard; empty as ``(x, x)``."""
        start = min(max(rank * shard_numel - self.offset, 0), self.numel)
        stop = min(max((rank + 1) * shard_numel - self.offset, 0), self.numel)
        return start, stop


@dataclass(frozen=True)
class BucketLayout:
    """Parameters of one flat buffer, cut into ``num_shards`` equal shards."""

    key: Any
    """What the parameters have in common: owners and parameter group."""
    slots: tuple[Slot, ...]
    num_shards: int

    @property
    def shard_numel(self) -> int:
        """Elements of each shard, padding included."""
        end = self.slots[-1].offset + self.slots[-1].numel
        return _round_up(max(end, 1), ALIGN * self.num_shards) // self.num_shards

    @property
    def numel(self) -> int:
        """Elements of the whole bucket, padding included."""
        return self.shard_numel * self.num_shards


def plan_buckets(
    parameters: Iterable[tuple[str, int, Any]], num_shards: Callable[[Any], int], max_numel: int
) -> list[BucketLayout]:
    """Distribute parameters over buckets.

    Args:
        parameters: (name, elements, key) in the order in which their gradients become ready.
        num_shards: owners of the parameters with a key.
        max_numel: a bucket is closed before it would exceed this many elements; a larger parameter gets its own.

    Returns:
        Buckets in the order in which they become ready.
    """
    open_slots: dict[Hashable, list[Slot]] = {}
    closed: list[tuple[int, BucketLayout]] = []
    last: dict[Hashable, int] = {}

    def close(key: Hashable) -> None:
        closed.append((last[key], BucketLayout(key, tuple(open_slots.pop(key)), num_shards(key))))

    for position, (name, numel, key) in enumerate(parameters):
        slots = open_slots.get(key)
        if slots and _round_up(slots[-1].offset + slots[-1].numel, ALIGN) + numel > max_numel:
            close(key)
        slots = open_slots.setdefault(key, [])
        offset = _round_up(slots[-1].offset + slots[-1].numel, ALIGN) if slots else 0
        slots.append(Slot(name, numel, offset))
        last[key] = position
    for key in list(open_slots):
        close(key)
    return [layout for _, layout in sorted(closed, key=lambda item: item[0])]


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the row-major range ``[start, stop)`` of a tensor into hyper-rectangles: (offsets, sizes), in order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first_full, end_full = -(-start // row), stop // row
    if first_full > end_full:  # inside one row
        for offsets, sizes in boxes(shape[1:], start - end_full * row, stop - end_full * row):
            yield (end_full, *offsets), (1, *sizes)
        return
    for offsets, sizes in boxes(shape[1:], start - (first_full - 1) * row, row if start % row else 0):
        yield (first_full - 1, *offsets), (1, *sizes)
    if end_full > first_full:
        yield (first_full, *([0] * (len(shape) - 1))), (end_full - first_full, *shape[1:])
    for offsets, sizes in boxes(shape[1:], 0, stop % row):
        yield (end_full, *offsets), (1, *sizes)
