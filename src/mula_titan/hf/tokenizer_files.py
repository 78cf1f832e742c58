"""Tokenizer files that travel with a Hugging Face model, and the special token ids that its configuration needs."""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def special_token_ids(folder: Path, vocab_size: int) -> dict[str, int | None]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` of a tokenizer folder; None where it has none.

    Args:
        folder: holds ``tokenizer.json`` and usually ``tokenizer_config.json``.
        vocab_size: rows of the model's embedding.

    Raises:
        ValueError: no tokenizer there, or its ids don't fit the embedding.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing. Name the tokenizer's folder with --tokenizer.")
    tokenizer = Tokenizer.from_file(str(path))
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if largest >= vocab_size:
        raise ValueError(
            f"{path} has token id {largest}, but the model has {vocab_size} embedding rows: wrong tokenizer?"
        )
    settings: dict = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings |= json.loads((folder / name).read_text(encoding="utf-8"))
    ids: dict[str, int | None] = {}
    for kind in ("bos", "eos", "pad"):
        token = settings.get(f"{kind}_token")
        text = token.get("content") if isinstance(token, dict) else token
        ids[f"{kind}_token_id"] = tokenizer.token_to_id(text) if text else None
    return ids


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer files that exist in ``source``."""
    for name in _FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
