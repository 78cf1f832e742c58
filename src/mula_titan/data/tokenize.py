"""`mula-titan tokenize`: text files -> token shards and index.json, in parallel, restartable after a kill.

Each input file, or part of a big one, becomes one shard, whatever the number of workers: the same inputs and settings
give the same bytes. Finished shards are noted in FOLDER/unfinished/ until index.json is written; a restart checks and
keeps them.
"""

import fcntl
import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import (
    FIRST_EXCEPTION,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from mula_titan.data import shard_worker
from mula_titan.data.documents import SUFFIXES, cut_into_parts, is_text_file
from mula_titan.data.shard_worker import BYTES, STOP, TOKENS, UNFINISHED
from mula_titan.data.shards import (
    FORMAT,
    INDEX_NAME,
    DatasetIndex,
    Recipe,
    ShardRecord,
    SourceRecord,
    blake2b_of,
    read_index,
    write_json,
)

RECIPE_NAME = "recipe.json"
# Below this much text, starting worker processes takes longer than the work.
IN_PROCESS_BYTES = 32 << 20


@dataclass(kw_only=True)
class TokenizeOptions:
    """What to tokenise, with what, and where to."""

    inputs: list[str] = field(default_factory=list)
    """Text files, folders (searched through) or glob patterns: .jsonl, .json, .txt (each also .gz, .zst), .parquet."""

    output: Path = Path("data")
    """Folder for the shards and index.json. After a kill, the same command goes on where it stopped."""

    tokenizer: Path = Path("assets/tokenizer")
    """Folder with tokenizer.json and tokenizer_config.json, as Hugging Face models have it."""

    text_key: str = "text"
    """Field of JSON lines, or column of Parquet files, that holds the text. A .txt file is one document."""

    eos_token: str = ""
    """Token that ends each document. Empty: the eos_token of tokenizer_config.json."""

    workers: int = 0
    """Processes. 0: one for each core, or none but this one for less than 32 MB of text."""

    part_mb: int = 256
    """Big .jsonl and .parquet files are cut into parts of so many MB; each part is one shard."""

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("part_mb", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {least}")


def tokenize(options: TokenizeOptions) -> Path:
    """Tokenises text files and shows the progress on the terminal.

    Returns:
        The folder, for `dataloader.dataset_path`. A folder that is complete already is left as it is.

    Raises:
        ValueError: no inputs, an input that can't be read, a tokenizer without an end-of-document token, or a folder
            that holds something else than these inputs and settings give.
    """
    console = Console(stderr=True)
    files = find_inputs(options.inputs)
    total_bytes = sum(path.stat().st_size for path in files.values())
    parts = [part for name, path in files.items() for part in cut_into_parts(path, name, options.part_mb * 1_000_000)]
    workers = options.workers or (1 if total_bytes < IN_PROCESS_BYTES else len(os.sched_getaffinity(0)))
    counts = multiprocessing.get_context("forkserver").Array("q", 3)
    folder, unfinished = options.output, options.output / UNFINISHED
    make_recipe(options, [])  # refuses a bad tokenizer before any work

    folder.mkdir(parents=True, exist_ok=True)
    with (
        _only_writer(folder),
        _pool(min(workers, len(parts)), options.tokenizer, counts) as pool,
        _progress(console) as bar,
    ):
        jobs: list[Future] = [pool.submit(shard_worker.hash_source, name, path) for name, path in files.items()]
        recipe = make_recipe(options, _finish(jobs, counts, bar, "checking inputs", total_bytes))
        if (folder / INDEX_NAME).exists():
            _refuse_other_recipe(folder, asdict(read_index(folder / INDEX_NAME).recipe), recipe)
            shutil.rmtree(unfinished, ignore_errors=True)
            console.print(f"{folder}: complete already")
            return folder
        unfinished.mkdir(exist_ok=True)
        if (unfinished / RECIPE_NAME).exists():
            _refuse_other_recipe(folder, json.loads((unfinished / RECIPE_NAME).read_text(encoding="utf-8")), recipe)
        write_json(unfinished / RECIPE_NAME, recipe)
        for leftover in [*folder.glob("*.tmp"), *unfinished.glob("*.tmp")]:
            leftover.unlink()
        jobs = [
            pool.submit(shard_worker.finish_shard, folder, part, number, recipe) for number, part in enumerate(parts)
        ]
        shards: list[ShardRecord] = _finish(jobs, counts, bar, "tokenising", total_bytes)

        index = DatasetIndex(
            format=FORMAT,
            recipe=recipe,
            num_tokens=sum(shard.num_tokens for shard in shards),
            num_documents=sum(shard.num_documents for shard in shards),
            max_token_id=max(shard.max_token_id for shard in shards),
            shards=shards,
        )
        if not index.num_tokens:
            raise ValueError(f"{', '.join(options.inputs)}: no text in {len(files)} files")
        write_json(folder / INDEX_NAME, index)
        shutil.rmtree(unfinished)
    console.print(f"{folder}: {index.num_tokens:,} tokens in {index.num_documents:,} documents, {len(shards)} shards")
    return folder


def find_inputs(inputs: list[str]) -> dict[str, Path]:
    """The text files that paths, folders and patterns stand for, keyed by name below their common folder, in order.

    Raises:
        ValueError: nothing found, or a file of an unknown kind.
    """
    if not inputs:
        raise ValueError("no inputs: name text files, folders or patterns")
    found: dict[Path, None] = {}  # an ordered set
    for name in inputs:
        matches = sorted(Path(match) for match in glob(name, recursive=True)) if has_magic(name) else [Path(name)]
        files: list[Path] = []
        for match in matches:
            if not match.exists():
                raise ValueError(f"{match}: no such file or folder")
            if match.is_dir():
                files += sorted(path for path in match.rglob("*") if path.is_file() and is_text_file(path))
            elif is_text_file(match):
                files.append(match)
            else:
                raise ValueError(f"{match}: unknown kind of text file; known: {', '.join(SUFFIXES)}, also .gz and .zst")
        if not files:
            raise ValueError(f"{name}: no text files here; known: {', '.join(SUFFIXES)}, also .gz and .zst")
        found |= dict.fromkeys(path.resolve() for path in files)
    base = os.path.commonpath([path.parent for path in found])
    return {path.relative_to(base).as_posix(): path for path in found}


def make_recipe(options: TokenizeOptions, sources: list[SourceRecord]) -> Recipe:
    """Everything that the shards' bytes depend on."""
    path = options.tokenizer / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{path}: no such file; `tokenizer` is a folder with tokenizer.json and tokenizer_config.json")
    vocabulary = shard_worker.load_tokenizer(options.tokenizer).get_vocab(with_added_tokens=True)
    eos_token = options.eos_token or _configured_eos(options.tokenizer / "tokenizer_config.json")
    if eos_token not in vocabulary:
        raise ValueError(f"{path}: has no token {eos_token!r} to end documents with; set eos_token to one that it has")
    vocab_size = max(vocabulary.values()) + 1
    return Recipe(
        dtype="uint16" if vocab_size <= 2**16 else "uint32",
        vocab_size=vocab_size,
        eos_id=vocabulary[eos_token],
        eos_token=eos_token,
        tokenizer_blake2b=blake2b_of(path),
        text_key=options.text_key,
        part_mb=options.part_mb,
        sources=sources,
    )


def _configured_eos(path: Path) -> str:
    token = json.loads(path.read_text(encoding="utf-8")).get("eos_token") if path.exists() else None
    token = token.get("content") if isinstance(token, dict) else token
    if not token:
        raise ValueError(f"{path}: names no eos_token; set eos_token to the token that ends a document")
    return token


def _refuse_other_recipe(folder: Path, stored: dict[str, Any], recipe: Recipe) -> None:
    """Raises ValueError, naming what differs, if the folder was begun with other inputs or settings."""
    wanted = asdict(recipe)
    differences = [
        f"{name} was {stored.get(name)!r}, is {wanted[name]!r}"
        for name in wanted
        if name != "sources" and stored.get(name) != wanted[name]
    ]
    before = {source["file"]: source for source in stored.get("sources", [])}
    now = {source["file"]: source for source in wanted["sources"]}
    for verb, names in (
        ("new", sorted(now.keys() - before.keys())),
        ("gone", sorted(before.keys() - now.keys())),
        ("changed", sorted(name for name in now.keys() & before.keys() if now[name] != before[name])),
    ):
        if names:
            differences.append(f"{len(names)} input files {verb} ({names[0]})")
    if not differences and stored != wanted:
        differences.append("the input files come in another order")
    if differences:
        raise ValueError(
            f"{folder}: was tokenised with other settings: {'; '.join(differences)}. Choose another output "
            "folder or remove this one"
        )


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Holds a lock on the folder, which the system gives back however the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another run is writing here; wait for it or choose another folder") from None
        except OSError:
            pass  # some network file systems have no locks
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _pool(workers: int, tokenizer: Path, counts: Any) -> Iterator[Executor]:
    """One worker: a thread here. More: processes, forked from a clean server that imports `shard_worker` once."""
    executor: Executor
    if workers == 1:
        executor = ThreadPoolExecutor(1, "tokenize", shard_worker.start, (tokenizer, counts, 0))
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([shard_worker.__name__])
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        executor = ProcessPoolExecutor(workers, context, shard_worker.start, (tokenizer, counts, threads))
    try:
        yield executor
    except BrokenExecutor as error:
        raise RuntimeError("a worker died, maybe for lack of memory; run again to go on, with fewer workers") from error
    finally:
        counts[STOP] = 1
        executor.shutdown(cancel_futures=True)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TextColumn("{task.fields[tokens]:,} tokens"), TimeRemainingColumn(), console=console)


def _finish(jobs: list[Future], counts: Any, bar: Progress, title: str, total_bytes: int) -> list[Any]:
    """Waits for all jobs while the bar moves on; their results in order. The first error ends the wait."""
    task = bar.add_task(title, total=total_bytes, tokens=0)
    first_byte, pending = counts[BYTES], set(jobs)
    while pending:
        done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
        for job in done:
            job.result()
        bar.update(task, completed=counts[BYTES] - first_byte, tokens=counts[TOKENS])
    bar.update(task, completed=total_bytes)
    return [job.result() for job in jobs]
