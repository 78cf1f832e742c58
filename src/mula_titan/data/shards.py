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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

INDEX_NAME = "index.json"
FORMAT = "mula-titan-tokens/1"


@dataclass(kw_only=True, frozen=True)
class SourceRecord:
    """One input file."""

    file: str
    """Name below the common folder of all inputs."""
    bytes: int
    blake2b: str


@dataclass(kw_only=True, frozen=True)
class Recipe:
    """What the shards were made from: the same recipe gives the same bytes."""

    dtype: str
    """`uint16` if every id of the vocabulary fits, else `uint32`; little-endian."""
    vocab_size: int
    """Largest id of the tokenizer + 1."""
    eos_id: int
    eos_token: str
    tokenizer_blake2b: str
    """Checksum of the bytes of tokenizer.json."""
    text_key: str
    part_mb: int
    sources: list[SourceRecord]


@dataclass(kw_only=True, frozen=True)
class ShardRecord:
    """One shard: the documents of one input file, or of a part of it."""

    tokens_file: str
    offsets_file: str
    num_tokens: int
    num_documents: int
    empty_documents: int
    """Documents without text, which the shard leaves out."""
    max_token_id: int
    """-1 in a shard without documents."""
    tokens_bytes: int
    offsets_bytes: int
    tokens_blake2b: str
    offsets_blake2b: str
    source: str
    """Name of the input file."""
    part: int
    """Which part of the file, from 0."""
    parts: int
    """How many parts the file was cut into."""


@dataclass(kw_only=True, frozen=True)
class DatasetIndex:
    """Content of index.json."""

    format: str
    recipe: Recipe
    num_tokens: int
    num_documents: int
    max_token_id: int
    """Largest id that occurs."""
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


def parse_recipe(data: dict[str, Any]) -> Recipe:
    """Reads a recipe back from JSON. Raises KeyError or TypeError if it isn't one."""
    return Recipe(**{**data, "sources": [SourceRecord(**source) for source in data["sources"]]})


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
    try:
        recipe, shards = parse_recipe(data["recipe"]), [ShardRecord(**shard) for shard in data["shards"]]
        return DatasetIndex(**{**data, "recipe": recipe, "shards": shards})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: missing or unknown field ({error}); tokenise the data again") from None
