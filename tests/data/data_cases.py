"""Small data sets and loaders over them, for the tests in this folder."""

import json
from pathlib import Path

from mula_titan.data.loader import TokenDataLoader

ASSETS = Path(__file__).resolve().parents[2] / "assets"
SEQ_LEN = 4


def build(path: Path | None, *, dp: int = 1, rank: int = 0, batch: int = 1, **config) -> TokenDataLoader:
    """A loader over one file, without a tokenizer."""
    config.setdefault("vocab_size", 2**31)
    config = TokenDataLoader.Config(dataset_path=str(path) if path else None, **config)
    return config.build(
        dp_world_size=dp,
        dp_rank=rank,
        tokenizer=None,
        seq_len=SEQ_LEN,
        local_batch_size=batch,
        snapshot_every_n_steps=1,
    )


class Ranks:
    """All data-parallel ranks of a run, stepped together; notes the windows in global order."""

    def __init__(self, path: Path, *, dp: int, batch: int, state: dict | None = None, **config):
        self.loaders = [build(path, dp=dp, rank=rank, batch=batch, **config) for rank in range(dp)]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(state)
        self.iterators = [iter(loader) for loader in self.loaders]

    def take(self, nexts: int) -> list[int]:
        """Windows of so many `next()` calls on every rank, rank by rank within each."""
        windows = []
        for _ in range(nexts):
            for iterator in self.iterators:
                inputs, _ = next(iterator)
                windows += (inputs["input"][:, 0] // SEQ_LEN).tolist()
        return windows

    def state(self) -> dict[str, int]:
        """The state, which must be the same on all ranks."""
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return states[0]


def write_json_lines(path: Path, texts: list[str]) -> Path:
    """One JSON document a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path
