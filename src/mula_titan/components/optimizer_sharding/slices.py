"""A rank's contiguous piece of a flattened parameter, for checkpoints under the parameter's own name and shape."""

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mula_titan.components.optimizer_sharding.layout import boxes


class FlatSlice:
    """Elements ``[start, stop)`` of this rank's part of a parameter, presented to DCP as boxes of the full tensor.

    Implements the protocol ``torch.distributed._checkpointable._Checkpointable``, so DCP saves and reshards it like a
    DTensor. The boxes are views: loading writes straight into the optimizer's buffers.
    """

    def __init__(self, param: torch.Tensor, start: int, stop: int, values: torch.Tensor) -> None:
        """``values``: 1-D, contiguous, ``stop - start`` elements."""
        assert values.numel() == stop - start, (values.numel(), start, stop)
        self.shape = param.shape
        self.dtype = values.dtype
        self._range = (start, stop)
        self._values = values
        local_shape, origin = tuple(param.shape), (0,) * param.ndim
        if isinstance(param, DTensor):
            local_shape, origin = compute_local_shape_and_global_offset(
                param.shape, param.device_mesh, param.placements
            )
        self._shards: list[torch.Tensor] = []
        self._chunks: list[ChunkStorageMetadata] = []
        for offsets, sizes in boxes(tuple(local_shape), start, stop):
            position = sum(shard.numel() for shard in self._shards)
            view = values[position : position + _numel(sizes)].view(sizes)
            offsets = [a + b for a, b in zip(offsets, origin, strict=True)]
            self._shards.append(view)
            self._chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)))

    @torch.no_grad()
    def load(self, value: Any) -> None:
        """Take the elements from this slice itself (a no-op), a slice of the same range, or the parameter's value."""
        if value is self:
            return
        if isinstance(value, FlatSlice):
            assert value._range == self._range, (value._range, self._range)
            self._values.copy_(value._values)
            return
        local = value.to_local() if isinstance(value, DTensor) else value
        start, stop = self._range
        self._values.copy_(local.reshape(-1)[start:stop])

    def to(self, dtype: torch.dtype) -> "FlatSlice":
        """A converted copy."""
        copy = object.__new__(FlatSlice)
        copy.__dict__.update(self.__dict__)
        copy.dtype, copy._values = dtype, self._values.to(dtype)
        copy._shards = [shard.to(dtype) for shard in self._shards]
        return copy

    def is_floating_point(self) -> bool:
        """Whether the elements are floating-point numbers."""
        return self.dtype.is_floating_point

    def size(self) -> torch.Size:
        """Shape of the whole parameter."""
        return self.shape

    def untyped_storage(self) -> torch.UntypedStorage:
        """Storage of this rank's elements: torchtitan compares it to see whether a cached state is still current."""
        return self._values.untyped_storage()

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, i),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for i, chunk in enumerate(self._chunks)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for shard, chunk in zip(self._shards, self._chunks, strict=True):
            if chunk.offsets == index.offset:
                return shard
        raise ValueError(f"{index.fqn}: this rank has no elements at {tuple(index.offset or ())}")


def _numel(sizes: tuple[int, ...]) -> int:
    return torch.Size(sizes).numel()
