"""Token files of other programs, and shards that don't fit the run."""

import json
import shutil

import numpy as np
import pytest
from data_cases import ASSETS, write_json_lines

from mula_titan.data.token_files import TokenFiles
from mula_titan.data.tokenize import TokenizeOptions, tokenize


def open_files(path, *, dtype="", eos_id=None, vocab_size=2**16) -> TokenFiles:
    return TokenFiles(str(path), dtype=dtype, eos_id=eos_id, vocab_size=vocab_size)


def read(files: TokenFiles, start: int, count: int) -> tuple[list[int], list[int]]:
    """Tokens and the places of document starts among them."""
    tokens_S, is_start_S = np.zeros(count, np.int64), np.zeros(count, bool)
    found = files.read(start, tokens_S, is_start_S)
    return tokens_S[:found].tolist(), np.flatnonzero(is_start_S).tolist()


IDS = np.array([5, 6, 0, 7, 0, 8, 65535, 9] * 4)


def test_optimus_int32_with_numpy_header(tmp_path):
    np.save(tmp_path / "web_0.npy", IDS.astype(np.int32))
    assert read(open_files(tmp_path / "web_0.npy", eos_id=0), 2, 5) == ([0, 7, 0, 8, 65535], [1, 3])


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_olmo_headerless(tmp_path, dtype):
    IDS.astype(dtype).tofile(tmp_path / "part-0.npy")
    assert read(open_files(tmp_path / "part-0.npy", dtype=dtype, eos_id=0), 0, 7) == (IDS[:7].tolist(), [0, 3, 5])


def test_files_of_a_folder_are_one_array_in_name_order(tmp_path):
    for i, name in enumerate(["b/2.npy", "a/10.npy", "a/09.npy"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.save(tmp_path / name, np.full(3, i, np.int32))
    for path in (tmp_path, tmp_path / "**" / "*.npy"):
        files = open_files(path)
        assert files.num_tokens == 9
        assert read(files, 1, 7) == ([2, 2, 1, 1, 1, 0, 0], [2, 5])
        assert files.locate(4)[0].path.name == "10.npy"


def test_windows_of_raw_files_begin_documents_after_an_end_outside(tmp_path):
    np.save(tmp_path / "x.npy", IDS.astype(np.int32))
    assert read(open_files(tmp_path / "x.npy", eos_id=0), 3, 2) == ([7, 0], [0])


def test_embedding_rows(tmp_path):
    ids = np.array([0, 65535, 65536], np.uint32)
    np.save(tmp_path / "x.npy", ids)
    with pytest.raises(ValueError, match=r"token id 65536 at token 2 is outside \[0, 65536\)"):
        open_files(tmp_path / "x.npy", vocab_size=65536)
    assert read(open_files(tmp_path / "x.npy", vocab_size=65537), 0, 3)[0] == [0, 65535, 65536]


def test_negative_id(tmp_path):
    np.save(tmp_path / "x.npy", np.array([3, -1, 4], np.int32))
    with pytest.raises(ValueError, match="token id -1 at token 1"):
        open_files(tmp_path / "x.npy")


def raw(dtype, ids=IDS):
    return np.asarray(ids).astype(dtype).tobytes()


@pytest.mark.parametrize("content, dtype, message", [
    (b"", "uint16", "empty file"),
    (raw("<u2") + b"x", "uint16", "65 bytes are no whole number of uint16 tokens"),
    (raw("<u2"), "uint32", "token id 393221 at token 0 is outside"),
    (raw("<u4", np.arange(300, 400)), "uint16", "as if the file held 32-bit ids"),
    (raw("<u4", np.arange(65500, 65600)), "uint16", "as if the file held 32-bit ids"),
    (raw("<u2"), "", 'has no NumPy header; say what it holds, e.g. dtype = "uint16"'),
], ids=["empty", "odd", "read as 32 bits", "read as 16 bits", "wide vocabulary", "no dtype"])  # fmt: skip
def test_refuses_headerless(tmp_path, content, dtype, message):
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(ValueError, match=f"x.npy: .*{message}"):
        open_files(tmp_path / "x.npy", dtype=dtype, vocab_size=2**16 + 200)


@pytest.mark.parametrize("array, dtype, message", [
    (np.zeros((2, 2), np.int32), "", r"int32 of shape \(2, 2\), not one row"),
    (np.zeros(4, np.float32), "", "float32 of shape"),
    (np.zeros(4, np.int32), "uint16", "its NumPy header says int32, not uint16"),
    (np.zeros(0, np.int32), "", "holds no tokens"),
])  # fmt: skip
def test_refuses_npy(tmp_path, array, dtype, message):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ValueError, match=f"x.npy: .*{message}"):
        open_files(tmp_path / "x.npy", dtype=dtype)


def test_refuses_a_truncated_npy(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(100, np.int32))
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-4])
    with pytest.raises(ValueError, match="don't hold the 100 tokens of its header"):
        open_files(tmp_path / "x.npy")


def test_refuses_a_folder_without_token_files(tmp_path):
    with pytest.raises(ValueError, match="no token files here; `mula-titan tokenize` makes them"):
        open_files(tmp_path)


@pytest.fixture
def shards(tmp_path):
    write_json_lines(tmp_path / "a.jsonl", ["zebra quiz", "two"])
    return tokenize(
        TokenizeOptions(inputs=[str(tmp_path / "a.jsonl")], output=tmp_path / "t", tokenizer=ASSETS / "tokenizer")
    )


def test_shards_of_another_vocabulary(shards):
    largest = json.loads((shards / "index.json").read_text())["max_token_id"]
    open_files(shards, vocab_size=largest + 1)
    with pytest.raises(ValueError, match=f"token id {largest} doesn't fit the model's {largest} embedding rows"):
        open_files(shards, vocab_size=largest)


def test_shards_of_another_tokenizer(shards):
    open_files(shards, eos_id=0)
    with pytest.raises(ValueError, match=r"end-of-document id 0 \(<\|endoftext\|>\), the run's tokenizer has 7"):
        open_files(shards, eos_id=7)


def test_incomplete_shards(shards):
    tokens = shards / "shard-00000.tokens"
    size = tokens.stat().st_size
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(ValueError, match=f"shard-00000.tokens: has {size - 2} bytes, .* says {size} bytes"):
        open_files(shards)
    tokens.unlink()
    with pytest.raises(ValueError, match=r"shard-00000.tokens: is missing"):
        open_files(shards)
    (shards / "index.json").unlink()
    with pytest.raises(ValueError, match=r"has shards but no index.json: tokenising was not finished"):
        open_files(shards)


@pytest.mark.parametrize("content, message", [
    ("{", "not a JSON file"),
    ('{"format": "other/7"}', "format 'other/7', this version reads 'mula-titan-tokens/1'"),
    ('{"format": "mula-titan-tokens/1"}', "missing or unknown field"),
])  # fmt: skip
def test_foreign_index(shards, content, message):
    (shards / "index.json").write_text(content)
    with pytest.raises(ValueError, match=f"index.json: {message}"):
        open_files(shards)


def test_shards_can_be_moved(shards, tmp_path):
    shutil.move(shards, tmp_path / "elsewhere")
    assert open_files(tmp_path / "elsewhere").num_tokens > 0
