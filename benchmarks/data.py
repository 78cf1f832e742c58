"""Data on its way to the model: batches of the loader, and tokenising of text, each against its ceiling in one run.

    python benchmarks/data.py loader                        # tokens/s; docs/benchmarks.md
    python benchmarks/data.py tokenize --megabytes 48       # MB/s of text
    taskset -c 0,1 python benchmarks/data.py loader         # on two cores of a larger host

``loader`` reads shuffled windows of 4096 tokens, 4 a batch, from random uint16 tokens with documents of about 1000
tokens. The ceiling is the least that any loader must do: copy random windows out of the memory map, widen to int64,
make tensors; a training process does it in a loop. ``tokenize`` runs the whole of `mula-titan tokenize` on the bundled
text, repeated: checksums, JSON, tokens, shards on disk. Its ceiling is ``encode_batch_fast`` of the tokenizers library
alone on the same documents, in memory, with as many threads as cores; ``encode_batch`` adds offsets, which nobody needs
here. All take turns, round by round; ratios are medians over rounds.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
TEXT, TOKENIZER = ROOT / "assets/austen/train.jsonl", ROOT / "assets/tokenizer"
SEQ_LEN, BATCH, VOCAB, EOS = 4096, 4, 50304, 0


def in_turns(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, after one round that doesn't count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def show(seconds: dict[str, list[float]], amount: float, unit: str, ceiling: str) -> dict[str, dict[str, float]]:
    table = {}
    for name, values in seconds.items():
        row = table[name] = {
            "rate": amount / statistics.median(values),
            "lowest": amount / max(values),
            "highest": amount / min(values),
            "ratio": statistics.median(c / v for v, c in zip(values, seconds[ceiling], strict=True)),
        }
        print(
            f"{name:36s} {row['rate']:8.2f} {unit} ({row['lowest']:.2f} to {row['highest']:.2f}), "
            f"{row['ratio']:5.2f} of the ceiling",
            flush=True,
        )
    return table


def loader(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    from mula_titan.data.loader import TokenDataLoader

    path = folder / "tokens.npy"
    random = np.random.default_rng(0)
    tokens = random.integers(1, VOCAB, args.tokens, dtype=np.uint16)
    tokens[random.integers(0, args.tokens, args.tokens // 1000)] = EOS
    np.save(path, tokens)

    def ours(**changes: object) -> Callable[[], None]:
        config = TokenDataLoader.Config(dataset_path=str(path), vocab_size=VOCAB, **changes)

        class Vocabulary:
            eos_id = EOS

            @staticmethod
            def get_vocab_size() -> int:
                return VOCAB

        batches = iter(
            TokenDataLoader(
                config, dp_world_size=1, dp_rank=0, tokenizer=Vocabulary(), seq_len=SEQ_LEN, local_batch_size=BATCH
            )
        )
        return lambda: read(batches)

    def copies() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        data = np.load(path, mmap_mode="r")
        while True:
            starts = random.integers(0, len(data) - SEQ_LEN - 1, BATCH)
            windows = np.stack([data[start : start + SEQ_LEN + 1] for start in starts]).astype(np.int64)
            yield torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())

    def read(batches: Iterator) -> None:
        for _ in islice(batches, args.batches):
            pass

    plain = copies()
    ceiling = "copies of random windows"
    seconds = in_turns(
        {
            ceiling: lambda: read(plain),
            "loader, masks at documents": ours(),
            "loader, positions through the window": ours(document_mask=False),
            "loader, no thread that reads ahead": ours(prefetch=0),
        },
        args.rounds,
    )
    table = show(seconds, args.batches * BATCH * SEQ_LEN / 1e6, "M tokens/s", ceiling)
    slowest = min(row["rate"] for row in table.values()) * 1e6 / args.training_rate
    print(f"The slowest is {slowest:.0f} times a training of {args.training_rate:,.0f} tokens/s.")
    return table


def tokenizing(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    from mula_titan.data.shard_worker import load_tokenizer
    from mula_titan.data.tokenize import TokenizeOptions, tokenize

    lines = TEXT.read_bytes()
    path = folder / "text.jsonl"
    path.write_bytes(lines * max(1, args.megabytes * 10**6 // len(lines)))
    documents = [json.loads(line)["text"] for line in path.read_bytes().splitlines()]
    megabytes = sum(len(text.encode()) for text in documents) / 1e6
    cores = len(os.sched_getaffinity(0))
    tokenizer = load_tokenizer(TOKENIZER)

    def whole(workers: int) -> Callable[[], None]:
        def run() -> None:
            out = folder / "out"
            tokenize(
                TokenizeOptions(
                    inputs=[str(path)],
                    output=out,
                    tokenizer=TOKENIZER,
                    workers=workers,
                    part_mb=max(1, args.megabytes // (2 * cores)),
                )
            )
            shutil.rmtree(out)

        return run

    def alone(encode: Callable) -> Callable[[], None]:
        def run() -> None:
            for first in range(0, len(documents), 256):
                encode(documents[first : first + 256], add_special_tokens=False)

        return run

    ceiling = "encode_batch_fast alone"
    seconds = in_turns(
        {
            ceiling: alone(tokenizer.encode_batch_fast),
            "encode_batch alone": alone(tokenizer.encode_batch),
            f"tokenize, {cores} processes": whole(cores),
            "tokenize, in this process": whole(1),
        },
        args.rounds,
    )
    print(f"{megabytes:.1f} MB of text in {len(documents)} documents, {cores} cores")
    return show(seconds, megabytes, "MB/s", ceiling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["loader", "tokenize"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=200, help="batches a round")
    parser.add_argument("--tokens", type=int, default=64 * 10**6, help="size of the data")
    parser.add_argument("--training-rate", type=float, default=110_000, help="tokens/s of a device, to compare with")
    parser.add_argument("--megabytes", type=int, default=48, help="of text")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with tempfile.TemporaryDirectory() as folder:
        table = (loader if args.what == "loader" else tokenizing)(Path(folder), args)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
