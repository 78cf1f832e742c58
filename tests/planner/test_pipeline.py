"""Schedules: simulation against closed formulas and by hand."""

import pytest

from mula_titan.planner.pipeline import in_flight, orders, peak_bytes, simulate


@pytest.mark.parametrize(("schedule", "pp", "n"), [("1F1B", 8, 8), ("1F1B", 4, 12), ("GPipe", 4, 4), ("1F1B", 1, 3)])
def test_bubble_of_equal_stages(schedule, pp, n) -> None:
    run = simulate(orders(schedule, pp, 1, n), [1.0] * pp, [2.0] * pp)
    assert run.bubble == pytest.approx((pp - 1) / (n + pp - 1))
    assert run.seconds == pytest.approx(3 * (n + pp - 1))


def test_bubbles_of_the_paper_s_jobs() -> None:
    assert simulate(orders("1F1B", 4, 1, 4), [1.0] * 4, [2.0] * 4).bubble == pytest.approx(3 / 7)
    assert simulate(orders("1F1B", 8, 1, 8), [1.0] * 8, [2.0] * 8).bubble == pytest.approx(7 / 15)


@pytest.mark.parametrize(("pp", "virtual", "n"), [(4, 2, 8), (4, 4, 8), (8, 2, 16)])
def test_interleaving_divides_the_bubble(pp, virtual, n) -> None:
    run = simulate(orders("Interleaved1F1B", pp, virtual, n), [1.0] * pp * virtual, [2.0] * pp * virtual)
    assert run.bubble == pytest.approx((pp - 1) / (virtual * n + pp - 1))


def test_zero_bubble_beats_interleaving() -> None:
    zbv = simulate(orders("ZBVZeroBubble", 4, 2, 8), [1.0] * 8, [2.0] * 8)
    assert zbv.bubble == pytest.approx(1 / 17)


def test_unequal_stages_wait_for_the_slowest() -> None:
    # Two ranks, two micro-batches, by hand: rank 1 works from 1 to 1 + 2 * (3 + 5); rank 0 ends with its last backward.
    run = simulate(orders("1F1B", 2, 1, 2), [1.0, 3.0], [2.0, 5.0])
    assert run.seconds == pytest.approx(1 + 2 * 8 + 2)
    assert run.busy == pytest.approx((6.0, 16.0))
    assert run.bubble == pytest.approx(1 - 22 / 38)


def test_transfers_delay_both_directions() -> None:
    run = simulate(orders("1F1B", 2, 1, 1 + 1), [1.0, 1.0], [2.0, 2.0], transfer=0.5)
    assert run.seconds == pytest.approx(1 + 0.5 + 2 * 3 + 0.5 + 2)


def test_memory_follows_the_order() -> None:
    assert [in_flight("1F1B", 4, 1, 8, r) for r in range(4)] == [4, 3, 2, 1]
    assert [in_flight("GPipe", 4, 1, 8, r) for r in range(4)] == [8] * 4
    assert in_flight("Interleaved1F1B", 4, 2, 8, 0) == 11
    actions = orders("1F1B", 2, 1, 4)[0]
    assert peak_bytes(actions, {0: 10.0}, {0: 14.0}, {0: 13.0}) == 24.0  # one held, the next one's forward


def test_refusals_name_the_schedule() -> None:
    with pytest.raises(ValueError, match="2 < 4"):
        orders("1F1B", 4, 1, 2)
    with pytest.raises(ValueError, match="'DualPipeV': the planner knows '1F1B'"):
        orders("DualPipeV", 4, 2, 8)
