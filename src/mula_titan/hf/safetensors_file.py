"""Writes a safetensors file one tensor at a time; the library's own writer wants the whole file's tensors in memory.

Format: 8 bytes header length (little-endian), JSON header, then the raw row-major data of each tensor in turn.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


class SafetensorsFile:
    """A safetensors file of known layout, to be filled in order; a context manager.

    Args:
        path: file to create.
        layout: dtype and shape of every tensor, in the order of the writes.
    """

    def __init__(self, path: Path, layout: Mapping[str, tuple[torch.dtype, torch.Size]]) -> None:
        header: dict = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, (dtype, shape) in layout.items():
            end = offset + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data starts 8-byte aligned
        self._pending = list(layout.items())[::-1]
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append a contiguous CPU tensor.

        Raises:
            ValueError: not the next name, dtype and shape of the layout.
        """
        expected = self._pending.pop() if self._pending else None
        if expected != (name, (tensor.dtype, tensor.shape)):
            raise ValueError(f"next tensor must be {expected}, not {name} {tensor.dtype} {tuple(tensor.shape)}")
        self._file.write(tensor.view(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None and self._pending:
            raise ValueError(f"tensors never written: {[name for name, _ in self._pending[::-1]]}")
