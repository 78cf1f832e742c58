"""The order of samples: epochs, shares, lengths. Everything here is arithmetic on indices."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mula_titan.data.order import MAX_WINDOWS, SampleOrder


def order_of(*windows: int, weights=None, seed=42, shuffle=True, epochs=None) -> SampleOrder:
    return SampleOrder(windows, weights or [1.0] * len(windows), seed=seed, shuffle=shuffle, epochs=epochs)


@settings(deadline=None, max_examples=30)
@given(windows=st.integers(1, 60), seed=st.integers(0, 2**40), epoch=st.integers(0, 10**6))
def test_each_window_comes_once_in_every_epoch(windows, seed, epoch):
    order = order_of(windows, seed=seed)
    samples = [order[epoch * windows + i] for i in range(windows)]
    assert {(source, of_epoch) for source, of_epoch, _ in samples} == {(0, epoch)}
    assert sorted(window for _, _, window in samples) == list(range(windows))


def test_epochs_seeds_and_sources_have_orders_of_their_own():
    order = order_of(50)
    epochs = [tuple(order[e * 50 + i][2] for i in range(50)) for e in range(6)]
    other_seed = order_of(50, seed=43)
    epochs += [tuple(other_seed[e * 50 + i][2] for i in range(50)) for e in range(6)]
    pair = order_of(50, 50)
    for source in (0, 1):
        epochs.append(tuple(w for s, _, w in (pair[i] for i in range(100)) if s == source))
    # Source 0 of the pair is shuffled like the single source of the same seed.
    assert epochs[12] == epochs[0]
    assert len(set(epochs)) == len(epochs) - 1


def test_order_is_pinned():
    """A release of grain that shuffles otherwise would change the data order of resumed runs: it must not go unseen."""
    order = order_of(10)
    assert [order[i][2] for i in range(20)] == [5, 9, 2, 4, 3, 0, 6, 1, 7, 8, 4, 7, 1, 6, 9, 0, 8, 3, 2, 5]


def test_without_shuffle_files_are_read_in_order():
    order = order_of(3, shuffle=False)
    assert [order[i] for i in range(5)] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1)]


@settings(deadline=None, max_examples=60)
@given(
    weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6),
    start=st.integers(0, 10**12),
)
def test_shares_hold_for_every_prefix_and_no_sample_is_lost(weights, start):
    order = order_of(*[7] * len(weights), weights=weights, shuffle=False)
    counts = order._counts(start)
    for i in range(start, start + 40):
        source, epoch, window = order[i]
        assert epoch * 7 + window == counts[source]  # each source goes on where it was: no gap, no repeat
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - (i + 1) * weight / sum(weights)) < len(weights) + 1e-3


def test_weights_are_exact_where_the_smallest_is_large():
    """grain's own mixing takes weights 1 : 1.0099 for 100 : 100."""
    order = order_of(5, 5, weights=[1.0, 1.0099])
    assert order._counts(20099) == [10000, 10099]


@settings(deadline=None, max_examples=60)
@given(
    windows=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 10), min_size=4, max_size=4),
    epochs=st.integers(1, 3),
)
def test_finite_order_ends_when_a_source_is_used_up(windows, weights, epochs):
    weights = weights[: len(windows)]
    order = order_of(*windows, weights=weights, epochs=epochs)
    limits = [epochs * count for count in windows]
    at_end, after = order._counts(len(order)), order._counts(len(order) + 1)
    assert all(count <= limit for count, limit in zip(at_end, limits, strict=True))
    assert any(count > limit for count, limit in zip(after, limits, strict=True))


def test_one_source_ends_after_its_epochs():
    assert len(order_of(10, epochs=3)) == 30


@pytest.mark.parametrize("windows, weights, message", [
    ([0], [1.0], "source 0 has 0 windows"),
    ([5, MAX_WINDOWS + 1], [1.0, 1.0], "source 1 has 4294967297 windows"),
    ([5, 5], [1.0, 0.0], "source 1 has weight 0.0"),
    ([5], [float("nan")], "source 0 has weight nan"),
])  # fmt: skip
def test_refuses(windows, weights, message):
    with pytest.raises(ValueError, match=message):
        SampleOrder(windows, weights, seed=0, shuffle=True, epochs=None)


def test_most_windows_that_the_shuffle_can_permute():
    order = order_of(MAX_WINDOWS)
    assert len({order[i][2] for i in range(1000)}) == 1000
    assert max(order[i][2] for i in range(100)) > MAX_WINDOWS // 2
