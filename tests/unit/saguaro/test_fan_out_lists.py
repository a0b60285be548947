"""Lists by depth, and their columns."""

from __future__ import annotations

import numpy as np
import pytest

from speculator_service.saguaro.allocation import greedy_fan_out, shifted_law_curves
from speculator_service.saguaro.fan_out_lists import columns, conditioned, measured_lists, written_lists
from speculator_service.saguaro.speedup import accepted_distribution


def test_written_lists_move_what_cannot_happen_to_the_last_position() -> None:
    assert written_lists((3, 2, 1), 100).tolist() == [[6, 0, 0], [3, 3, 0], [3, 2, 1]]
    assert written_lists((3, 2, 1), 4).tolist() == [[4, 0, 0], [3, 3, 0], [3, 2, 1]]


def test_measured_lists_are_greedy_ones_at_every_depth() -> None:
    curves = shifted_law_curves(4, 1.0, 20)
    lists = measured_lists(20, np.full(4, 0.8), curves, 1000)
    for depth in range(5):
        expected = greedy_fan_out(20, accepted_distribution(0.8, depth), curves[: depth + 1])
        assert tuple(lists[depth, : depth + 1].tolist()) == expected
        assert (lists[depth, depth + 1 :] == 0).all()
    assert lists[4].tolist() == [4, 4, 3, 3, 6]


def test_all_accepted_has_the_curve_of_the_target_at_any_depth() -> None:
    curves = np.array([[0, 0.1], [0, 0.2], [0, 0.9]])
    weights, at_depth = conditioned(np.array([0.5, 0.25]), curves, 1)
    assert weights.tolist() == [0.5, 0.5]
    assert at_depth.tolist() == [[0, 0.1], [0, 0.9]]
    assert conditioned(np.array([0.5, 0.25]), curves, 2)[0].tolist() == [0.5, 0.375, 0.125]
    assert conditioned(np.array([0.5, 0.25]), curves, 0)[0].tolist() == [1.0]


def test_columns_of_many_lists_at_once() -> None:
    counts = np.array([[[2, 0, 1], [0, 0, 0]], [[0, 3, 0], [1, 1, 1]]])
    accepted, rank = columns(counts, 3)
    assert accepted.tolist() == [[[0, 0, 2], [-1, -1, -1]], [[1, 1, 1], [0, 1, 2]]]
    assert rank.tolist() == [[[0, 1, 0], [0, 0, 0]], [[0, 1, 2], [0, 0, 0]]]
    assert columns(np.zeros((2, 3), np.int64), 0)[0].shape == (2, 0)


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_small_budgets(budget: int) -> None:
    assert (measured_lists(budget, np.full(2, 0.5), shifted_law_curves(2, 1.0, budget), 9).sum(1) == budget).all()
