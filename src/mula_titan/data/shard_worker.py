"""What runs in the workers of `tokenize`: checksums of inputs, and one shard a job."""

import json
import multiprocessing
import multiprocessing.process
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tokenizers import Tokenizer

from mula_titan.data.documents import Part, Piece, read_documents
from mula_titan.data.shards import (
    Recipe,
    ShardRecord,
    SourceRecord,
    atomic_file,
    blake2b_of,
    new_hash,
    write_json,
)

UNFINISHED = "unfinished"
# Text that goes to the tokenizer in one call: enough for its threads, little enough for memory.
BATCH_CHARACTERS = 1 << 20
# How far a token can reach over the place where a long document is cut.
CUT_CONTEXT = 64
# Shared counters of a pool.
BYTES, TOKENS, STOP = range(3)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads tokenizer.json for whole documents: no padding, no truncation, special tokens in a text are just text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


class _Worker:
    """What the jobs of one worker share: the tokenizer, and the counters of the whole pool."""

    def __init__(self, tokenizer: Tokenizer, counts: Any):
        self.tokenizer = tokenizer
        self.counts = counts

    def add_bytes(self, count: int) -> None:
        self._add(BYTES, count)

    def add_tokens(self, count: int) -> None:
        self._add(TOKENS, count)

    def _add(self, which: int, count: int) -> None:
        with self.counts.get_lock():
            if self.counts[STOP]:
                raise RuntimeError("stopped")
            self.counts[which] += count


_worker: _Worker


def start(tokenizer: Path, counts: Any, threads: int) -> None:
    """Sets up this process, or thread, for the jobs below; `threads` is 0 in a thread, else those of the tokenizer."""
    global _worker
    parent = multiprocessing.parent_process()
    if threads and parent is not None:
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _worker = _Worker(load_tokenizer(tokenizer), counts)


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    """Ends this process with its parent, even a killed one: an orphan would go on writing."""
    parent.join()
    os._exit(1)


def hash_source(name: str, path: Path) -> SourceRecord:
    """Size and checksum of an input file."""
    record = SourceRecord(file=name, bytes=path.stat().st_size, blake2b=blake2b_of(path))
    _worker.add_bytes(record.bytes)
    return record


def finish_shard(folder: Path, part: Part, number: int, recipe: Recipe) -> ShardRecord:
    """Writes a shard, unless it is there: then checks its bytes and keeps it."""
    note = folder / UNFINISHED / f"shard-{number:05d}.json"
    if note.exists():
        shard = ShardRecord(**json.loads(note.read_text(encoding="utf-8")))
        checksums = {shard.tokens_file: shard.tokens_blake2b, shard.offsets_file: shard.offsets_blake2b}
        if all((folder / name).exists() and blake2b_of(folder / name) == value for name, value in checksums.items()):
            _worker.add_bytes(part.path.stat().st_size // part.count)
            return shard
    shard = _write_shard(folder, part, number, recipe)
    write_json(note, shard)
    return shard


def _write_shard(folder: Path, part: Part, number: int, recipe: Recipe) -> ShardRecord:
    """Tokenises one part of a file; in memory: one batch of text and its tokens."""
    tokens_path, offsets_path = folder / f"shard-{number:05d}.tokens", folder / f"shard-{number:05d}.offsets"
    eos = np.array([recipe.eos_id], np.uint32)
    length = document_start = empty = 0
    max_token_id = -1
    with atomic_file(tokens_path) as tokens_file, atomic_file(offsets_path) as offsets_file:
        tokens, offsets = _HashedFile(tokens_file, recipe.dtype), _HashedFile(offsets_file, "int64")
        offsets.append(np.zeros(1))
        for batch in _batches(part, recipe.text_key):
            encodings = _worker.tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
            ids, ends = [], []
            for encoding, (_, ends_document) in zip(encodings, batch, strict=True):
                ids.append(np.array(encoding.ids, np.uint32))
                length += len(ids[-1])
                if ends_document and length == document_start:
                    empty += 1
                elif ends_document:
                    ids.append(eos)
                    length += 1
                    ends.append(length)
                    document_start = length
            batch_ids = np.concatenate(ids)
            max_token_id = max(max_token_id, int(batch_ids.max(initial=0)) if len(batch_ids) else -1)
            tokens.append(batch_ids)
            offsets.append(np.array(ends, np.int64))
            _worker.add_tokens(len(batch_ids))
    return ShardRecord(
        tokens_file=tokens_path.name,
        offsets_file=offsets_path.name,
        num_tokens=tokens.length,
        num_documents=offsets.length - 1,
        empty_documents=empty,
        max_token_id=max_token_id,
        tokens_bytes=tokens_path.stat().st_size,
        offsets_bytes=offsets_path.stat().st_size,
        tokens_blake2b=tokens.checksum.hexdigest(),
        offsets_blake2b=offsets.checksum.hexdigest(),
        source=part.name,
        part=part.number,
        parts=part.count,
    )


def _batches(part: Part, text_key: str) -> Iterator[list[Piece]]:
    """Gathers documents, and pieces of long ones, into batches of about `BATCH_CHARACTERS`."""
    batch: list[Piece] = []
    characters, tail = 0, ""
    for text, ends_document in read_documents(part, text_key, _worker.add_bytes):
        if tail:
            _check_cut(part, tail, text)
        tail = "" if ends_document else text[-CUT_CONTEXT:]
        batch.append((text, ends_document))
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_cut(part: Part, left: str, right: str) -> None:
    """Raises ValueError if the tokenizer gives other tokens for a long document because it was cut here."""
    right = right[:CUT_CONTEXT]
    whole, *halves = (
        _worker.tokenizer.encode(text, add_special_tokens=False).ids for text in (left + right, left, right)
    )
    if whole != halves[0] + halves[1]:
        raise ValueError(
            f"{part.path}: too long for one document with this tokenizer, whose tokens span lines; "
            "give the text as JSON lines, one document a line"
        )


class _HashedFile:
    """Appends arrays to a file in a given little-endian type, with a checksum."""

    def __init__(self, file: BinaryIO, dtype: str):
        self.file = file
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.checksum = new_hash()
        self.length = 0

    def append(self, array: np.ndarray) -> None:
        data = array.astype(self.dtype).tobytes()
        self.checksum.update(data)
        self.file.write(data)
        self.length += len(array)
