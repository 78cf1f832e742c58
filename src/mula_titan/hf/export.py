"""``mula-titan export``: a training checkpoint becomes a Hugging Face folder, one tensor in memory at a time."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.progress import Progress
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from tyro.conf import Positional, arg

from mula_titan.hf.adapter import check_expert_bias
from mula_titan.hf.checkpoint_info import read_checkpoint_info
from mula_titan.hf.description import check_description, write_description, write_json
from mula_titan.hf.layout import HFTensor, check_tensors, hf_tensors, native_shapes
from mula_titan.hf.names import EMBEDDING, HEAD, is_expert_bias, is_model_key
from mula_titan.hf.output_folder import check_target, complete_folder
from mula_titan.hf.safetensors_file import SafetensorsFile
from mula_titan.model.args import MulaArgs

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(kw_only=True)
class ExportOptions:
    """Write a training checkpoint as a Hugging Face folder that transformers loads."""

    checkpoint: Positional[Annotated[Path, arg(metavar="CHECKPOINT")]]
    """Checkpoint folder, for example outputs/checkpoint/step-1000."""

    output: Positional[Annotated[Path, arg(metavar="DIR")]]
    """Folder to write; it appears only when it is complete."""

    dtype: Literal["bfloat16", "float32", "keep"] = "bfloat16"
    """Data type of the weights, or "keep" that of the checkpoint."""

    shard_gb: float = 5.0
    """Largest size of a safetensors file, in units of 10^9 bytes; a single larger tensor gets a file of its own."""

    tokenizer: Path | None = None
    """Folder of the tokenizer; by default the one that the checkpoint names."""

    drop_expert_bias: bool = False
    """Leave out balancing biases that aren't zero, though the exported model then chooses other experts."""

    overwrite: bool = False
    """Replace an earlier export at the same place."""


class _Checkpoint:
    """Model tensors of a DCP folder, read one at a time in this process alone.

    Args:
        folder: a DCP folder; whatever it holds beside the model is named in ``others``.

    Raises:
        ValueError: no complete checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / ".metadata").is_file():
            raise ValueError(_no_checkpoint(folder))
        self._reader = _MetadataOnceReader(folder)
        stored = self._reader.read_metadata().state_dict_metadata
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self.others: set[str] = set()
        for key, entry in stored.items():
            if is_model_key(key) and isinstance(entry, TensorStorageMetadata):
                self.tensors[key] = entry
            else:
                self.others.add(key.partition(".")[0])
        torn = [key for key, entry in self.tensors.items() if _stored_elements(entry) != entry.size.numel()]
        if torn:
            raise ValueError(f"{folder} is incomplete: parts of {torn} were never saved. Use another checkpoint.")

    def load(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole tensor on the CPU, in its stored dtype or another."""
        entry = self.tensors[key]
        tensor = torch.empty(entry.size, dtype=dtype or entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what no_dist asks for
            dcp.load({key: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


class _MetadataOnceReader(FileSystemReader):
    """Reads the metadata once: that of a large run takes seconds, and every tensor is a load of its own."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Metadata of the checkpoint."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


def _stored_elements(entry: TensorStorageMetadata) -> int:
    return sum(chunk.sizes.numel() for chunk in entry.chunks)


def _no_checkpoint(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} doesn't exist. Name a checkpoint folder such as outputs/checkpoint/step-1000."
    inside = sorted(str(path.parent) for path in folder.glob("**/.metadata"))
    hint = f"Did you mean {inside[-1]}?" if inside else "It must hold a file .metadata, written last."
    return f"{folder} is no complete checkpoint. {hint}"


def export(options: ExportOptions) -> Path:
    """Export a checkpoint as safetensors, ``config.json``, ``generation_config.json`` and tokenizer files.

    Every model tensor of the checkpoint is consumed and every tensor that transformers expects is written. Memory stays
    near the largest native tensor (all experts' w1, w2 or w3 of one layer).

    Returns:
        The written folder.

    Raises:
        ValueError: no complete checkpoint, tensors that don't fit the described model, a model that transformers can't
            represent, a balancing bias without ``drop_expert_bias``, a wrong tokenizer or an occupied output folder.
    """
    if options.shard_gb <= 0:
        raise ValueError(f"shard_gb = {options.shard_gb}: must be positive")
    check_target(options.output, overwrite=options.overwrite, marker="config.json")
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    checkpoint = _Checkpoint(options.checkpoint)
    info = read_checkpoint_info(options.checkpoint)
    tokenizer = options.tokenizer or (Path(info.hf_assets_path) if info.hf_assets_path else None)
    if tokenizer is None:
        console.print("The checkpoint names no tokenizer, so none is exported. Add one with --tokenizer FOLDER.")
    check_description(info.args, tokenizer)
    tensors = hf_tensors(info.args)
    _check(checkpoint, info.args, options)
    dtypes = {n: _DTYPES.get(options.dtype, entry.properties.dtype) for n, entry in checkpoint.tensors.items()}
    files = _split_into_files(tensors, dtypes, limit=int(options.shard_gb * 1e9))

    with complete_folder(options.output) as folder:
        _write_weights(folder, checkpoint, files, dtypes, console)
        write_description(folder, info.args, tokenizer, dtypes[EMBEDDING])
    count = sum(map(len, files.values()))
    console.print(f"{options.output}: {count} tensors in {len(files)} files")
    if checkpoint.others:
        console.print(f"Not exported, since they are no part of the model: {', '.join(sorted(checkpoint.others))}")
    return options.output


def _check(checkpoint: _Checkpoint, args: MulaArgs, options: ExportOptions) -> None:
    """Everything that must hold of the stored tensors before any is written."""
    expected = native_shapes(args)
    # An imported checkpoint brings zero biases, whether the run balances by them or not.
    expected |= {key: torch.Size([args.num_experts]) for key in checkpoint.tensors if is_expert_bias(key)}
    check_tensors({key: entry.size for key, entry in checkpoint.tensors.items()}, expected, str(options.checkpoint))
    if not options.drop_expert_bias:
        for key in filter(is_expert_bias, checkpoint.tensors):
            check_expert_bias(key, checkpoint.load(key))
    if args.tie_embeddings and not torch.equal(checkpoint.load(EMBEDDING), checkpoint.load(HEAD)):
        raise ValueError(
            f"{options.checkpoint}: model.tie_embeddings is true, but {EMBEDDING} and {HEAD} differ. "
            "The checkpoint's model_args.json is that of another run."
        )


def _split_into_files(
    tensors: dict[str, list[HFTensor]], dtypes: dict[str, torch.dtype], limit: int
) -> dict[str, list[HFTensor]]:
    """Assign tensors, in order, to files of at most ``limit`` bytes."""
    groups: list[list[HFTensor]] = []
    room = 0
    for native, parts in tensors.items():
        for tensor in parts:
            size = tensor.shape.numel() * dtypes[native].itemsize
            if not groups or size > room:
                groups.append([])
                room = limit
            groups[-1].append(tensor)
            room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def _write_weights(
    folder: Path,
    checkpoint: _Checkpoint,
    files: dict[str, list[HFTensor]],
    dtypes: dict[str, torch.dtype],
    console: Console,
) -> None:
    values = _read_in_order([tensor for group in files.values() for tensor in group], checkpoint, dtypes)
    sizes = {name: sum(t.shape.numel() * dtypes[t.native].itemsize for t in group) for name, group in files.items()}
    with Progress(console=console) as progress:
        bar = progress.add_task("Exporting", total=sum(sizes.values()))
        for file_name, group in files.items():
            with SafetensorsFile(folder / file_name, {t.name: (dtypes[t.native], t.shape) for t in group}) as file:
                for tensor in group:
                    value = next(values)
                    file.write(tensor.name, value)
                    progress.advance(bar, value.nbytes)
    if len(files) > 1:
        weight_map = {tensor.name: file_name for file_name, group in files.items() for tensor in group}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def _read_in_order(
    tensors: list[HFTensor], checkpoint: _Checkpoint, dtypes: dict[str, torch.dtype]
) -> Iterator[torch.Tensor]:
    """Values of Hugging Face tensors in the given order; experts of one native tensor follow each other: one read."""
    native, whole = None, torch.empty(0)
    for tensor in tensors:
        if tensor.native != native:
            del whole  # before the next one is allocated
            native, whole = tensor.native, checkpoint.load(tensor.native, dtypes[tensor.native])
        yield whole if tensor.expert is None else whole[tensor.expert]
