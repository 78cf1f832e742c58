"""The global order: which window of which source is sample i, as a pure function of the seed.

grain's `MapDataset` shuffles by index in O(1) memory, with an order of its own for every epoch. Its mixing rounds
weights to 1/100 of the smallest one, so the shares are cut here, exactly.
"""

import sys
from collections.abc import Sequence
from fractions import Fraction

import grain
import numpy as np

# grain permutes 32-bit indices and silently repeats some beyond.
MAX_WINDOWS = 2**32


class SampleOrder:
    """Maps a global sample index to (source, epoch of the source, window of the source).

    Each source goes through its own epochs: in each, every window comes once, in a new order if `shuffle` is on.
    For every n, the first n samples hold n * weight_k / sum(weights) of source k, to within less than `len(weights)`.

    Args:
        windows: Number of windows of each source.
        weights: Share of each source, any positive numbers.
        seed: Any integer >= 0.
        shuffle: Off: windows come in file order.
        epochs: The order ends when a source has been gone through so often; None: it never ends.

    Raises:
        ValueError: a source without windows or with more than 2**32 of them, a weight that isn't positive.
    """

    def __init__(
        self, windows: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool, epochs: int | None
    ):
        for k, (count, weight) in enumerate(zip(windows, weights, strict=True)):
            if not 0 < count <= MAX_WINDOWS:
                raise ValueError(f"source {k} has {count} windows, not between 1 and {MAX_WINDOWS}; split it up")
            if not 0 < weight < float("inf"):
                raise ValueError(f"source {k} has weight {weight}; weights must be positive")
        self.windows = list(windows)
        exact = [Fraction(str(weight)) for weight in weights]  # 0.7 means 7/10
        sums = [sum(exact[: k + 1]) for k in range(len(exact))]
        # Source k takes this part of the samples that sources 0 to k share.
        self._part_below = [(sums[k - 1] / sums[k]).as_integer_ratio() for k in range(1, len(sums))]
        self._orders = []
        for k, count in enumerate(windows):
            order = grain.MapDataset.range(count)
            if shuffle:
                # A hash, so that seeds and sources next to each other don't share the orders of grain's seed + epoch.
                order = order.shuffle(seed=int(np.random.SeedSequence((seed, k)).generate_state(1)[0]))
            self._orders.append(order.repeat())
        self._length = sys.maxsize if epochs is None else self._finite_length(epochs)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        counts, following = self._counts(index), self._counts(index + 1)
        source = next(k for k, count in enumerate(counts) if following[k] != count)
        return source, counts[source] // self.windows[source], self._orders[source][counts[source]]

    def _counts(self, samples: int) -> list[int]:
        """How many of the first `samples` samples each source gets."""
        counts = []
        for numerator, denominator in reversed(self._part_below):
            below = samples * numerator // denominator
            counts.append(samples - below)
            samples = below
        return [samples, *reversed(counts)]

    def _finite_length(self, epochs: int) -> int:
        """Largest n such that no source gives more than `epochs` times its windows to the first n samples."""
        limits = [epochs * count for count in self.windows]
        low, high = 0, sum(limits)
        while low < high:
            middle = (low + high + 1) // 2
            fits = all(count <= limit for count, limit in zip(self._counts(middle), limits, strict=True))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low
