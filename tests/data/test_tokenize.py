"""Tokenising: right tokens, same bytes however it is run, restart after a kill, and refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from data_cases import ASSETS, write_json_lines
from tokenizers import Tokenizer, models, pre_tokenizers

from mula_titan.data import documents, shard_worker
from mula_titan.data.shards import blake2b_of, read_index
from mula_titan.data.tokenize import TokenizeOptions, tokenize

TRAIN = ASSETS / "austen" / "train.jsonl"


def run(*inputs, output, **options) -> Path:
    options.setdefault("tokenizer", ASSETS / "tokenizer")
    return tokenize(TokenizeOptions(inputs=[str(path) for path in inputs], output=output, **options))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tokens_of(folder: Path) -> np.ndarray:
    """All tokens of a folder, read without the package's own reader."""
    index = json.loads((folder / "index.json").read_text())
    return np.concatenate([np.fromfile(folder / s["tokens_file"], index["recipe"]["dtype"]) for s in index["shards"]])


@pytest.fixture(scope="module")
def bundled(tmp_path_factory) -> Path:
    return run(TRAIN, output=tmp_path_factory.mktemp("bundled") / "tokens")


def test_bundled_text(bundled):
    texts = [json.loads(line)["text"] for line in TRAIN.read_text(encoding="utf-8").splitlines()]
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer" / "tokenizer.json"))
    expected = [np.array([*encoding.ids, 0]) for encoding in tokenizer.encode_batch(texts)]
    index = read_index(bundled / "index.json")
    assert np.array_equal(tokens_of(bundled), np.concatenate(expected))
    offsets = np.fromfile(bundled / "shard-00000.offsets", np.int64)
    assert offsets.tolist() == [0, *np.cumsum([len(ids) for ids in expected])]
    assert (index.num_tokens, index.num_documents, index.max_token_id) == (offsets[-1], 111, 2047)
    assert (index.recipe.dtype, index.recipe.vocab_size, index.recipe.eos_id) == ("uint16", 2048, 0)
    assert index.recipe.sources[0].blake2b == blake2b_of(TRAIN)
    assert index.shards[0].tokens_blake2b == blake2b_of(bundled / "shard-00000.tokens")
    assert not (bundled / "unfinished").exists()


def test_workers_and_parts_change_no_token(bundled, tmp_path):
    one = run(TRAIN, output=tmp_path / "one", workers=1, part_mb=1)
    two = run(TRAIN, output=tmp_path / "two", workers=2, part_mb=1)
    assert len(read_index(one / "index.json").shards) == 2
    assert tree(one) == tree(two)
    assert np.array_equal(tokens_of(one), tokens_of(bundled))


def test_a_complete_folder_is_left_alone(bundled):
    before = {path: path.stat().st_mtime_ns for path in bundled.iterdir()}
    assert run(TRAIN, output=bundled) == bundled
    assert {path: path.stat().st_mtime_ns for path in bundled.iterdir()} == before


CHILD = """
import sys
from pathlib import Path
from mula_titan.data.tokenize import TokenizeOptions, tokenize
tokenize(TokenizeOptions(inputs=[sys.argv[1]], output=Path(sys.argv[2]), tokenizer=Path(sys.argv[3]), workers=1))
"""


def test_kill_and_restart_give_the_same_bytes(tmp_path):
    text = TRAIN.read_text(encoding="utf-8").splitlines()
    for i in range(20):
        texts = [json.loads(line)["text"] for line in text[i : i + 4]]
        write_json_lines(tmp_path / "text" / f"{i:02d}.jsonl", texts)
    folder, notes = tmp_path / "killed", tmp_path / "killed" / "unfinished"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, tmp_path / "text", folder, ASSETS / "tokenizer"], stderr=subprocess.DEVNULL
    )
    while child.poll() is None and len(list(notes.glob("shard-*.json"))) < 4:
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    child.wait()
    kept = sorted(notes.glob("shard-*.json"))
    assert 4 <= len(kept) < 20
    assert not (folder / "index.json").exists()

    untouched, damaged = folder / "shard-00000.tokens", folder / "shard-00001.tokens"
    written = untouched.stat().st_mtime_ns
    damaged.write_bytes(bytes(damaged.stat().st_size))  # right size, wrong bytes: the restart must notice
    (folder / "shard-00019.tokens.1.tmp").write_bytes(b"half a shard")
    run(tmp_path / "text", output=folder)
    assert untouched.stat().st_mtime_ns == written
    assert tree(folder) == tree(run(tmp_path / "text", output=tmp_path / "unbroken"))


def begun(tmp_path: Path) -> tuple[Path, Path]:
    """An input, and a folder whose run stopped at a bad line after the first file."""
    write_json_lines(tmp_path / "text" / "a.jsonl", ["first"])
    (tmp_path / "text" / "b.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match=r"b.jsonl, line 1: not JSON"):
        run(tmp_path / "text", output=tmp_path / "out")
    return tmp_path / "text", tmp_path / "out"


@pytest.mark.parametrize("change, message", [
    ({"text_key": "body"}, "text_key was 'text', is 'body'"),
    ({"part_mb": 1}, "part_mb was 256, is 1"),
    ({"eos_token": "<|padding|>"}, "eos_id was 0, is 1"),
    ({"file": "a.jsonl"}, "1 input files changed (a.jsonl)"),
    ({"file": "c.jsonl"}, "1 input files new (c.jsonl)"),
    ({"tokenizer": True}, "tokenizer_blake2b was"),
])  # fmt: skip
def test_restart_with_other_settings_is_refused(tmp_path, change, message):
    text, out = begun(tmp_path)
    if name := change.pop("file", None):
        write_json_lines(text / name, ["other"])
    if change.pop("tokenizer", None):
        shutil.copytree(ASSETS / "tokenizer", tmp_path / "tokenizer")
        with (tmp_path / "tokenizer" / "tokenizer.json").open("a") as file:
            file.write("\n")
        change["tokenizer"] = tmp_path / "tokenizer"
    with pytest.raises(ValueError) as error:
        run(text, output=out, **change)
    assert str(error.value).startswith(f"{out}: was tokenised with other settings: ")
    assert message in str(error.value)


def test_repaired_input_needs_a_fresh_folder_and_then_works(tmp_path):
    text, out = begun(tmp_path)
    write_json_lines(text / "b.jsonl", ["second"])
    with pytest.raises(ValueError, match=r"1 input files changed \(b.jsonl\)"):
        run(text, output=out)
    shutil.rmtree(out)
    assert read_index(run(text, output=out) / "index.json").num_documents == 2


def test_two_runs_into_one_folder_are_refused(tmp_path):
    import fcntl

    (tmp_path / "out").mkdir()
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(ValueError, match="another run is writing here"):
            run(write_json_lines(tmp_path / "a.jsonl", ["a"]), output=tmp_path / "out")
    finally:
        os.close(descriptor)


def test_long_text_file_gives_the_tokens_of_one_document(tmp_path, monkeypatch):
    text = json.loads(TRAIN.read_text(encoding="utf-8").split("\n")[0])["text"]
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(documents, "BLOCK_BYTES", 300)
    monkeypatch.setattr(shard_worker, "BATCH_CHARACTERS", 1000)
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer" / "tokenizer.json"))
    folder = run(tmp_path / "a.txt", output=tmp_path / "out")
    assert tokens_of(folder).tolist() == [*tokenizer.encode(text).ids, 0]
    assert np.fromfile(folder / "shard-00000.offsets", np.int64).tolist() == [0, len(tokens_of(folder))]


def word_tokenizer(folder: Path, vocabulary: list[str], **config) -> Path:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_tokenizer_that_cannot_be_cut_is_refused(tmp_path, monkeypatch):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # adds a blank to each piece
    tokenizer.train_from_iterator(["ab cd\nef gh " * 20])
    tokenizer.add_special_tokens(["</s>"])
    (tmp_path / "t").mkdir()
    tokenizer.save(str(tmp_path / "t" / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("ab cd\nef gh\n" * 20)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 50)
    with pytest.raises(ValueError, match=r"a.txt: too long for one document with this tokenizer"):
        run(tmp_path / "a.txt", output=tmp_path / "out", tokenizer=tmp_path / "t", eos_token="</s>")


@pytest.mark.parametrize("size, dtype", [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_dtype_follows_the_vocabulary(tmp_path, size, dtype):
    words = ["?", "</s>", *(f"w{i}" for i in range(2, size))]
    folder = word_tokenizer(tmp_path / "t", words, eos_token={"content": "</s>"})
    path = write_json_lines(tmp_path / "a.jsonl", [f"w2 {words[-1]} unknown"])
    out = run(path, output=tmp_path / "out", tokenizer=folder)
    assert read_index(out / "index.json").recipe.dtype == dtype
    assert np.fromfile(out / "shard-00000.tokens", dtype).tolist() == [2, size - 1, 0, 1]


def test_empty_documents_are_left_out_and_counted(tmp_path):
    index = read_index(
        run(write_json_lines(tmp_path / "a.jsonl", ["", "a", ""]), output=tmp_path / "out") / "index.json"
    )
    assert (index.num_documents, index.shards[0].empty_documents) == (1, 2)


def test_text_cannot_forge_the_end_of_a_document(tmp_path):
    out = run(write_json_lines(tmp_path / "a.jsonl", ["a <|endoftext|> b"]), output=tmp_path / "out")
    assert np.flatnonzero(tokens_of(out) == 0).tolist() == [len(tokens_of(out)) - 1]


def test_truncation_and_padding_of_the_tokenizer_are_switched_off(tmp_path):
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer" / "tokenizer.json"))
    expected = [tokenizer.encode(text).ids for text in ("one two three four", "five")]
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    (tmp_path / "t").mkdir()
    tokenizer.save(str(tmp_path / "t" / "tokenizer.json"))
    path = write_json_lines(tmp_path / "a.jsonl", ["one two three four", "five"])
    out = run(path, output=tmp_path / "out", tokenizer=tmp_path / "t", eos_token="<|endoftext|>")
    assert tokens_of(out).tolist() == [*expected[0], 0, *expected[1], 0]


def test_inputs_are_found_in_order_and_once(tmp_path):
    for name in ("b/2.jsonl", "b/1.jsonl", "a.json.gz"):
        write_json_lines(tmp_path / name, [name])
    import gzip

    (tmp_path / "a.json.gz").write_bytes(gzip.compress((tmp_path / "a.json.gz").read_bytes()))
    (tmp_path / "notes.md").write_text("not data")
    out = run(tmp_path / "b" / "2.jsonl", tmp_path / "b", tmp_path / "*.gz", output=tmp_path / "out")
    assert [shard.source for shard in read_index(out / "index.json").shards] == ["b/2.jsonl", "b/1.jsonl", "a.json.gz"]


@pytest.mark.parametrize("inputs, options, message", [
    ([], {}, "no inputs"),
    (["missing.jsonl"], {}, "missing.jsonl: no such file or folder"),
    (["*.parquet"], {}, r"\*.parquet: no text files here; known: .jsonl, .json, .txt, .parquet, also .gz and .zst"),
    (["a.csv"], {}, "a.csv: unknown kind of text file"),
    (["a.jsonl"], {"tokenizer": Path("missing")}, "missing/tokenizer.json: no such file"),
    (["a.jsonl"], {"eos_token": "</s>"}, "has no token '</s>' to end documents with"),
    (["empty.jsonl"], {}, "empty.jsonl: no text in 1 files"),
])  # fmt: skip
def test_refuses(tmp_path, inputs, options, message):
    write_json_lines(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "a.csv").write_text("a")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=message):
        run(*(tmp_path / name for name in inputs), output=tmp_path / "out", **options)


def test_refuses_a_tokenizer_without_an_end(tmp_path):
    folder = word_tokenizer(tmp_path / "t", ["?", "a"])
    with pytest.raises(ValueError, match=r"tokenizer_config.json: names no eos_token; set eos_token"):
        run(write_json_lines(tmp_path / "a.jsonl", ["a"]), output=tmp_path / "out", tokenizer=folder)


def test_refuses_bad_options():
    with pytest.raises(ValueError, match="part_mb = 0 must be at least 1"):
        TokenizeOptions(part_mb=0)
