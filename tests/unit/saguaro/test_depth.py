"""The number of tokens to draft."""

from __future__ import annotations

import numpy as np
import pytest

from speculator_service.saguaro.depth import best_depth, expected_tokens_by_depth, finishing_time
from speculator_service.saguaro.speedup import expected_tokens


def test_expected_tokens_are_those_of_theorem_1() -> None:
    assert expected_tokens_by_depth(np.full(5, 0.8)) == pytest.approx([expected_tokens(0.8, K) for K in range(1, 6)])


@pytest.mark.parametrize(
    ("speedups", "current", "expected"),
    [
        ([1, 2, 3], 1, 3),
        ([1, 2, 2], 1, 3),  # the largest of equal ones
        ([3, 2, 1], 3, 1),
        ([1.02, 1.0, 1.01], 2, 2),  # no gain that is worth it
    ],
)
def test_best(speedups: list[float], current: int, expected: int) -> None:
    assert best_depth(np.array(speedups), current, 0.03) == expected


def test_finishing_time_grows_with_depth_and_steps_and_never_exceeds_the_whole_table() -> None:
    steps = np.linspace(0.02, 1.5, 60)
    for draft_share in (0.1, 0.5, 1.0):
        times = np.array([[finishing_time(D, step, step * draft_share) for step in steps] for D in range(1, 9)])
        assert (np.diff(times, axis=0) > 0).all()
        assert (np.diff(times, axis=1) > 0).all()
        assert (times <= np.arange(2, 10)[:, None] * steps + 1e-12).all()
