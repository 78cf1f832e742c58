"""Files that make safetensors a model that transformers loads: configuration, generation settings, tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch

from mula_titan.hf.hf_config import to_hf_config
from mula_titan.hf.tokenizer_files import copy_tokenizer, special_token_ids
from mula_titan.model.args import MulaArgs


def check_description(args: MulaArgs, tokenizer: Path | None) -> None:
    """Find out early whether :func:`write_description` will work.

    Raises:
        ValueError: a model that transformers can't represent, or a tokenizer that is missing or doesn't fit it.
    """
    to_hf_config(args)
    if tokenizer is not None:
        special_token_ids(tokenizer, args.vocab_size)


def write_description(folder: Path, args: MulaArgs, tokenizer: Path | None, dtype: torch.dtype) -> None:
    """Write ``config.json`` and ``generation_config.json`` and copy the tokenizer's files.

    Also completes what torchtitan's ``checkpoint.last_save_in_hf`` writes, which is weights alone.

    Args:
        folder: existing folder with the safetensors files.
        args: architecture of the model.
        tokenizer: folder of the tokenizer, or None to leave it and the special tokens' ids out.
        dtype: data type of the weights.

    Raises:
        ValueError: as :func:`check_description`.
    """
    ids: dict[str, int | None] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if tokenizer is not None:
        ids = special_token_ids(tokenizer, args.vocab_size)
        copy_tokenizer(tokenizer, folder)
    # transformers 4 and 5 both read torch_dtype; 4 doesn't know its new name, dtype.
    write_json(folder / "config.json", to_hf_config(args) | ids | {"torch_dtype": str(dtype).removeprefix("torch.")})
    known = {name: token for name, token in ids.items() if token is not None}
    write_json(folder / "generation_config.json", {"_from_model_config": True} | known)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
