"""What makes a checkpoint folder complete: ``manifest.json``, with size and checksum of every file, written last.

A folder is written under a temporary name and renamed when all is on disk, so a folder called ``step-N`` is complete.
"""

import hashlib
import io
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

MANIFEST = "manifest.json"
FORMAT_VERSION = 1

# Hidden, and without "step-N" in the name, which torchtitan would take for a checkpoint.
UNFINISHED, DELETING = ".unfinished-", ".deleting-"

Content = Literal["full", "model", "hf"]
"""Training state to resume from, weights in DCP format, or weights as Hugging Face safetensors."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    bytes: int
    blake2b: str
    """Hexadecimal BLAKE2b-256 of the content."""


@dataclass(frozen=True)
class Manifest:
    """Content of ``manifest.json``."""

    step: int
    content: Content
    files: dict[str, FileRecord]
    """By name relative to the folder."""

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` atomically and durably."""
        partial = folder / f"{MANIFEST}.partial"
        with partial.open("w", encoding="utf-8") as file:
            json.dump({"format_version": FORMAT_VERSION, **asdict(self)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(folder / MANIFEST)
        _sync_folder(folder)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint folder; None if it has none.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        stored = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if stored["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {stored['format_version']}, expected {FORMAT_VERSION}")
        files = {name: FileRecord(**record) for name, record in stored["files"].items()}
        return Manifest(step=stored["step"], content=stored["content"], files=files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from None


def problems_of(folder: Path, files: dict[str, FileRecord], *, checksums: bool) -> list[str]:
    """What is wrong with some files of a checkpoint; empty if nothing is.

    Args:
        folder: the checkpoint.
        files: those to look at, with what they should be.
        checksums: read every byte; otherwise compare sizes only.
    """
    problems = []
    for name, want in files.items():
        try:
            size = (folder / name).stat().st_size
            if size != want.bytes:
                problems.append(f"{name} has {size} bytes instead of {want.bytes}")
            elif checksums and record_of(folder / name) != want:
                problems.append(f"{name} doesn't have the checksum it was written with")
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
    return problems


def record_of(path: Path) -> FileRecord:
    """Size and checksum of a file as it is on disk."""
    with path.open("rb") as file:
        return FileRecord(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, _hash).hexdigest())


def _hash() -> Any:
    return hashlib.blake2b(digest_size=32)


def _sync_folder(folder: Path) -> None:
    """Make renames inside a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished_folder(folder: Path) -> Path:
    """Where a checkpoint folder is written until it is complete."""
    return folder.parent / f"{UNFINISHED}{folder.name.removeprefix('step-')}"


def publish(folder: Path, manifest: Manifest) -> None:
    """Give a finished folder its manifest and its name.

    Raises:
        FileExistsError: another program's folder has that name.
    """
    partial = unfinished_folder(folder)
    if folder.exists() and not (folder / MANIFEST).exists():
        raise FileExistsError(f"{folder} exists and has no {MANIFEST}, so it isn't ours; move it away")
    manifest.write(partial)
    replaced = set_aside(folder) if folder.exists() else None
    partial.rename(folder)
    _sync_folder(folder.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Take a checkpoint's name away before it is deleted, so that no half-deleted folder looks complete."""
    doomed = folder.parent / f"{DELETING}{uuid.uuid4().hex[:8]}"
    folder.rename(doomed)
    return doomed


def remove_leftovers(parent: Path) -> None:
    """Delete what killed runs left of their unfinished and half-deleted folders."""
    for pattern in (f"{UNFINISHED}*", f"{DELETING}*"):
        for folder in parent.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


class _HashingStream(io.RawIOBase):
    """Passes what is written on to a file and hashes it, so that damage on the way to the disk shows."""

    def __init__(self, file: Any):
        self._file = file
        self._digest = _hash()
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._digest.update(view)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def record(self) -> FileRecord:
        return FileRecord(self._size, self._digest.hexdigest())


class _HashingFileSystem(FileSystem):
    """Local files; remembers size and checksum of those that were written."""

    def __init__(self) -> None:
        self.written: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            if mode != "wb":
                yield file
                return
            stream = _HashingStream(file)
            yield stream
            self.written[Path(path).name] = stream.record()


@dataclass(frozen=True)
class _FileResult(WriteResult):
    """Carries a file's record to the coordinator, beside DCP's own results."""


class ManifestWriter(FileSystemWriter):
    """DCP's file writer whose folder appears only when it is complete, with its manifest.

    Works for blocking saves and for both of DCP's asynchronous ones, since the coordinator finishes the folder after
    all ranks have written, wherever that runs.

    Args:
        folder: final name, ``.../step-N``.
        step: optimizer steps done.
        content: what the folder holds.
        describe: writes further files into the unfinished folder, on the coordinator; must pickle.
    """

    def __init__(
        self, folder: Path, *, step: int, content: Content, describe: Callable[[Path], None] | None = None
    ) -> None:
        super().__init__(unfinished_folder(folder))
        self.fs = _HashingFileSystem()
        self._folder, self._step, self._content, self._describe = folder, step, content, describe

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Coordinator: begin with an empty folder. No rank writes before the coordinator's plan."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            shutil.rmtree(self.path, ignore_errors=True)
            Path(self.path).mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned; DCP's version would make the folder that the coordinator is just emptying."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; their records travel with DCP's results."""
        Path(self.path).mkdir(parents=True, exist_ok=True)
        results = super().write_data(plan, planner).wait()
        records = [_FileResult(None, record.bytes, (name, record)) for name, record in self.fs.written.items()]  # type: ignore[arg-type,attr-defined]
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, *records])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator, after all ranks have written: metadata, description, manifest, name."""
        every = [result for rank in results for result in rank]
        files = dict(result.storage_data for result in every if isinstance(result, _FileResult))
        super().finish(metadata, [[result for result in every if not isinstance(result, _FileResult)]])
        folder = Path(self.path)
        if self._describe is not None:
            self._describe(folder)
        for path in folder.iterdir():
            if path.name not in files:
                files[path.name] = record_of(path)
        publish(self._folder, Manifest(step=self._step, content=self._content, files=files))
