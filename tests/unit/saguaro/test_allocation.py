"""Worked numbers of Theorems 12 and 18, and the integer policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from speculator_service.saguaro.allocation import (
    clip_fan_out,
    expected_hit_rate,
    geometric_fan_out,
    greedy_fan_out,
    power_law_hit_rate,
    round_fan_out,
    shifted_law_curves,
)
from speculator_service.saguaro.speedup import accepted_distribution


@pytest.mark.parametrize(
    ("a", "r", "lookahead", "budget", "real", "integer"),
    [
        (0.5, 1, 2, 10, [4.14214, 2.92893, 2.92893], (4, 3, 3)),
        (0.8, 1, 4, 20, [4.13133, 3.69518, 3.30507, 2.95614, 5.91228], (4, 4, 3, 3, 6)),
        (0.2, 1, 3, 8, [4.57872, 2.04767, 0.91574, 0.45787], (5, 2, 1, 0)),
    ],
)
def test_theorem_12(
    a: float, r: float, lookahead: int, budget: int, real: list[float], integer: tuple[int, ...]
) -> None:
    fan_out = geometric_fan_out(budget, lookahead, a, r)
    assert fan_out.round(5).tolist() == real
    assert round_fan_out(fan_out) == integer


def test_theorem_12_long() -> None:
    fan_out = geometric_fan_out(24, 7, 0.9, 1)
    assert fan_out[[0, 6, 7]].round(5).tolist() == [2.92792, 2.13446, 6.40337]
    assert round_fan_out(fan_out) == (3, 3, 3, 3, 2, 2, 2, 6)


@pytest.mark.parametrize(("a", "r", "lookahead", "budget"), [(0.5, 1, 2, 10), (0.83, 0.6, 6, 31), (0.97, 2.5, 3, 7)])
def test_closed_form_of_the_paper(a: float, r: float, lookahead: int, budget: int) -> None:
    rho, last = a ** (1 / (1 + r)), (1 - a) ** (-1 / (1 + r))
    first = budget / (rho**lookahead * last + (1 - rho**lookahead) / (1 - rho))
    paper = [*(first * rho**k for k in range(lookahead)), first * rho**lookahead * last]
    assert geometric_fan_out(budget, lookahead, a, r) == pytest.approx(paper)


@pytest.mark.parametrize(
    ("budget", "lookahead", "a", "expected"),
    [(9, 3, 0, [9, 0, 0, 0]), (9, 3, 1, [0, 0, 0, 9]), (9, 0, 0.4, [9]), (9, 0, 1, [9]), (0, 2, 0.4, [0, 0, 0])],
)
def test_limits(budget: int, lookahead: int, a: float, expected: list[float]) -> None:
    fan_out = geometric_fan_out(budget, lookahead, a, 1)
    assert fan_out.tolist() == expected
    assert round_fan_out(fan_out) == tuple(expected)


def test_limits_are_continuous() -> None:
    assert geometric_fan_out(9, 3, 1e-30, 1) == pytest.approx([9, 0, 0, 0], abs=1e-6)
    assert geometric_fan_out(9, 3, 1 - 1e-12, 1) == pytest.approx([0, 0, 0, 9], abs=1e-4)


def test_other_constant_at_the_last_position() -> None:
    plain = geometric_fan_out(20, 4, 0.8, 1)
    other = geometric_fan_out(20, 4, 0.8, 1, last_constant_ratio=0.25)
    assert other[4] / other[0] == pytest.approx(plain[4] / plain[0] * 0.25**0.5)
    assert other.sum() == pytest.approx(20)


@pytest.mark.parametrize(
    ("a", "lookahead", "integer", "budget", "rates"),
    [
        (0.5, 2, (4, 3, 3), 10, (0.708333, 0.708579, 0.7)),
        (0.8, 4, (4, 4, 3, 3, 6), 20, (0.764933, 0.765642, 0.75)),
    ],
)
def test_hit_rates(
    a: float, lookahead: int, integer: tuple[int, ...], budget: int, rates: tuple[float, float, float]
) -> None:
    uniform = [budget / (lookahead + 1)] * (lookahead + 1)
    lists = (integer, geometric_fan_out(budget, lookahead, a, 1), uniform)
    assert tuple(round(power_law_hit_rate(fan_out, a, 1), 6) for fan_out in lists) == rates


def test_exhaustive_search_finds_nothing_better() -> None:
    lists = [fan_out for fan_out in itertools.product(range(1, 9), repeat=3) if sum(fan_out) == 10]
    assert max(lists, key=lambda fan_out: power_law_hit_rate(fan_out, 0.5, 1)) == (4, 3, 3)
    lists = [fan_out for fan_out in itertools.product(range(1, 10), repeat=5) if sum(fan_out) == 20]
    best = max(power_law_hit_rate(fan_out, 0.8, 1) for fan_out in lists)
    assert power_law_hit_rate((4, 4, 3, 3, 6), 0.8, 1) == pytest.approx(best)


def test_nothing_prepared_never_hits() -> None:
    assert power_law_hit_rate((0, 2), 0.5, 1) == pytest.approx(0.25)
    assert power_law_hit_rate((0.5, 2), 0.5, 1) == pytest.approx(0.25)


def test_rounding_survives_float_noise() -> None:
    assert round_fan_out(np.array([2.9999999999, 3.0000000001])) == (3, 3)
    assert round_fan_out(np.array([2.5 - 1e-13, 2.5 + 1e-13])) == (3, 2)
    assert round_fan_out(np.array([1.0, 1.5, 0.5])) == (1, 2, 0)


def test_clipping_to_the_vocabulary() -> None:
    assert clip_fan_out((9, 3, 9), 6) == (5, 3, 6)
    assert clip_fan_out((1, 2), 1) == (0, 1)


def test_greedy_on_the_shifted_law() -> None:
    for a, lookahead, budget, expected in [(0.5, 2, 10, (4, 3, 3)), (0.8, 4, 20, (4, 4, 3, 3, 6))]:
        weights, curves = accepted_distribution(a, lookahead), shifted_law_curves(lookahead, 1, budget)
        assert greedy_fan_out(budget, weights, curves) == expected


def test_greedy_on_measured_curves() -> None:
    curves = np.array([[0, 0.9, 0.95, 0.96], [0, 0.1, 0.2, 0.3], [0, 0.5, 0.9, 0.9]])
    weights = np.array([0.5, 0.3, 0.2])
    assert greedy_fan_out(3, weights, curves) == (1, 0, 2)
    assert greedy_fan_out(100, weights, curves) == (3, 3, 3)
    assert greedy_fan_out(0, weights, curves) == (0, 0, 0)
    assert greedy_fan_out(2, weights, curves[:, :1]) == (0, 0, 0)
    assert expected_hit_rate((1, 0, 2), weights, curves) == pytest.approx(0.63)


def test_greedy_looks_behind_a_flat_start() -> None:
    """Not concave: nothing at F = 1, all at F = 2. The majorant rises by .45 a step, more than .4."""
    curves = np.array([[0, 0, 0.9], [0, 0.4, 0.5]])
    assert greedy_fan_out(2, np.array([0.5, 0.5]), curves) == (2, 0)


def test_greedy_after_an_empty_backup_puts_all_at_position_0() -> None:
    assert greedy_fan_out(5, np.array([1.0, 0, 0]), shifted_law_curves(2, 1, 9)) == (5, 0, 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: geometric_fan_out(-1, 2, 0.5, 1), "budget must be finite and at least 0"),
        (lambda: geometric_fan_out(4, -1, 0.5, 1), "lookahead"),
        (lambda: geometric_fan_out(4, 2, 1.5, 1), "acceptance_rate"),
        (lambda: geometric_fan_out(4, 2, 0.5, 0), "miss_exponent must be finite and greater than 0"),
        (lambda: geometric_fan_out(4, 2, 0.5, 1, last_constant_ratio=-1), "last_constant_ratio"),
        (lambda: round_fan_out(np.array([1.0, -1.0])), "fan_out must be finite and at least 0"),
        (lambda: round_fan_out(np.array([np.nan])), "fan_out must be finite"),
        (lambda: greedy_fan_out(4, np.ones(2) / 2, np.zeros((3, 4))), r"shape \[2, F_max \+ 1\]"),
        (lambda: clip_fan_out((1, 1), 0), "vocab_size"),
        (lambda: shifted_law_curves(2, -1, 3), "miss_exponent"),
    ],
)
def test_outside_of_the_domain(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
