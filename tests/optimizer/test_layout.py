"""The arithmetic of buckets and boxes."""

import itertools
import math

import torch

from mula_titan.components.optimizer_sharding.layout import ALIGN, boxes, plan_buckets
from mula_titan.components.optimizer_sharding.slices import FlatSlice


def test_boxes_cover_every_range_in_order() -> None:
    for shape in [(), (1,), (5,), (3, 4), (2, 3, 2), (1, 1, 3), (4, 1, 2), (2, 2, 2, 3)]:
        numel = math.prod(shape)
        index = torch.arange(numel).reshape(shape)
        for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
            found = list(boxes(shape, start, stop))
            parts = [
                index[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten()
                for offsets, sizes in found
            ]
            assert all(part.numel() for part in parts)
            got = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)
            assert got.tolist() == list(range(start, stop)), (shape, start, stop)
            assert len(found) <= max(1, 2 * len(shape) - 1)


def test_buckets_hold_every_parameter_once_aligned_and_in_even_shards() -> None:
    sizes = [5, 64, 1000, 1, 300, 0, 77, 640]
    parameters = [(f"p{i}", n, ("a", "b", "c")[i % 3]) for i, n in enumerate(sizes)]
    ranks = {"a": 3, "b": 1, "c": 8}
    layouts = plan_buckets(parameters, ranks.__getitem__, max_numel=1100)
    assert sorted(slot.name for layout in layouts for slot in layout.slots) == [name for name, _, _ in parameters]
    key_of = {name: key for name, _, key in parameters}
    order = []
    for layout in layouts:
        assert layout.num_shards == ranks[layout.key]
        assert layout.numel == layout.num_shards * layout.shard_numel
        assert layout.shard_numel % ALIGN == 0
        end = 0
        for slot in layout.slots:
            assert key_of[slot.name] == layout.key
            assert slot.offset % ALIGN == 0 and slot.offset >= end
            end = slot.offset + slot.numel
            covered = [slot.owned(rank, layout.shard_numel) for rank in range(layout.num_shards)]
            assert [i for start, stop in covered for i in range(start, stop)] == list(range(slot.numel))
        assert end <= layout.numel < end + layout.num_shards * ALIGN + 1
        assert len(layout.slots) == 1 or end <= 1100
        order.append(max(int(slot.name[1:]) for slot in layout.slots))
    assert order == sorted(order)  # a bucket is ready with its last gradient
    # p1 (64) and p4 (300) share a bucket, p7 (640) fits too; p0 (5) and p3 (1) with p6 (77).
    assert [[s.name for s in layout.slots] for layout in layouts] == [
        ["p2", "p5"],
        ["p0", "p3", "p6"],
        ["p1", "p4", "p7"],
    ]


def test_slice_takes_its_part_of_a_whole_tensor() -> None:
    param, values = torch.arange(24.0).reshape(2, 3, 4), torch.zeros(9)
    piece = FlatSlice.of(param, 5, values)
    assert piece.size() == param.size()
    piece.load(param)
    assert values.tolist() == list(range(5, 14))
    places = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in piece.chunks]
    assert places == [((0, 1, 1), (1, 1, 3)), ((0, 2, 0), (1, 1, 4)), ((1, 0, 0), (1, 1, 2))]
    assert piece.to(torch.bfloat16).values.dtype == torch.bfloat16
