"""Times are medians of what happened lately, near the batch size asked for."""

from __future__ import annotations

import pytest

from speculator_service.round_times import VERIFICATION, RoundTimes


def test_nothing_is_known_at_first() -> None:
    times = RoundTimes()
    assert times.median(VERIFICATION, 1) is None
    assert times.buckets(VERIFICATION) == []
    times.add(VERIFICATION, 4, 0.5)
    assert times.median("table", 4) is None


def test_one_late_round_changes_nothing() -> None:
    times = RoundTimes()
    for seconds in (0.01, 0.01, 0.01, 5.0, 0.01):
        times.add("table", 1, seconds)
    assert times.median("table", 1) == 0.01


def test_old_times_are_forgotten() -> None:
    times = RoundTimes()
    for seconds in [1.0] * 100 + [2.0] * 17:
        times.add("table", 1, seconds)
    assert times.median("table", 1) == 2.0


def test_nearest_bucket_stands_in() -> None:
    times = RoundTimes()
    times.add("table", 1, 1.0)
    times.add("table", 16, 16.0)
    assert times.buckets("table") == [0, 4]
    assert [times.median("table", size) for size in (1, 2, 3, 4, 5, 8, 9, 16, 17, 1000)] == [1.0] * 4 + [16.0] * 6


def test_buckets_are_powers_of_two() -> None:
    assert [RoundTimes.bucket(size) for size in (1, 2, 3, 4, 5, 8, 9, 16, 17)] == [0, 1, 2, 2, 3, 3, 4, 4, 5]
    assert all(RoundTimes.bucket(1 << bucket) == bucket for bucket in range(12))


@pytest.mark.parametrize(
    ("batch_size", "seconds", "words"), [(0, 1.0, "batch_size"), (1, -1.0, "seconds"), (1, float("nan"), "seconds")]
)
def test_outside_of_the_domain(batch_size: int, seconds: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RoundTimes().add("table", batch_size, seconds)
