"""Checkpoint manager: torchtitan's DCP manager whose checkpoints are complete, verified and never the last to go.

Full checkpoints (``<checkpoint.folder>/step-N``) rotate; model-only ones (``<model_only.folder>/step-N``) stay.
"""

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from mula_titan.components.manifest import (
    MANIFEST,
    Content,
    Manifest,
    ManifestWriter,
    problems_of,
    publish,
    read_manifest,
    record_of,
    remove_leftovers,
    set_aside,
    unfinished_folder,
)
from mula_titan.components.random_state import RNG, RandomState
from mula_titan.components.rank_zero import on_rank_zero
from mula_titan.components.watchdog import phase
from mula_titan.exit_codes import CONFIG, STORAGE, FatalFault
from mula_titan.hf.checkpoint_info import write_checkpoint_info
from mula_titan.hf.description import write_description

_STEP_FOLDER = re.compile(r"step-(\d+)")
_NOT_MODEL = tuple(f"{part}." for part in (OPTIMIZER, LR_SCHEDULER, DATALOADER, "train_state", RNG))


@dataclass(kw_only=True, slots=True)
class ModelOnly:
    """Checkpoints with the weights alone, for evaluation and export; outside the rotation of full ones."""

    folder: str = "model_checkpoint"
    """Their folder, relative to the dump folder."""

    interval: int = 0
    """Steps between two of them. 0: none, but for `steps`."""

    steps: list[int] = field(default_factory=list)
    """Save at these steps too."""

    keep_every: int = 0
    """Keep those whose step is a multiple of this, those of `steps`, and the newest. 0: keep all."""

    def __post_init__(self) -> None:
        for name in ("interval", "keep_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 0")

    def is_due(self, step: int) -> bool:
        """Whether a step ends with such a checkpoint."""
        return step in self.steps or (self.interval > 0 and step % self.interval == 0)

    def is_kept(self, step: int) -> bool:
        """Whether one stays when a newer one exists."""
        return not self.keep_every or step % self.keep_every == 0 or step in self.steps


class MulaCheckpointManager(CheckpointManager):
    """torchtitan's manager with manifests, verified loading, safe retention, random states and model description.

    A failed save never touches the training state: training goes on and the next interval tries again, until
    ``max_failed_saves`` in a row have failed. The last save of a run must succeed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        verify: Literal["checksum", "size"] = "checksum"
        """What is compared with the manifest before a load: every byte, shared out among the ranks, or sizes only."""

        max_failed_saves: int = 3
        """Stop when so many saves in a row have failed (full disk, read-only folder). 1: stop at the first."""

        model_only: ModelOnly = field(default_factory=ModelOnly)
        """Model-only checkpoints, beside the full ones."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if filesystem.is_remote(self.folder):
                raise ValueError(f"folder = {self.folder!r}: checkpoints need a file system with rename; name a folder")
            if self.max_failed_saves < 1:
                raise ValueError(f"max_failed_saves = {self.max_failed_saves} must be at least 1")

    model_info: dict[str, Any] | None = None
    """What :func:`write_checkpoint_info` stores beside the tensors, so that export needs only the checkpoint."""

    before_write: Callable[[Path], None] | None = None
    """Called on the coordinator with the unfinished folder; fault injection makes it fail."""

    def __init__(self, config: Config, *, states: dict[str, Any], base_folder: str = "", **kwargs: Any) -> None:
        super().__init__(config, states={**states, RNG: RandomState()}, base_folder=base_folder, **kwargs)
        self.config = config
        self._model_only_folder = Path(base_folder) / config.model_only.folder
        self._step_on_disk = -1  # loaded or saved by this process, so that it isn't written again
        self._failed_saves = 0
        self._content: Content = "full"
        self._forced = False

    # ---- saving

    def save_now(self, step: int) -> None:
        """Save the full state at once, whatever the interval, and wait until it is on disk. A collective call.

        Raises:
            FatalFault: it could not be saved.
        """
        if not self.enable or self.load_only:
            return
        self._forced = True
        try:
            self._save(step)
        finally:
            self._forced = False
        self.maybe_wait_for_saving()
        if self._failed_saves:
            raise FatalFault(f"The checkpoint of step {step} could not be saved; see above.", STORAGE)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        with phase("save"):
            return self._try_to_save(curr_step, last_step)

    def _try_to_save(self, curr_step: int, last_step: bool) -> bool:
        # Every failure below reaches all ranks: DCP gathers those of its steps, on_rank_zero those of the others.
        try:
            if not self.load_only and self.config.model_only.is_due(curr_step):
                self._save_model_only(curr_step)
            saved = super()._save(curr_step, last_step)
        except (CheckpointException, OSError) as error:
            self._report_failed_save(curr_step, error, must_stop=last_step)
            return False
        if saved:
            self._step_on_disk = curr_step
            if self.save_future is None:
                self._failed_saves = 0
        return saved

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        final = last_step and self.last_save_model_only
        if curr_step == self._step_on_disk and not final:
            return False
        return super()._should_save(curr_step, last_step) or self._forced

    def _save_last_step(self, curr_step: int) -> None:
        self._content = ("hf" if self.last_save_in_hf else "model") if self.last_save_model_only else "full"
        try:
            super()._save_last_step(curr_step)
        finally:
            self._content = "full"

    def _save_model_only(self, step: int) -> None:
        begin = time.monotonic()
        self._content = "model"
        try:
            states = self.states[MODEL].state_dict()
            states = {k: v.to(self.export_dtype) if v.is_floating_point() else v for k, v in states.items()}
            self.dcp_save(states, str(self._model_only_folder / f"step-{step}"), AsyncMode.DISABLED)
        finally:
            self._content = "full"
        if dist.get_rank() == 0:
            folders = dict(self._complete(self._model_only_folder))
            self._delete([path for s, path in folders.items() if s != step and not self.config.model_only.is_kept(s)])
        logger.info(f"Saved a model-only checkpoint of step {step} in {time.monotonic() - begin:.2f} seconds.")

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """As torchtitan's, into a folder that appears when it is complete, with manifest and model description."""
        folder = Path(checkpoint_id)
        step = int(folder.name.removeprefix("step-"))
        if to_hf:
            return self._save_in_hf(state_dict, folder, step)
        writer = ManifestWriter(
            folder,
            step=step,
            content=self._content,
            describe=partial(_describe, info=self.model_info, before_write=self.before_write),
        )
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)
            if enable_garbage_collection:
                GarbageCollection.collect("GC collection invoked by checkpointer.")
            return None
        kind = AsyncCheckpointerType.THREAD if async_mode == AsyncMode.ASYNC else AsyncCheckpointerType.PROCESS
        return dcp.async_save(
            state_dict,
            storage_writer=writer,
            process_group=self.pg,
            async_checkpointer_type=kind,
            async_stager=self.stager,  # without one the writer copies to the CPU itself before async_save returns
        )

    def _save_in_hf(self, state_dict: dict[str, Any], folder: Path, step: int) -> None:
        partial_folder = unfinished_folder(folder)
        on_rank_zero(lambda: shutil.rmtree(partial_folder, ignore_errors=True))
        super().dcp_save(state_dict, str(partial_folder), AsyncMode.DISABLED, to_hf=True)

        def finish() -> None:
            if self.model_info is not None:
                args, tokenizer = self.model_info["args"], Path(self.model_info["hf_assets_path"])
                write_description(partial_folder, args, tokenizer, self.export_dtype)
            _describe(partial_folder, info=self.model_info, before_write=self.before_write)
            paths = [path for path in partial_folder.rglob("*") if path.is_file()]
            files = {str(path.relative_to(partial_folder)): record_of(path) for path in paths}
            publish(folder, Manifest(step=step, content="hf", files=files))

        on_rank_zero(finish)

    def _wait_for_saving(self) -> None:
        try:
            super()._wait_for_saving()
            self._failed_saves = 0
        except (CheckpointException, OSError, RuntimeError) as error:
            self.save_future = None
            self._report_failed_save(self._step_on_disk, error, must_stop=False)

    def _report_failed_save(self, step: int, error: BaseException, *, must_stop: bool) -> None:
        self._step_on_disk = -1
        self._failed_saves += 1
        reasons = error.failures if isinstance(error, CheckpointException) else {dist.get_rank(): (error, None)}
        text = "; ".join(f"rank {rank}: {reason[0]}" for rank, reason in sorted(reasons.items())[:4])
        text = f"The checkpoint of step {step} could not be saved in {self.folder}: {text}."
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished_folder(Path(self._create_checkpoint_id(step))), ignore_errors=True)
        if must_stop or self._failed_saves >= self.config.max_failed_saves:
            hint = "Free space or make the folder writable, then start again: it resumes from the newest checkpoint."
            raise FatalFault(f"{text} {hint}", STORAGE) from error
        if dist.get_rank() == 0:
            left = self.config.max_failed_saves - self._failed_saves
            logger.error(f"{text} Training goes on and tries again at the next interval; {left} more failures stop it.")

    # ---- loading

    def _load(self, step: int = -1) -> bool:
        on_rank_zero(lambda: remove_leftovers(Path(self.folder)))
        if step != -1 and (problems := self._problems(Path(self._create_checkpoint_id(step)))):
            raise FatalFault(
                f"checkpoint.load_step = {step}: {self._create_checkpoint_id(step)} is damaged: {'; '.join(problems)}. "
                "Set -1 for the newest good checkpoint.",
                STORAGE,
            )
        return super()._load(step)

    def _find_load_step(self, folder: str = "") -> int:
        """Step of the newest checkpoint that is complete, undamaged and full; -1 if there are none. A collective call.

        Raises:
            FatalFault: there are checkpoints, but none to resume from.
        """
        root = Path(folder or self.folder)
        refused = []
        for step, path in on_rank_zero(lambda: sorted(_step_folders(root), reverse=True)):
            problems = self._problems(path, resume=step > 0)
            if not problems:
                return step
            refused.append(f"{path.name}: {'; '.join(problems)}")
            if dist.get_rank() == 0:
                logger.warning(f"Not resuming from {path}: {'; '.join(problems)}. Trying the next older one.")
        if refused:
            raise FatalFault(
                f"No checkpoint in {root} can be resumed from ({' | '.join(refused)}). To start over, move the folder "
                "away; to go on with a model's weights alone, name it in checkpoint.initial_load_path.",
                STORAGE,
            )
        return -1

    def _problems(self, folder: Path, *, resume: bool = False) -> list[str]:
        """What speaks against loading a folder; each rank reads its share of the files. A collective call."""
        try:
            manifest = on_rank_zero(lambda: read_manifest(folder))
        except ValueError as error:
            return [str(error)]
        if manifest is None:
            if (folder / ".metadata").is_file():  # imported, or another program's
                logger.warning(f"{folder} has no {MANIFEST}, so it cannot be checked for damage.")
                return []
            return [f"unfinished: neither {MANIFEST} nor .metadata"]
        if resume and manifest.content != "full":
            return [f"holds the {'weights' if manifest.content == 'model' else 'Hugging Face weights'} only"]
        mine = dict(sorted(manifest.files.items())[dist.get_rank() :: dist.get_world_size()])
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, problems_of(folder, mine, checksums=self.config.verify == "checksum"))
        return [problem for rank in found for problem in rank]

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load as torchtitan does; ranks without a saved random state keep their own.

        Raises:
            FatalFault: the checkpoint has model weights that this model lacks.
        """
        if not from_hf:
            self._refuse_foreign_weights(checkpoint_id)
        random_state = state_dict.get(RNG)
        if random_state is not None and not from_hf and not random_state.is_in(checkpoint_id):
            logger.warning(f"{checkpoint_id} has no random state for rank {dist.get_rank()}; it keeps its own.")
            state_dict = {key: value for key, value in state_dict.items() if key != RNG}
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        folder = Path(checkpoint_id)
        if folder.parent == Path(self.folder):
            self._step_on_disk = int(folder.name.removeprefix("step-"))

    def _refuse_foreign_weights(self, checkpoint_id: str) -> None:
        """DCP itself refuses missing weights, but drops superfluous ones silently."""
        saved = FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
        names = sorted(name for name in saved if not name.startswith(_NOT_MODEL))
        model = self.states[MODEL].state_dict()
        # A pipeline rank has a part of the names, so the ranks mark theirs.
        known = torch.tensor([name in model for name in names], dtype=torch.int32)
        if dist.get_world_size() > 1:
            accelerator = torch.accelerator.current_accelerator()
            known = known.to(accelerator) if accelerator is not None and dist.get_backend() != "gloo" else known
            dist.all_reduce(known)
        unknown = [name for name, count in zip(names, known.tolist(), strict=True) if not count]
        if unknown:
            raise FatalFault(
                f"{checkpoint_id} holds weights that this model hasn't: {', '.join(unknown[:5])}"
                f"{' ...' if len(unknown) > 5 else ''}. Set [model] as it was when they were saved.",
                CONFIG,
            )

    # ---- retention

    def newest(self) -> Path | None:
        """Folder of the newest complete checkpoint, whatever it holds."""
        folders = sorted(_step_folders(Path(self.folder))) if self.enable else []
        complete = [path for _, path in folders if (path / MANIFEST).is_file() or (path / ".metadata").is_file()]
        return complete[-1] if complete else None

    def _purge_stale_checkpoints(self) -> None:
        """Delete all but the newest ``keep_latest_k`` complete full checkpoints; all other folders stay."""
        if self._should_purge():
            full = [path for _, path in self._complete(Path(self.folder), "full")]
            self._delete(full[: -self.keep_latest_k])

    @staticmethod
    def _complete(root: Path, content: Content | None = None) -> list[tuple[int, Path]]:
        """(step, folder) of our complete checkpoints, oldest first."""
        complete = []
        for step, path in sorted(_step_folders(root)):
            try:
                manifest = read_manifest(path)
            except ValueError:
                continue  # damaged: left for a person to look at
            if manifest is not None and (content is None or manifest.content == content):
                complete.append((step, path))
        return complete

    def _delete(self, folders: list[Path]) -> None:
        for path in folders:
            try:
                doomed = set_aside(path)
            except OSError as error:
                logger.warning(f"{path} could not be deleted: {error}")
                continue
            if self.purge_thread is not None:
                self.purge_queue.put(str(doomed))
            else:
                shutil.rmtree(doomed, ignore_errors=True)


def _step_folders(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    matches = ((_STEP_FOLDER.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return [(int(match.group(1)), path) for match, path in matches if match]


def _describe(folder: Path, *, info: dict[str, Any] | None, before_write: Callable[[Path], None] | None) -> None:
    if before_write is not None:
        before_write(folder)
    if info is not None:
        write_checkpoint_info(folder, **info)
