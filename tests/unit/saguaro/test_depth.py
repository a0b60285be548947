"""The number of tokens to draft."""

from __future__ import annotations

import numpy as np
import pytest

from speculator_service.saguaro.depth import best_depth, expected_tokens_by_depth
from speculator_service.saguaro.speedup import expected_tokens


def test_expected_tokens_are_those_of_theorem_1() -> None:
    assert expected_tokens_by_depth(np.full(5, 0.8)) == pytest.approx([expected_tokens(0.8, K) for K in range(1, 6)])


@pytest.mark.parametrize(
    ("speedups", "current", "allowed", "expected"),
    [
        ([1, 2, 3], 1, None, 3),
        ([1, 2, 2], 1, None, 3),  # the largest of equal ones
        ([3, 2, 1], 3, None, 1),
        ([1.02, 1.0, 1.01], 2, None, 2),  # no gain that is worth it
        ([1, 2, 3], 3, [True, True, False], 2),
        ([1, 2, 3], 3, [True, False, False], 1),
        ([1, 3, 2], 3, [False, False, False], 2),
    ],
)
def test_best(speedups: list[float], current: int, allowed: list[bool] | None, expected: int) -> None:
    assert best_depth(np.array(speedups), current, 0.03, None if allowed is None else np.array(allowed)) == expected
