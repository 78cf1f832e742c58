"""Data loader for torchtitan over token files: an exact global order, one integer of state.

Shape suffixes: B = local_batch_size, L = seq_len, S = L + 1 (a window: L inputs and the last target).
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from mula_titan.data.order import SampleOrder
from mula_titan.data.shards import blake2b_of
from mula_titan.data.token_files import TokenFiles

RAW_DTYPES = ("", "uint8", "uint16", "uint32", "int32", "int64")
STATE_KEY = "sample_index"

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclass(kw_only=True, slots=True)
class TokenSource:
    """One data set of a mixture."""

    path: str = ""
    """Folder of `mula-titan tokenize`, token file, folder of token files, or glob pattern of these."""

    weight: float = 1.0
    """Share of the tokens, relative to the other sources' weights."""

    dtype: str = ""
    """Type of headerless files ("uint16" or "uint32" for OLMo's); leave out for all others, which say it themselves."""

    eos_id: int | None = None
    """End-of-document id in .npy and headerless files; left out: the tokenizer's."""


@dataclass(frozen=True)
class SampleLocation:
    """Where a sample of the global order comes from."""

    path: str
    """File that holds the window's first token."""
    token: int
    """Index of that token in the file."""
    source: int
    epoch: int
    window: int


class TokenDataLoader(BaseDataLoader):
    """Batches of packed windows out of token files, in an order that doesn't depend on the number of ranks.

    A source is cut into windows of S = L + 1 tokens that overlap by one, so that every token is a target once an epoch.
    `SampleOrder` numbers windows 0, 1, 2, ... for ever. Each `next()` on `dp_world_size` ranks takes the next
    `dp_world_size * B` samples, rank r the r-th B of them. So an optimizer step takes the same samples for every
    data-parallel size, batch split and accumulation count with the same global batch size, and the position, one
    integer that all ranks share, is the whole state.

    Yields `({"input": (B, L) int64, "positions": (B, L) int64}, labels (B, L) int64)`, labels shifted by one.

    Args:
        config: What to read.
        dp_world_size: Ranks that read different samples (data-parallel degree).
        dp_rank: This rank among them.
        tokenizer: Checked against the data; gives `vocab_size` and `eos_id` where these are left open. May be None.
        seq_len: L, tokens of a sequence.
        local_batch_size: B, sequences of one `next()`.
        kwargs: Others that torchtitan passes (`snapshot_every_n_steps`); not needed here.

    Raises:
        ValueError: nothing to read, too little data, or data that doesn't fit the vocabulary, dtype or tokenizer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset_path: str | None = None
        """The one source, in short: a folder of `mula-titan tokenize`, a .npy file, or a pattern of these."""

        sources: list[TokenSource] = field(default_factory=list)
        """Mixture: [[dataloader.sources]] tables with `path` and `weight` (shares of tokens)."""

        seed: int = 42
        """Seed of the order of samples."""

        shuffle: bool = True
        """A new random order in each epoch. Off: file order."""

        infinite: bool = True
        """Start the next epoch at the end of the data. Off: stop after `epochs`, on all ranks at the same step."""

        epochs: int = 1
        """Passes over the data if `infinite` is off; in a mixture, over the source that is used up first."""

        drop_last: bool = True
        """
        Leave out what doesn't fill a window or a batch on all ranks. Off, for validation: fill up with ignored targets,
        so that every target counts once for any number of ranks.
        """

        global_batch_size: int = 0
        """
        Sequences of an optimizer step, as training.global_batch_size: the data ends before a step that it can't fill.
        0: the sequences of one `next()` on all ranks.
        """

        document_mask: bool = True
        """
        Positions restart at each document and the target after a document's end is ignored, for attention that stays
        within documents. Off: positions count through the window and every token is a target.
        """

        vocab_size: int = 0
        """Rows of the model's embedding table, which token ids must fit. 0: the tokenizer's vocabulary."""

        prefetch: int = 2
        """Batches read ahead by a thread. 0: none."""

        def __post_init__(self):
            if self.dataset:
                raise ValueError(
                    f"dataset = {self.dataset!r}: data sets have no names here; set dataset_path or sources"
                )
            for source in self.sources:
                if not source.path:
                    raise ValueError("a source has no path")
                if not 0 < source.weight < float("inf"):
                    raise ValueError(f"source {source.path}: weight = {source.weight} must be a positive number")
                if source.dtype not in RAW_DTYPES:
                    raise ValueError(f"source {source.path}: dtype = {source.dtype!r} must be one of {RAW_DTYPES[1:]}")
            for name, least in (
                ("seed", 0),
                ("epochs", 1),
                ("vocab_size", 0),
                ("global_batch_size", 0),
                ("prefetch", 0),
            ):
                if getattr(self, name) < least:
                    raise ValueError(f"{name} = {getattr(self, name)} must be at least {least}")

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer | None,
        seq_len: int,
        local_batch_size: int,
        **kwargs: Any,
    ):
        if not 0 <= dp_rank < dp_world_size:
            raise ValueError(f"dp_rank {dp_rank} is not in [0, {dp_world_size})")
        if seq_len < 1 or local_batch_size < 1:
            raise ValueError(f"seq_len {seq_len} and local_batch_size {local_batch_size} must be at least 1")
        if bool(config.dataset_path) == bool(config.sources):
            raise ValueError("set exactly one of dataloader.dataset_path and dataloader.sources")
        self.config = config
        self.seq_len = seq_len
        self.local_batch_size = local_batch_size
        self.samples_per_next = dp_world_size * local_batch_size
        self._samples_per_step = config.global_batch_size or self.samples_per_next
        if self._samples_per_step % self.samples_per_next:
            raise ValueError(
                f"global_batch_size {self._samples_per_step} must be a multiple of {dp_world_size} data-parallel ranks "
                f"x local batch {local_batch_size}"
            )
        self._rank_offset = dp_rank * local_batch_size
        self._first_sample = self._sample_index = 0

        sources = config.sources or [TokenSource(path=config.dataset_path or "")]
        vocab_size = config.vocab_size or (tokenizer.get_vocab_size() if tokenizer else 0)
        if not vocab_size:
            raise ValueError("dataloader.vocab_size is needed where there is no tokenizer")
        tokenizer_eos = tokenizer.eos_id if tokenizer else None
        self._files = [
            TokenFiles(
                source.path,
                dtype=source.dtype,
                eos_id=tokenizer_eos if source.eos_id is None else source.eos_id,
                vocab_size=vocab_size,
            )
            for source in sources
        ]
        self._check_tokenizer(tokenizer)
        self._order = SampleOrder(
            [self._num_windows(files) for files in self._files],
            [source.weight for source in sources],
            seed=config.seed,
            shuffle=config.shuffle,
            epochs=None if config.infinite else config.epochs,
        )
        logger.info(
            "Data: %s",
            "; ".join(
                f"{files.name}: {files.num_tokens:,} tokens, {windows:,} windows of {seq_len}"
                for files, windows in zip(self._files, self._order.windows, strict=True)
            ),
        )

    def state_dict(self) -> dict[str, int]:
        """The number of samples that all ranks together were given: the same on each of them."""
        return {STATE_KEY: self._sample_index}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues the global order at a saved position, whatever data-parallel size and batch split wrote it.

        Raises:
            ValueError: another loader's state.
        """
        index = state_dict.get(STATE_KEY)
        if not isinstance(index, int) or index < 0:
            raise ValueError(
                f"data loader state with keys {sorted(state_dict)} has no {STATE_KEY!r} >= 0: another loader saved it; "
                'add "dataloader" to checkpoint.exclude_from_loading to start the data from its beginning'
            )
        self._first_sample = self._sample_index = index

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the current position on; ends on all ranks at once.

        The position moves when a batch is handed over, not when the thread reads it. Loading a state moves it too.
        """
        ahead: dict[int, Future[Batch]] = {}
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as reader:
            while (at := self._sample_index) < (end := self._end()):
                wanted = [at + n * self.samples_per_next for n in range(self.config.prefetch + 1)]
                ahead = {
                    start: ahead.get(start) or reader.submit(self._read_batch, start) for start in wanted if start < end
                }
                batch = ahead.pop(at).result()
                self._sample_index = at + self.samples_per_next
                yield batch

    def locate(self, sample_index: int) -> SampleLocation:
        """Where a sample of the global order comes from, for reports about bad batches."""
        source, epoch, window = self._order[sample_index]
        file, token = self._files[source].locate(window * self.seq_len)
        return SampleLocation(str(file.path), token, source, epoch, window)

    def _end(self) -> int:
        """Sample index at which the data ends: after the last whole step, if only whole ones count."""
        samples = len(self._order) - self._first_sample
        if self.config.drop_last:
            samples -= samples % self._samples_per_step
        return self._first_sample + samples

    def _num_windows(self, files: TokenFiles) -> int:
        targets = files.num_tokens - 1
        windows = targets // self.seq_len if self.config.drop_last else -(-targets // self.seq_len)
        if windows < 1:
            raise ValueError(
                f"{files.name}: {files.num_tokens} tokens are fewer than one window of seq_len + 1 = {self.seq_len + 1}"
            )
        return windows

    def _check_tokenizer(self, tokenizer: BaseTokenizer | None) -> None:
        """Warns where shards were written with a tokenizer.json that isn't the run's, byte for byte."""
        path = Path(getattr(tokenizer, "tokenizer_path", "")) / "tokenizer.json"
        indexes = [(files.name, index) for files in self._files for index in files.indexes]
        if not indexes or not path.is_file():
            return
        expected = blake2b_of(path)
        for name, index in indexes:
            if index.recipe.tokenizer_blake2b != expected:
                logger.warning("%s was tokenised with another tokenizer.json than %s", name, path)

    def _read_batch(self, start: int) -> Batch:
        """Reads this rank's B samples of the `samples_per_next` that begin at global sample `start`."""
        B, L = self.local_batch_size, self.seq_len
        tokens_BS = np.zeros((B, L + 1), dtype=np.int64)
        is_start_BS = np.zeros((B, L + 1), dtype=bool)
        sizes_B1 = np.zeros((B, 1), dtype=np.int64)
        for row in range(B):
            sample = start + self._rank_offset + row
            if sample < len(self._order):
                source, _, window = self._order[sample]
                sizes_B1[row] = self._files[source].read(window * L, tokens_BS[row], is_start_BS[row])

        index_L = np.arange(L)
        labels_BL = tokens_BS[:, 1:].copy()
        labels_BL[index_L + 1 >= sizes_B1] = IGNORE_INDEX
        if self.config.document_mask:
            labels_BL[is_start_BS[:, 1:]] = IGNORE_INDEX
            starts_BL = np.where(is_start_BS[:, :-1] | (index_L == sizes_B1), index_L, 0)
            positions_BL = index_L - np.maximum.accumulate(starts_BL, axis=1)
        else:
            positions_BL = np.broadcast_to(index_L, (B, L)).copy()
        inputs = {
            "input": torch.from_numpy(tokens_BS[:, :-1].copy()),
            "positions": torch.from_numpy(positions_BL),
        }
        return inputs, torch.from_numpy(labels_BL)
