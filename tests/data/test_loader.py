"""The loader: global order at any data-parallel size, exact resume, epochs, ends, positions and labels, mixing."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from data_cases import ASSETS, SEQ_LEN, Ranks, build, write_json_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from mula_titan.data.loader import TokenDataLoader, TokenSource
from mula_titan.data.tokenize import TokenizeOptions, tokenize


def test_epochs_differ_and_hold_each_window_once(counting_file):
    stream = Ranks(counting_file(8), dp=2, batch=1).take(12)
    epochs = [stream[i : i + 8] for i in (0, 8, 16)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("prefetch", [0, 3])
def test_resumed_runs_give_the_unbroken_stream(counting_file, prefetch):
    path = counting_file(10)
    unbroken = Ranks(path, dp=1, batch=1).take(25)
    saves = [4, 9, 10, 11, 14, 25]
    for first in range(len(saves)):  # run to each save point, then resume at all that follow
        stream, state = [], None
        for stop in saves[first:]:
            run = Ranks(path, dp=1, batch=1, state=state, prefetch=prefetch)
            stream += run.take(stop - len(stream))
            state = run.state()
            assert state == {"sample_index": stop}
        assert stream == unbroken


def test_other_data_parallel_sizes_go_on_in_the_same_order(counting_file):
    path = counting_file(16)
    one_by_one = Ranks(path, dp=1, batch=1).take(24)
    first = Ranks(path, dp=4, batch=1)  # global batch 4 in all three runs
    stream = first.take(2)
    second = Ranks(path, dp=2, batch=1, state=first.state())  # two accumulation steps
    stream += second.take(4)
    third = Ranks(path, dp=1, batch=2, state=second.state())
    stream += third.take(4)
    assert stream == one_by_one


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4))
def test_any_chain_of_splits_gives_one_order(counting_file, runs):
    path = counting_file(7)
    stream, state = [], None
    for dp, batch, nexts in runs:
        run = Ranks(path, dp=dp, batch=batch, state=state)
        stream += run.take(nexts)
        state = run.state()
    assert stream == Ranks(path, dp=1, batch=1).take(len(stream))


@pytest.mark.parametrize("dp, batch", [(1, 4), (2, 2), (4, 1), (2, 1), (1, 1)])
def test_end_of_data_is_the_same_step_on_all_ranks_and_for_all_splits(counting_file, dp, batch):
    nexts_per_step = 4 // (dp * batch)  # global batch 4
    counts = [len(list(build(counting_file(11), dp=dp, rank=r, batch=batch, infinite=False))) for r in range(dp)]
    assert len(set(counts)) == 1
    assert counts[0] // nexts_per_step == 2


def test_data_ends_before_a_step_that_it_cannot_fill(counting_file):
    """Else the data position saved at the end would be ahead of the weights."""
    config = {"infinite": False, "global_batch_size": 4}
    loader = build(counting_file(11), dp=2, **config)
    assert len(list(loader)) == 4
    assert loader.state_dict() == {"sample_index": 8}
    loader.load_state_dict({"sample_index": 6})  # saved with another global batch size
    assert len(list(loader)) == 2
    assert loader.state_dict() == {"sample_index": 10}


def test_refuses_a_global_batch_that_the_ranks_cannot_split(counting_file):
    with pytest.raises(
        ValueError, match="global_batch_size 5 must be a multiple of 2 data-parallel ranks x local batch 1"
    ):
        build(counting_file(11), dp=2, global_batch_size=5)


def test_epochs_of_a_finite_loader(counting_file):
    assert len(list(build(counting_file(5), infinite=False, epochs=3))) == 15


@pytest.mark.parametrize("dp, batch", [(1, 1), (1, 3), (2, 2), (3, 2), (4, 8)])
def test_validation_counts_each_target_once_for_any_split(tmp_path, dp, batch):
    path = tmp_path / "odd.npy"
    np.save(path, np.arange(10 * SEQ_LEN + 3, dtype=np.int32))  # a tail of 2 targets
    config = {"infinite": False, "drop_last": False, "shuffle": False}
    ranks = [list(build(path, dp=dp, rank=rank, batch=batch, **config)) for rank in range(dp)]
    assert len({len(batches) for batches in ranks}) == 1
    labels = torch.cat([labels.flatten() for batches in ranks for _, labels in batches])
    targets = labels[labels != IGNORE_INDEX]
    assert sorted(targets.tolist()) == list(range(1, 10 * SEQ_LEN + 3))
    assert all(labels.shape == (batch, SEQ_LEN) for batches in ranks for _, labels in batches)


def test_state_stays_with_what_was_handed_over(counting_file):
    loader = build(counting_file(20), dp=3, batch=2, prefetch=8)
    iterator = iter(loader)
    assert loader.state_dict() == {"sample_index": 0}
    for handed_over in (1, 2, 3):
        next(iterator)
        assert loader.state_dict() == {"sample_index": handed_over * 6}


def test_loading_a_state_moves_a_running_iterator(counting_file):
    run = Ranks(counting_file(20), dp=1, batch=1, prefetch=4)
    stream = run.take(6)
    run.loaders[0].load_state_dict({"sample_index": 2})
    assert run.take(4) == stream[2:6]


def test_reader_thread_ends_with_the_iterator(counting_file):
    iterator = iter(build(counting_file(20)))
    next(iterator)
    assert any(thread.name.startswith("prefetch") for thread in threading.enumerate())
    iterator.close()
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())


def test_state_goes_through_a_checkpoint_to_another_data_parallel_size(counting_file, tmp_path):
    path = counting_file(12)
    run = Ranks(path, dp=4, batch=1)
    stream = run.take(2)
    dcp.save({"dataloader": run.loaders[3]}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    resumed = Ranks(path, dp=2, batch=2)
    for loader in resumed.loaders:
        dcp.load({"dataloader": loader}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert stream + resumed.take(3) == Ranks(path, dp=1, batch=1).take(20)


@pytest.mark.parametrize("state", [{}, {"dp_rank_0": b"", "world_size": 1}, {"sample_index": -1}])
def test_refuses_the_state_of_another_loader(counting_file, state):
    with pytest.raises(ValueError, match="another loader saved it"):
        build(counting_file(4)).load_state_dict(state)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A folder of two shards with short and long documents, and the documents' token ids."""
    folder = tmp_path_factory.mktemp("documents")
    texts = [
        "A.",
        "The quick brown fox jumps over the lazy dog. " * 3,
        "B",
        "Yes, it is <|endoftext|> so.",
        "Mrs. Bennet " * 5,
    ]
    write_json_lines(folder / "text" / "a.jsonl", texts[:3])
    write_json_lines(folder / "text" / "b.jsonl", ["", *texts[3:]])
    tokenize(TokenizeOptions(inputs=[str(folder / "text")], output=folder / "tokens", tokenizer=ASSETS / "tokenizer"))
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(ASSETS / "tokenizer"))
    tokenizer.tokenizer.encode_special_tokens = True
    return folder / "tokens", [[*tokenizer.encode(text, add_bos=False, add_eos=False), 0] for text in texts]


def read_all(loader: TokenDataLoader) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, positions and labels of a finite loader, flattened."""
    batches = list(loader)
    return (
        torch.cat([inputs["input"].flatten() for inputs, _ in batches]),
        torch.cat([inputs["positions"].flatten() for inputs, _ in batches]),
        torch.cat([labels.flatten() for _, labels in batches]),
    )


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("raw", [True, False])
def test_inputs_positions_and_labels(shards, tmp_path, document_mask, raw):
    folder, documents = shards
    tokens = [token for document in documents for token in document]
    config = {"infinite": False, "drop_last": False, "shuffle": False, "document_mask": document_mask}
    if raw:  # the same tokens without an index: documents end at the end-of-document id
        np.array(tokens, "<u2").tofile(tmp_path / "raw.npy")
        config["sources"] = [TokenSource(path=str(tmp_path / "raw.npy"), dtype="uint16", eos_id=0)]
    inputs, positions, labels = read_all(build(None if raw else folder, batch=2, vocab_size=2048, **config))

    expected_positions, expected_labels = [], []
    for document in documents:
        for i, token in enumerate(document):
            place = len(expected_positions)
            in_window = place % SEQ_LEN
            expected_positions.append(min(i, in_window) if document_mask else in_window)
            expected_labels.append(IGNORE_INDEX if document_mask and i == 0 else token)
    valid = len(tokens) - 1
    assert inputs[: valid + 1].tolist()[:valid] == tokens[:valid]
    assert positions.tolist()[:valid] == expected_positions[:valid]
    assert labels.tolist()[:valid] == expected_labels[1:]
    assert set(labels.tolist()[valid:]) <= {IGNORE_INDEX}


def test_mixture_gives_token_shares_and_resumes(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(50 * SEQ_LEN + 1, np.int32))  # ids tell the source
    np.save(tmp_path / "b.npy", np.ones(3 * SEQ_LEN + 1, np.int32))
    sources = [TokenSource(path=str(tmp_path / "a.npy"), weight=3.0), TokenSource(path=str(tmp_path / "b.npy"))]

    def draw(loader: TokenDataLoader, nexts: int) -> list[int]:
        iterator = iter(loader)
        return [source for _ in range(nexts) for source in next(iterator)[0]["input"][:, 0].tolist()]

    loader = build(None, sources=sources, batch=4)
    drawn = draw(loader, 50)
    for n in range(1, len(drawn) + 1):
        assert abs(sum(drawn[:n]) - n / 4) < 2
    resumed = build(None, sources=sources, batch=2)
    resumed.load_state_dict({"sample_index": 77})
    assert draw(resumed, 40) == drawn[77:157]


def test_last_window_of_a_file_over_4_gb(tmp_path):
    path = tmp_path / "large.bin"
    with path.open("wb") as file:  # sparse: takes no room
        file.truncate(5 * 2**30)
        file.seek(-2 * (SEQ_LEN + 1), 2)
        np.arange(1, SEQ_LEN + 2, dtype="<u2").tofile(file)
    loader = build(None, sources=[TokenSource(path=str(path), dtype="uint16")], shuffle=False)
    tokens = 5 * 2**29
    last = (tokens - 1) // SEQ_LEN - 1
    loader.load_state_dict({"sample_index": last})
    inputs, labels = next(iter(loader))
    window = np.zeros(tokens - last * SEQ_LEN, np.int64)
    window[-SEQ_LEN - 1 :] = np.arange(1, SEQ_LEN + 2)
    assert inputs["input"][0].tolist() == window[:SEQ_LEN].tolist()
    assert labels[0].tolist() == window[1 : SEQ_LEN + 1].tolist()
    assert loader.locate(last).token == last * SEQ_LEN > 2**31


def test_token_id_past_the_embedding_names_file_place_and_value(tmp_path):
    ids = np.arange(9000, dtype=np.int32) % 100
    ids[8000] = 100
    np.save(tmp_path / "bad.npy", ids)
    loader = build(tmp_path / "bad.npy", vocab_size=100, infinite=False)
    with pytest.raises(ValueError, match=r"bad.npy: token id 100 at token 8000 is outside \[0, 100\)"):
        list(loader)
    assert len(list(build(tmp_path / "bad.npy", vocab_size=101, infinite=False))) == 2249


def test_works_with_torchtitans_validator(shards):
    """The validator sets `infinite` by its own steps and gives the tokenizer; vocabulary and eos come from there."""
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(ASSETS / "tokenizer"))
    config = TokenDataLoader.Config(dataset_path=str(shards[0]), shuffle=False, drop_last=False)
    runtime = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": tokenizer, "seq_len": SEQ_LEN, "local_batch_size": 2}
    tokens = sum(map(len, shards[1]))
    windows = -(-(tokens - 1) // SEQ_LEN)
    assert len(list(replace(config, infinite=False).build(**runtime))) == -(-windows // 2)
    iterator = iter(replace(config, infinite=True).build(**runtime))
    assert [next(iterator)[1].shape for _ in range(windows)] == [(2, SEQ_LEN)] * windows


def test_locate_names_file_and_epoch(shards):
    loader = build(shards[0], vocab_size=2048, shuffle=False)
    first_of_b = sum(map(len, shards[1][:3]))
    window = -(-first_of_b // SEQ_LEN)
    location = loader.locate(window)
    assert Path(location.path).name == "shard-00001.tokens"
    assert location.token == window * SEQ_LEN - first_of_b
    assert loader.locate(window + loader._order.windows[0]).epoch == 1


@pytest.mark.parametrize("config, message", [
    ({}, "set exactly one of"),
    ({"dataset_path": "a", "sources": [TokenSource(path="b")]}, "set exactly one of"),
    ({"dataset_path": "/nowhere"}, "/nowhere: no such file or folder"),
    ({"dataset": "c4"}, "data sets have no names here"),
    ({"sources": [TokenSource()]}, "a source has no path"),
    ({"sources": [TokenSource(path="a", weight=-1)]}, "weight = -1 must be a positive number"),
    ({"sources": [TokenSource(path="a", dtype="float32")]}, "dtype = 'float32' must be one of"),
    ({"dataset_path": "a", "seed": -1}, "seed = -1 must be at least 0"),
    ({"dataset_path": "a", "epochs": 0}, "epochs = 0 must be at least 1"),
])  # fmt: skip
def test_refuses_bad_settings(config, message):
    with pytest.raises(ValueError, match=message):
        TokenDataLoader.Config(vocab_size=10, **config).build(
            dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=4, local_batch_size=1
        )


def test_refuses_too_little_data(counting_file):
    with pytest.raises(ValueError, match="5 tokens are fewer than one window of seq_len \\+ 1 = 9"):
        TokenDataLoader.Config(dataset_path=str(counting_file(1)), vocab_size=10).build(
            dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=8, local_batch_size=1
        )
