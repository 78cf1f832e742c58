"""A rank's contiguous piece of a flattened parameter, for checkpoints under the parameter's own name and shape."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mula_titan.components.optimizer_sharding.layout import boxes

aten = torch.ops.aten


class FlatSlice(torch.Tensor):
    """A tensor of a parameter's full shape, of which only elements ``[start, stop)`` of this rank's part are here.

    For checkpoints, not for arithmetic: it implements ``torch.distributed._checkpointable._Checkpointable``, so that
    DCP saves, stages and reshards it like a DTensor, as boxes of the full tensor. The boxes are views: loading writes
    straight into the optimizer's buffers.
    """

    values: torch.Tensor  # type: ignore[assignment]  # sparse tensors have a method of that name
    """1-D, the elements that are here."""
    start: int
    """Position of the first one in this rank's flattened part."""
    chunks: list[ChunkStorageMetadata]
    """The boxes, in the order of ``values``."""

    @staticmethod
    def __new__(
        cls, shape: torch.Size, start: int, chunks: list[ChunkStorageMetadata], values: torch.Tensor
    ) -> "FlatSlice":
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=values.dtype, device=values.device)
        self.values, self.start, self.chunks = values, start, chunks
        return self

    @classmethod
    def of(cls, param: torch.Tensor, start: int, values: torch.Tensor) -> "FlatSlice":
        """The slice of a parameter that begins at flat element ``start`` of this rank's part and has these values."""
        local_shape, origin = tuple(param.shape), (0,) * param.ndim
        if isinstance(param, DTensor):
            local_shape, origin = compute_local_shape_and_global_offset(
                param.shape, param.device_mesh, param.placements
            )
        chunks = [
            ChunkStorageMetadata(
                offsets=torch.Size(a + b for a, b in zip(offsets, origin, strict=True)), sizes=torch.Size(sizes)
            )
            for offsets, sizes in boxes(tuple(local_shape), start, start + values.numel())
        ]
        return cls(param.shape, start, chunks, values)

    @torch.no_grad()
    def load(self, value: torch.Tensor) -> None:
        """Take the elements from this slice itself (a no-op), a slice of the same range, or the parameter's value."""
        if value is self:
            return
        if isinstance(value, FlatSlice):
            assert (value.start, value.values.shape) == (self.start, self.values.shape)
            self.values.copy_(value.values)
            return
        local = value.to_local() if isinstance(value, DTensor) else value
        self.values.copy_(local.reshape(-1)[self.start : self.start + self.values.numel()])

    def pieces(self) -> Iterator[tuple[ChunkStorageMetadata, torch.Tensor]]:
        """The boxes and views of their values."""
        position = 0
        for chunk in self.chunks:
            numel = chunk.sizes.numel()
            yield chunk, self.values[position : position + numel].view(chunk.sizes)
            position += numel

    def untyped_storage(self) -> torch.UntypedStorage:
        """Storage of the elements: torchtitan compares it to see whether a cached state is still current."""
        return self.values.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlatSlice(shape={tuple(self.shape)}, start={self.start}, values={self.values})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        self = args[0]
        if func is aten.new_empty.default:  # DCP's staging, which then sets the attributes
            values = self.values.new_empty(0, dtype=kwargs.get("dtype"), device=kwargs.get("device"))
            return cls(torch.Size(args[1]), 0, [], values)
        if func in (aten._to_copy.default, aten.detach.default, aten.clone.default):
            return cls(self.shape, self.start, self.chunks, func(self.values, **kwargs))
        raise NotImplementedError(f"{func} of a FlatSlice: it holds a part of the tensor, for checkpoints only")

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, i),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for i, chunk in enumerate(self.chunks)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for chunk, view in self.pieces():
            if chunk.offsets == index.offset:
                return view
        raise ValueError(f"{index.fqn}: this rank has no elements at {tuple(index.offset or ())}")
