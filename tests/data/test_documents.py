"""Reading text: every document once however a file is cut, and messages that name file and line."""

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import ASSETS, write_json_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mula_titan.data import documents
from mula_titan.data.documents import cut_into_parts, read_documents


def read_all(path, *, part_bytes=10**9, text_key="text") -> list[str]:
    """Documents of all parts, pieces joined; checks that the file's bytes are reported."""
    found, piece, used = [], "", []
    for part in cut_into_parts(path, path.name, part_bytes):
        for text, ends_document in read_documents(part, text_key, used.append):
            piece += text
            if ends_document:
                found.append(piece)
                piece = ""
    assert not piece
    assert abs(sum(used) - path.stat().st_size) <= path.stat().st_size / 20
    return found


TEXTS = ["one", "", "zwei\nLinien", "drei \u00e9\U0001f600", "x" * 70, "end"]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(part_bytes=st.integers(1, 250), final_newline=st.booleans(), blank=st.integers(0, 5))
def test_json_lines_are_read_once_however_they_are_cut(tmp_path, part_bytes, final_newline, blank):
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS]
    lines.insert(blank, "")
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n" * final_newline, encoding="utf-8")
    assert read_all(path, part_bytes=part_bytes) == TEXTS


@pytest.mark.parametrize("suffix, codec", [(".gz", "gzip"), (".zst", "zstd")])
def test_compressed_json_lines(tmp_path, suffix, codec):
    lines = write_json_lines(tmp_path / "a.jsonl", TEXTS).read_bytes()
    path = tmp_path / f"a.jsonl{suffix}"
    # Two members or frames, as parallel compressors write them.
    path.write_bytes(pa.compress(lines[:50], codec, asbytes=True) + pa.compress(lines[50:], codec, asbytes=True))
    assert read_all(path) == TEXTS
    whole = pa.compress(random.Random(0).randbytes(5000).hex().encode(), codec, asbytes=True)
    for damaged in (whole[:-9], whole[:-4], b"not compressed at all"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"a.jsonl{suffix}: cannot be read to its end"):
            list(read_documents(cut_into_parts(path, "a", 10**9)[0], "text", int))


@pytest.mark.parametrize("line, message", [
    ('{"text": "a"', "not JSON"),
    ("[1]", "a JSON list, not an object with a field 'text'"),
    ('{"id": 1, "content": "a"}', r"no field 'text'; there are \['content', 'id'\]: set text_key"),
    ('{"text": 7}', "field 'text' holds int, not text"),
])  # fmt: skip
@pytest.mark.parametrize("part_bytes", [10**9, 40])
def test_bad_line_is_named(tmp_path, line, message, part_bytes):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "first"}\n\n{"text": "third"}\n{"text": "fourth"}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"a.jsonl, line 5: {message}"):
        read_all(path, part_bytes=part_bytes)


def test_other_text_key_and_half_surrogate(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "a \\ud83d b \\ud83d\\ude00"}\n')
    assert read_all(path, text_key="body") == ["a \ufffd b \U0001f600"]


@pytest.mark.parametrize("part_bytes", [1, 150, 10**9])
def test_parquet(tmp_path, part_bytes):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(6), "text": TEXTS}), path, row_group_size=2)
    parts = cut_into_parts(path, "a", part_bytes)
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (0, 3)
    assert read_all(path, part_bytes=part_bytes) == TEXTS
    with pytest.raises(ValueError, match=r"no column 'body'; there are \['id', 'text'\]"):
        read_all(path, text_key="body")
    with pytest.raises(ValueError, match="column 'id' holds int64, not text"):
        read_all(path, text_key="id")


def test_not_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"a.parquet: not a Parquet file"):
        cut_into_parts(path, "a", 10)


@pytest.mark.parametrize("block", [7, 1000, 1 << 22])
def test_text_file_is_one_document(tmp_path, monkeypatch, block):
    monkeypatch.setattr(documents, "BLOCK_BYTES", block)
    text = json.loads((ASSETS / "austen" / "validation.jsonl").read_text(encoding="utf-8").split("\n")[0])["text"]
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + (text + "\u00e9\r\n\u4e16").encode())
    assert read_all(path) == [text + "\u00e9\r\n\u4e16"]
    pieces = [piece for piece, _ in read_documents(cut_into_parts(path, "a", 1)[0], "", int)]
    assert (len(pieces) > 1) == (block < 1 << 22)
    assert all(piece.startswith("\n") for piece in pieces[1:])


@pytest.mark.parametrize("tail", [b"\xff ok", b"\xe4\xb8"])
def test_text_that_is_not_utf8(tmp_path, tail):
    (tmp_path / "a.txt").write_bytes(b"good " + tail)
    with pytest.raises(ValueError, match=r"a.txt: not UTF-8 text"):
        read_all(tmp_path / "a.txt")
