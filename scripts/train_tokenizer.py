"""Trains the bundled byte-level BPE tokenizer from the bundled text: the same text gives the same bytes.

Usage: python scripts/train_tokenizer.py [--text FILE.jsonl] [--output FOLDER] [--vocab-size N]
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ASSETS = Path(__file__).resolve().parent.parent / "assets"
EOS, PADDING = "<|endoftext|>", "<|padding|>"


def documents(path: Path) -> Iterator[str]:
    """Yields the text of each JSON line."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def train(text: Path, vocab_size: int) -> Tokenizer:
    """Trains a BPE over bytes; ids 0 and 1 are the end of a document and padding, 2 to 257 are the 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(text), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and the tokenizer_config.json that torchtitan and transformers read beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PADDING,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=ASSETS / "austen" / "train.jsonl")
    parser.add_argument("--output", type=Path, default=ASSETS / "tokenizer")
    parser.add_argument("--vocab-size", type=int, default=2048)
    options = parser.parse_args()
    tokenizer = train(options.text, options.vocab_size)
    save(tokenizer, options.output)
    print(f"{options.output}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
