"""A folder that appears complete or not at all."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_target(target: Path, *, overwrite: bool, marker: str) -> None:
    """Refuse a target that would be clobbered.

    Args:
        target: folder to be written; absent or empty is fine.
        overwrite: replace earlier output.
        marker: file that every output of this kind holds; without it a folder is never replaced.

    Raises:
        ValueError: the target is a file, or isn't empty and may not be replaced.
    """
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file. Name another folder.")
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"{target} isn't empty. Name another folder, or replace it with --overwrite.")
    if not (target / marker).is_file():
        raise ValueError(
            f"{target} isn't empty and holds no {marker}, so --overwrite won't delete it. Name another folder."
        )


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside ``target`` that takes its place when the block ends, or is deleted if it raises."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, and without the target's name: torchtitan takes any name with "step-N" in it for a checkpoint.
    partial = target.parent / f".unfinished-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    try:
        yield partial
        if target.exists():
            old = target.parent / f".replaced-{uuid.uuid4().hex[:8]}"
            target.rename(old)
            partial.rename(target)
            shutil.rmtree(old)
        else:
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
