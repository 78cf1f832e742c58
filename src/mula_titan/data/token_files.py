"""Reads token files of three kinds as one long array of tokens: `mula-titan tokenize` shards, .npy, headerless raw.

Shape suffixes: S = seq_len + 1 tokens of a window (L inputs and the last target).
"""

from dataclasses import dataclass
from functools import cached_property
from glob import glob, has_magic
from pathlib import Path

import numpy as np

from mula_titan.data.shards import INDEX_NAME, DatasetIndex, read_index

NPY_MAGIC = b"\x93NUMPY"
RAW_SUFFIXES = (".npy", ".bin", ".tokens")
PROBE_TOKENS = 4096


@dataclass
class TokenFile:
    """One file of token ids, mapped into memory when first read."""

    path: Path
    dtype: np.dtype
    header_bytes: int
    num_tokens: int
    offsets_path: Path | None
    """File with the int64 document offsets; None: documents end at the end-of-document id."""

    @cached_property
    def tokens(self) -> np.ndarray:
        """(num_tokens,) of `dtype`, read-only."""
        return np.memmap(self.path, self.dtype, mode="r", offset=self.header_bytes, shape=(self.num_tokens,))

    @cached_property
    def offsets(self) -> np.ndarray:
        """(num_documents + 1,) int64, read-only; needs `offsets_path`."""
        assert self.offsets_path is not None
        return np.memmap(self.offsets_path, np.dtype("<i8"), mode="r")


class TokenFiles:
    """The files of one source, one after another, as an array of `num_tokens` token ids.

    Args:
        path: A folder that `mula-titan tokenize` wrote (or its index.json), a token file, a folder of token files
            (.npy, .bin; sub-folders too, in name order) or a glob pattern of any of these.
        dtype: Of headerless files, e.g. "uint16"; empty for files that say it themselves.
        eos_id: End-of-document id of files without document offsets; None: such a file is one document.
        vocab_size: Rows of the embedding table: every id must be smaller.

    Raises:
        ValueError: nothing found, an empty file, a size or header that doesn't fit the dtype, ids past `vocab_size`.
    """

    def __init__(self, path: str, *, dtype: str = "", eos_id: int | None, vocab_size: int):
        self.name = path
        self.eos_id = eos_id
        self.vocab_size = vocab_size
        self.indexes: list[DatasetIndex] = []
        self.files: list[TokenFile] = []
        for place in _expand(path):
            if place.name == INDEX_NAME:
                self._add_shards(place, dtype)
            else:
                self.files.append(_open_raw(place, dtype))
        sizes = [file.num_tokens for file in self.files]
        self.starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        """(files + 1,) int64: where each file begins in the whole array; the last entry is `num_tokens`."""
        self.num_tokens = int(self.starts[-1])
        if self.num_tokens == 0:
            raise ValueError(f"{path}: holds no tokens")
        first = next(file for file in self.files if file.num_tokens)
        if first.offsets_path is None:
            self._probe(first)

    def _add_shards(self, place: Path, dtype: str) -> None:
        index = read_index(place)
        if dtype and np.dtype(dtype) != np.dtype(index.recipe.dtype):
            raise ValueError(f"{place}: holds {index.recipe.dtype}, not {dtype}; leave `dtype` out, the index has it")
        if index.max_token_id >= self.vocab_size:
            raise ValueError(
                f"{place}: token id {index.max_token_id} doesn't fit the model's "
                f"{self.vocab_size} embedding rows; use the tokenizer that belongs to the model or raise vocab_size"
            )
        if self.eos_id is not None and index.recipe.eos_id != self.eos_id:
            raise ValueError(
                f"{place}: tokenised with end-of-document id {index.recipe.eos_id} ({index.recipe.eos_token}), "
                f"the run's tokenizer has {self.eos_id}; use the same tokenizer for both"
            )
        item_dtype = np.dtype(index.recipe.dtype).newbyteorder("<")
        for shard in index.shards:
            file = TokenFile(
                place.parent / shard.tokens_file, item_dtype, 0, shard.num_tokens, place.parent / shard.offsets_file
            )
            sizes = {shard.tokens_file: shard.tokens_bytes, shard.offsets_file: shard.offsets_bytes}
            for name, expected in sizes.items():
                part = place.parent / name
                found = part.stat().st_size if part.exists() else None
                if found != expected:
                    what = "is missing" if found is None else f"has {found} bytes"
                    raise ValueError(f"{part}: {what}, {place} says {expected} bytes; copy or tokenise the data again")
            self.files.append(file)
        self.indexes.append(index)

    def _probe(self, file: TokenFile) -> None:
        """Refuses a raw file whose first tokens show that it was written with another dtype."""
        head = np.asarray(file.tokens[:PROBE_TOKENS])
        self.check_ids(head, 0)
        # Little-endian 32-bit ids read as 16-bit ones: each second number is a high half, as small as the vocabulary's.
        pairs = head[: len(head) // 2 * 2].reshape(-1, 2)
        highest = (self.vocab_size - 1) >> 16
        if file.dtype.itemsize == 2 and len(pairs) >= 16 and pairs[:, 1].max() <= highest < pairs[:, 0].max():
            raise ValueError(
                f"{file.path}: every second number is at most {highest} when read as {file.dtype.name}, as if "
                'the file held 32-bit ids; set dtype = "uint32"'
            )

    def check_ids(self, ids: np.ndarray, start: int) -> None:
        """Raises ValueError, naming file, place and value, if an id of tokens [start, start + len(ids)) has no row."""
        low, high = int(ids.min()), int(ids.max())
        if low >= 0 and high < self.vocab_size:
            return
        place = start + int(np.flatnonzero((ids < 0) | (ids >= self.vocab_size))[0])
        file, local = self.locate(place)
        raise ValueError(
            f"{file.path}: token id {ids[place - start]} at token {local} is outside [0, {self.vocab_size}), "
            f"the rows of the embedding table; it was read as {file.dtype.name}: check its dtype, "
            "and that the data was made with this model's tokenizer"
        )

    def locate(self, position: int) -> tuple[TokenFile, int]:
        """File and token index within it of a position in the whole array."""
        i = int(np.searchsorted(self.starts, position, side="right")) - 1
        return self.files[i], position - int(self.starts[i])

    def read(self, start: int, tokens_S: np.ndarray, is_start_S: np.ndarray) -> int:
        """Copies tokens [start, start + S) and marks those that begin a document.

        Args:
            start: Position in the whole array, int of any size.
            tokens_S: (S,) int64, filled from its beginning.
            is_start_S: (S,) bool, all False; set True at first tokens of documents (the first token of a raw file too).

        Returns:
            How many tokens there were: less than S only at the end of the array.
        """
        stop = min(start + len(tokens_S), self.num_tokens)
        at = start
        while at < stop:
            file, local = self.locate(at)
            count = min(stop - at, file.num_tokens - local)
            out = slice(at - start, at - start + count)
            tokens_S[out] = file.tokens[local : local + count]
            if file.offsets_path is not None:
                first, last = np.searchsorted(file.offsets, (local, local + count))
                is_start_S[file.offsets[first:last] - local + out.start] = True
            else:
                is_start_S[out.start] = local == 0 or (
                    self.eos_id is not None and file.tokens[local - 1] == self.eos_id
                )
                if self.eos_id is not None:
                    is_start_S[out.start + 1 : out.stop] = tokens_S[out.start : out.stop - 1] == self.eos_id
            at += count
        self.check_ids(tokens_S[: stop - start], start)
        return stop - start


def _expand(path: str) -> list[Path]:
    """The index files and token files that a path, folder or pattern stands for, in name order."""
    matches = sorted(Path(match) for match in glob(path, recursive=True)) if has_magic(path) else [Path(path)]
    places: list[Path] = []
    for match in matches:
        if not match.exists():
            raise ValueError(f"{match}: no such file or folder")
        if not match.is_dir():
            places.append(match)
        elif (match / INDEX_NAME).exists():
            places.append(match / INDEX_NAME)
        elif list(match.glob("shard-*")):
            raise ValueError(f"{match}: has shards but no {INDEX_NAME}: tokenising was not finished; run it again")
        else:
            places += sorted(file for file in match.rglob("*") if file.suffix in RAW_SUFFIXES)
    if not places:
        raise ValueError(f"{path}: no token files here; `mula-titan tokenize` makes them from text")
    return places


def _open_raw(path: Path, dtype: str) -> TokenFile:
    """Opens a .npy with a NumPy header, or a headerless file of the given dtype."""
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path}: empty file")
    with path.open("rb") as file:
        has_header = file.read(len(NPY_MAGIC)) == NPY_MAGIC
    if has_header:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, item_dtype = read(file)
            header_bytes = file.tell()
        if len(shape) != 1 or item_dtype.kind not in "iu":
            raise ValueError(f"{path}: holds {item_dtype} of shape {shape}, not one row of integer token ids")
        if dtype and np.dtype(dtype) != item_dtype:
            raise ValueError(f"{path}: its NumPy header says {item_dtype}, not {dtype}; leave `dtype` out")
        num_tokens = shape[0]
        if header_bytes + num_tokens * item_dtype.itemsize != size:
            raise ValueError(f"{path}: {size} bytes don't hold the {num_tokens} tokens of its header; copy it again")
    else:
        if not dtype:
            raise ValueError(
                f'{path}: has no NumPy header; say what it holds, e.g. dtype = "uint16" in [[dataloader.sources]]'
            )
        item_dtype, header_bytes = np.dtype(dtype).newbyteorder("<"), 0
        num_tokens, rest = divmod(size, item_dtype.itemsize)
        if rest:
            raise ValueError(f"{path}: {size} bytes are no whole number of {dtype} tokens; is that its dtype?")
    if num_tokens == 0:
        raise ValueError(f"{path}: holds no tokens")
    return TokenFile(path, item_dtype, header_bytes, num_tokens, None)
