"""``mula-titan import``: an OLMo or OLMoE folder becomes a checkpoint that training starts from, streamed.

DCP asks its save planner for each piece of data only when it writes it. The planner here declares every tensor of the
Hugging Face files as one chunk of a native tensor (each expert a slice of the stacked one) and reads it at that moment,
so neither the model nor a layer is ever whole in memory.
"""

import json
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from tyro.conf import Positional, arg

from mula_titan.hf.checkpoint_info import write_checkpoint_info
from mula_titan.hf.hf_config import changes_from_flavor, from_hf_config
from mula_titan.hf.layout import HFTensor, check_tensors, hf_tensors, native_shapes
from mula_titan.hf.names import EMBEDDING, HEAD, is_computed, is_expert_bias
from mula_titan.hf.output_folder import check_target, complete_folder
from mula_titan.hf.safetensors_file import DTYPE_NAMES

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(kw_only=True)
class ImportOptions:
    """Turn a Hugging Face OLMo or OLMoE folder into a checkpoint that training starts from."""

    source: Positional[Annotated[Path, arg(metavar="HF_DIR")]]
    """Folder with config.json and safetensors files."""

    checkpoint: Positional[Annotated[Path, arg(metavar="CHECKPOINT")]]
    """Checkpoint folder to write. A run with dump folder outputs finds outputs/checkpoint/step-0 by itself; one
    elsewhere is named to it by its absolute path, checkpoint.initial_load_path."""

    overwrite: bool = False
    """Replace an earlier checkpoint at the same place."""


class _HFFiles:
    """Tensors of the safetensors files of a folder; headers are read at once, values on demand.

    Args:
        folder: holds ``model.safetensors``, or several files and ``model.safetensors.index.json``.
        stack: closes the files.

    Raises:
        ValueError: no or broken files, a tensor in two files, or an index that doesn't match the files.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        index_path = folder / "model.safetensors.index.json"
        weight_map = _read_json(index_path)["weight_map"] if index_path.is_file() else None
        file_names = sorted(set(weight_map.values())) if weight_map else ["model.safetensors"]
        self._files: dict[str, Any] = {}
        for file_name in file_names:
            try:
                file = stack.enter_context(safe_open(folder / file_name, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"can't read {folder / file_name}: {error}") from error
            for name in file.keys():  # noqa: SIM118 - the file object isn't iterable
                if name in self._files:
                    raise ValueError(f"{folder}: {name} is in two files. Delete files that the index doesn't name.")
                self._files[name] = file
        if weight_map is not None and weight_map.keys() != self._files.keys():
            differing = sorted(weight_map.keys() ^ self._files.keys())
            raise ValueError(f"{index_path} and the files disagree about {differing[:10]}: download or export again.")

    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every tensor but those that the model computes itself."""
        return {
            name: torch.Size(file.get_slice(name).get_shape())
            for name, file in self._files.items()
            if not is_computed(name)
        }

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor."""
        stored = self._files[name].get_slice(name).get_dtype()
        if stored not in _DTYPES:
            raise ValueError(f"{name} has dtype {stored}; only {', '.join(_DTYPES)} can be imported")
        return _DTYPES[stored]

    def read(self, name: str) -> torch.Tensor:
        """Value of a tensor."""
        return self._files[name].get_tensor(name)


class _StreamingPlanner(DefaultSavePlanner):
    """Saves tensors that are read from Hugging Face files at the moment when they are written.

    Args:
        files: source.
        shapes: shape of every native tensor.
        parts: Hugging Face tensors of each native tensor; a tensor without parts is saved as float32 zeros.
        progress: shows the bytes written.
    """

    def __init__(
        self, files: _HFFiles, shapes: dict[str, torch.Size], parts: dict[str, list[HFTensor]], progress: Progress
    ) -> None:
        super().__init__()
        self._source = files
        self._items: list[WriteItem] = []
        self._parts: dict[MetadataIndex, HFTensor | None] = {}
        for native, shape in shapes.items():
            dtypes = {files.dtype(part.name) for part in parts[native]} or {torch.float32}
            if len(dtypes) > 1:
                raise ValueError(f"the parts of {native} have several dtypes: {sorted(map(str, dtypes))}")
            sources: list[HFTensor | None] = [*parts[native]] or [None]
            for part in sources:
                self._add(native, shape, dtypes.copy().pop(), part)
        self._progress = progress
        self._bar = progress.add_task("Importing", total=sum(self._nbytes(item) for item in self._items))

    def _add(self, native: str, shape: torch.Size, dtype: torch.dtype, part: HFTensor | None) -> None:
        expert = part.expert if part is not None else None
        offsets = torch.Size([expert or 0] + [0] * (len(shape) - 1))
        sizes = shape if expert is None else torch.Size([1, *shape[1:]])
        index = MetadataIndex(native, offsets)
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=dtype), shape)
        self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self._parts[index] = part

    @staticmethod
    def _nbytes(item: WriteItem) -> int:
        assert item.tensor_data is not None
        return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize

    def create_local_plan(self) -> SavePlan:
        """One write for each Hugging Face tensor."""
        self.plan = SavePlan(self._items, planner_data={item.index.fqn: (item.index.fqn,) for item in self._items})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Read the tensor that a write needs."""
        assert write_item.tensor_data is not None
        self._progress.advance(self._bar, self._nbytes(write_item))
        part = self._parts[write_item.index]
        sizes = write_item.tensor_data.chunk.sizes
        return torch.zeros(sizes) if part is None else self._source.read(part.name).view(sizes)


def import_checkpoint(options: ImportOptions) -> Path:
    """Import OLMo or OLMoE weights as a model-only DCP checkpoint, in the dtype that they are stored in.

    Loading casts to the run's dtype. MoE checkpoints also get balancing biases of zero, so that a run may balance with
    or without them. No tensor is lost or left over.

    Returns:
        The written checkpoint folder.

    Raises:
        ValueError: unsupported settings in ``config.json`` (with value and reason), unreadable files, tensors missing,
            left over or of another shape than the configuration says, or an occupied checkpoint folder.
    """
    check_target(options.checkpoint, overwrite=options.overwrite, marker=".metadata")
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    args = from_hf_config(_read_json(options.source / "config.json"))
    # With a rate, the model has the biases.
    shapes = native_shapes(replace(args, expert_bias_rate=1.0))
    parts = hf_tensors(args) | {native: [] for native in shapes if is_expert_bias(native)}
    expected = {part.name: part.shape for group in parts.values() for part in group}
    with ExitStack() as stack, complete_folder(options.checkpoint) as folder:
        files = _HFFiles(options.source, stack)
        found = files.shapes()
        if args.tie_embeddings:
            parts[HEAD] = [replace(part, native=HEAD) for part in parts[EMBEDDING]]
            if HEAD in found and torch.equal(files.read(HEAD), files.read(parts[EMBEDDING][0].name)):
                del found[HEAD]  # some checkpoints store the tied matrix twice
        check_tensors(found, expected, str(options.source))
        with Progress(console=console) as progress, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what no_dist asks for
            planner = _StreamingPlanner(files, shapes, parts, progress)
            dcp.save({}, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
        has_tokenizer = (options.source / "tokenizer.json").is_file()
        write_checkpoint_info(folder, args, str(options.source) if has_tokenizer else None)
    settings = " ".join(f"--model.{name} {json.dumps(value)}" for name, value in changes_from_flavor(args).items())
    console.print(f"{options.checkpoint}: train it with --model.flavor {args.flavor} {settings}".rstrip())
    return options.checkpoint


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing. Name the folder of a Hugging Face model.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no valid JSON: {error}") from error
