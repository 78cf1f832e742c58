"""Reads documents out of text files: JSON lines, Parquet, plain text; plain, .gz or .zst.

A file is cut into parts, read independently: JSON lines by bytes, Parquet by row groups, others not at all.
"""

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

JSON_LINES = (".jsonl", ".json")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
SUFFIXES = (*JSON_LINES, ".txt", ".parquet")
BLOCK_BYTES = 1 << 22
SURROGATE = re.compile("[\ud800-\udfff]")

Piece = tuple[str, bool]
"""A document or a piece of a long one, and whether the document ends with it."""


@dataclass(frozen=True)
class Part:
    """A part of a file: one unit of work, one shard."""

    path: Path
    name: str
    """The file's name in messages and in the index."""
    number: int
    count: int
    """Number of parts of the file."""
    start: int
    stop: int
    """JSON lines: the lines that begin at bytes [start, stop). Parquet: row groups [start, stop). Else unused."""


def suffixes_of(path: Path) -> tuple[str, str]:
    """(kind, compression) of a file name, e.g. (".jsonl", ".gz"); compression may be empty."""
    if path.suffix in COMPRESSIONS:
        return path.with_suffix("").suffix, path.suffix
    return path.suffix, ""


def is_text_file(path: Path) -> bool:
    """Whether the name says that `read_documents` can read the file."""
    kind, compression = suffixes_of(path)
    return kind in SUFFIXES and not (kind == ".parquet" and compression)


def cut_into_parts(path: Path, name: str, part_bytes: int) -> list[Part]:
    """Cuts a file into parts of about `part_bytes`: the same file always into the same parts."""
    kind, compression = suffixes_of(path)
    if kind in JSON_LINES and not compression:
        bounds = [*range(0, path.stat().st_size, part_bytes)] or [0]
        bounds.append(path.stat().st_size)
    elif kind == ".parquet":
        groups = _parquet(path).metadata
        bounds, filled = [0], 0
        for i in range(groups.num_row_groups):
            filled += groups.row_group(i).total_byte_size
            if filled >= part_bytes:
                bounds.append(i + 1)
                filled = 0
        if bounds[-1] != groups.num_row_groups or len(bounds) == 1:
            bounds.append(groups.num_row_groups)
    else:
        bounds = [0, 0]
    spans = list(pairwise(bounds))
    return [Part(path, name, i, len(spans), start, stop) for i, (start, stop) in enumerate(spans)]


def read_documents(part: Part, text_key: str, on_bytes: Callable[[int], None]) -> Iterator[Piece]:
    """Yields the documents of a part in file order; holds one block or one document in memory.

    Args:
        part: What to read.
        text_key: Field or column that holds the text; not used for .txt, where the file is the document.
        on_bytes: Told how many bytes of the file were used up, again and again.

    Raises:
        ValueError: a line that isn't a JSON object with text in `text_key`, bytes that aren't UTF-8, a damaged file.
    """
    kind, _ = suffixes_of(part.path)
    try:
        if kind == ".parquet":
            yield from _read_parquet(part, text_key, on_bytes)
        elif kind == ".txt":
            yield from _read_text(part, on_bytes)
        else:
            yield from _read_json_lines(part, text_key, on_bytes)
    except OSError as error:  # pyarrow's word for damaged or truncated data
        raise ValueError(f"{part.path}: cannot be read to its end ({error})") from error


def _open(path: Path, raw: io.BufferedReader) -> io.BufferedReader:
    """The decompressed bytes; pyarrow, unlike other readers, doesn't take a truncated stream for a complete one."""
    compression = suffixes_of(path)[1]
    if not compression:
        return raw
    return io.BufferedReader(pa.CompressedInputStream(raw, COMPRESSIONS[compression]), BLOCK_BYTES)


def _read_json_lines(part: Part, text_key: str, on_bytes: Callable[[int], None]) -> Iterator[Piece]:
    with part.path.open("rb") as raw:
        if part.start:
            raw.seek(part.start - 1)
            raw.readline()  # the line that begins in the part before, or just its newline
        first = at = raw.tell()
        compressed = bool(suffixes_of(part.path)[1])
        for number, line in enumerate(_open(part.path, raw), start=1):
            if not compressed and at >= part.stop:
                break
            end = raw.tell() if compressed else at + len(line)
            on_bytes(end - at)
            at = end
            if line.strip():
                try:
                    yield _text_of(line, text_key), True
                except ValueError as error:
                    raise ValueError(f"{part.path}, line {_lines_before(part.path, first) + number}: {error}") from None


def _text_of(line: bytes, text_key: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object with a field {text_key!r}")
    text = record.get(text_key)
    if isinstance(text, str):
        # JSON can hold half a surrogate pair, which no tokenizer takes: it becomes U+FFFD.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if SURROGATE.search(text) else text
    if text_key in record:
        raise ValueError(f"field {text_key!r} holds {type(text).__name__}, not text")
    raise ValueError(f"no field {text_key!r}; there are {sorted(record)}: set text_key to the one with the text")


def _lines_before(path: Path, offset: int) -> int:
    """Number of newlines in the first `offset` bytes; only needed for messages."""
    lines = 0
    with path.open("rb") as raw:
        while offset > 0 and (block := raw.read(min(offset, BLOCK_BYTES))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines


def _read_text(part: Part, on_bytes: Callable[[int], None]) -> Iterator[Piece]:
    """The file as one document, in pieces of some MB that end before a newline after a letter or digit.

    Tokenizers cut there anyway, so that the pieces' tokens are the whole document's.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text, at = "", 0
    with part.path.open("rb") as raw, _open(part.path, raw) as stream:
        while block := stream.read(BLOCK_BYTES):
            on_bytes(raw.tell() - at)
            at = raw.tell()
            places = [match.start() for match in re.finditer(r"(?<=\w)\n", text)]
            if places and places[-1]:
                yield text[: places[-1]], False
                text = text[places[-1] :]
            text += _decode(part.path, decoder, block, final=False)
        yield text + _decode(part.path, decoder, b"", final=True), True


def _decode(path: Path, decoder: codecs.IncrementalDecoder, block: bytes, *, final: bool) -> str:
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 text: {error.reason}, bytes {error.object[error.start : error.end]!r}"
        ) from None


def _parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a Parquet file ({error})") from None


def _read_parquet(part: Part, text_key: str, on_bytes: Callable[[int], None]) -> Iterator[Piece]:
    with _parquet(part.path) as file:
        if text_key not in file.schema_arrow.names:
            raise ValueError(
                f"{part.path}: no column {text_key!r}; there are {file.schema_arrow.names}: "
                "set text_key to the one with the text"
            )
        kind = file.schema_arrow.field(text_key).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ValueError(f"{part.path}: column {text_key!r} holds {kind}, not text")
        bytes_per_row = part.path.stat().st_size / max(file.metadata.num_rows, 1)
        groups = list(range(part.start, part.stop))
        for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=[text_key]):
            on_bytes(round(len(batch) * bytes_per_row))
            for text in batch.column(0).to_pylist():
                yield text or "", True
