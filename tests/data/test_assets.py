"""The bundled text and tokenizer."""

import json
import subprocess
import sys

import pytest
from data_cases import ASSETS
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from transformers import AutoTokenizer


def texts(name: str) -> list[str]:
    return [json.loads(line)["text"] for line in (ASSETS / "austen" / name).read_text(encoding="utf-8").splitlines()]


def test_tokenizer_is_made_again_byte_for_byte(tmp_path):
    script = ASSETS.parent / "scripts" / "train_tokenizer.py"
    subprocess.run([sys.executable, script, "--output", tmp_path], check=True, capture_output=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (ASSETS / "tokenizer" / name).read_bytes()


@pytest.mark.parametrize("name, documents", [("train.jsonl", 111), ("validation.jsonl", 5)])
def test_both_libraries_read_the_tokenizer(name, documents):
    ours = HuggingFaceTokenizer(tokenizer_path=str(ASSETS / "tokenizer"))
    theirs = AutoTokenizer.from_pretrained(ASSETS / "tokenizer")
    assert (ours.eos_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 0, 1)
    assert ours.get_vocab_size() == len(theirs) == 2048
    assert len(texts(name)) == documents
    for text in texts(name)[:3]:
        ids = ours.encode(text, add_bos=False, add_eos=False)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text


def test_validation_text_is_not_in_the_training_text():
    lines = {line for text in texts("train.jsonl") for line in text.split("\n") if len(line) > 40}
    assert not lines & {line for text in texts("validation.jsonl") for line in text.split("\n")}
