"""The files of a tokenised data set: token shards, their document offsets and one JSON index.

    FOLDER/shard-00000.tokens    token ids, headerless, little-endian, dtype of the index
    FOLDER/shard-00000.offsets   int64: document d is tokens [offsets[d], offsets[d + 1]) of the shard; it ends with EOS
    FOLDER/index.json            `DatasetIndex`; written last, so that a folder with an index is complete

A file appears under its name only when all of its bytes are on disk (temporary name, fsync, rename).
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

INDEX_NAME = "index.json"
FORMAT = "mula-titan-tokens/1"


@dataclass(kw_only=True, frozen=True)
class SourceRecord:
    """Where a shard's text came from: a whole input file or a part of one."""

    file: str
    """Name of the input file, relative to the input it was found under."""
    bytes: int
    """Size of the whole input file."""
    part: int
    """Which part of the file this shard holds, counted from 0 in file order."""
    parts: int
    """How many parts the file was cut into."""
    blake2b: str
    """Checksum of the text that was read from this part, decompressed, one newline after each document."""


@dataclass(kw_only=True, frozen=True)
class ShardRecord:
    """One shard as it stands in the index."""

    tokens_file: str
    offsets_file: str
    num_tokens: int
    num_documents: int
    max_token_id: int
    """-1 in a shard without documents."""
    tokens_bytes: int
    offsets_bytes: int
    tokens_blake2b: str
    offsets_blake2b: str
    empty_documents: int
    """Documents without text: left out of the shard."""
    source: SourceRecord


@dataclass(kw_only=True, frozen=True)
class DatasetIndex:
    """Content of index.json."""

    format: str
    dtype: str
    """`uint16` if every id of the vocabulary fits, else `uint32`; little-endian."""
    vocab_size: int
    """Largest id of the tokenizer + 1."""
    max_token_id: int
    """Largest id that occurs in the shards."""
    eos_id: int
    eos_token: str
    tokenizer_blake2b: str
    """Checksum of the bytes of tokenizer.json."""
    text_key: str
    num_tokens: int
    num_documents: int
    shards: list[ShardRecord]


def blake2b_of(path: Path) -> str:
    """Checksum of a file (BLAKE2b, 20 bytes, hexadecimal)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, new_hash).hexdigest()  # type: ignore[arg-type]


def new_hash() -> "hashlib.blake2b":
    """A fresh hash object of the kind that all checksums here use."""
    return hashlib.blake2b(digest_size=20)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a binary file that gets its name only if the block ends well, and then with all bytes on disk."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes the renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, record: Any) -> None:
    """Writes a dataclass as JSON, atomically."""
    with atomic_file(path) as file:
        file.write(json.dumps(asdict(record), indent=1, ensure_ascii=False).encode() + b"\n")


def parse_shard(data: dict[str, Any]) -> ShardRecord:
    """Reads a shard's record back from JSON. Raises KeyError or TypeError if it isn't one."""
    return ShardRecord(**{**data, "source": SourceRecord(**data["source"])})


def read_index(path: Path) -> DatasetIndex:
    """Reads an index.json.

    Raises:
        ValueError: not JSON, another format or version, or a field that is missing or unknown.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file ({error}); tokenise the data again") from None
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path}: format {found!r}, this version reads {FORMAT!r}; tokenise the data again")
    known = {field.name for field in fields(DatasetIndex)}
    if data.keys() != known:
        raise ValueError(f"{path}: missing or unknown fields {sorted(data.keys() ^ known)}; tokenise the data again")
    return DatasetIndex(**{**data, "shards": [parse_shard(shard) for shard in data["shards"]]})
