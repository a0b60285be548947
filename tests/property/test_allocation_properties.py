"""Fan-out lists for any acceptance rate, exponent, lookahead and budget."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

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

rates = st.floats(0, 1)
exponents = st.floats(0.05, 5)
lookaheads = st.integers(0, 12)
budgets = st.integers(0, 200)


@given(budgets, lookaheads, rates, exponents, st.floats(0.01, 10))
def test_sum_is_the_budget(budget: int, lookahead: int, a: float, r: float, ratio: float) -> None:
    real = geometric_fan_out(budget, lookahead, a, r, last_constant_ratio=ratio)
    integer = round_fan_out(real)
    assert len(integer) == lookahead + 1
    assert abs(real.sum() - budget) < 1e-6
    assert sum(integer) == budget
    assert min(integer) >= 0
    assert np.abs(real - integer).max() < 1 + 1e-6


@given(budgets, lookaheads, rates, exponents)
def test_falls_up_to_the_last_position(budget: int, lookahead: int, a: float, r: float) -> None:
    real = geometric_fan_out(budget, lookahead, a, r)
    integer = round_fan_out(real)
    assert (np.diff(real[:-1]) <= 1e-9).all()
    assert list(integer[:-1]) == sorted(integer[:-1], reverse=True)


@given(st.integers(1, 12), st.floats(0.01, 0.99), exponents)
def test_last_position_is_no_part_of_the_series(lookahead: int, a: float, r: float) -> None:
    assume(abs(a - 0.5) > 1e-6)
    assume(abs(a**lookahead - (1 - a)) > 1e-6)
    real = geometric_fan_out(100, lookahead, a, r)
    assert (real[-1] > real[-2]) == (a > 0.5)
    assert (real[-1] > real[0]) == (a**lookahead > 1 - a)


@given(st.lists(st.floats(0, 50), min_size=1, max_size=12))
def test_rounding_any_list(values: list[float]) -> None:
    budget = round(sum(values))
    assume(sum(values) > 0.01)
    real = np.array(values) * (budget / sum(values))
    integer = round_fan_out(real)
    assert sum(integer) == budget
    assert np.abs(real - integer).max() < 1 + 1e-6
    falling = round_fan_out(np.sort(real)[::-1])
    assert list(falling) == sorted(falling, reverse=True)


@given(st.integers(1, 8), st.integers(1, 20), st.floats(0.01, 0.99), st.floats(0.1, 4))
def test_real_list_is_never_worse_than_uniform_under_the_law(uniform: int, lookahead: int, a: float, r: float) -> None:
    """Theorem 12's objective itself, also where it is negative (F < 1)."""
    weights = accepted_distribution(a, lookahead)
    real = geometric_fan_out(uniform * (lookahead + 1), lookahead, a, r)
    assume(real.min() > 1e-6)
    assert weights @ real**-r <= weights @ np.full(lookahead + 1, float(uniform)) ** -r + 1e-12


@given(st.integers(1, 8), st.integers(1, 10), rates, exponents)
def test_greedy_list_is_never_worse_than_another(uniform: int, lookahead: int, a: float, r: float) -> None:
    """On concave curves: not than uniform, and not than the rounded geometric one."""
    budget = uniform * (lookahead + 1)
    weights, curves = accepted_distribution(a, lookahead), shifted_law_curves(lookahead, r, budget)
    best = expected_hit_rate(greedy_fan_out(budget, weights, curves), weights, curves)
    others = [(uniform,) * (lookahead + 1), round_fan_out(geometric_fan_out(budget, lookahead, a, r))]
    for other in others:
        assert best >= expected_hit_rate(other, weights, curves) - 1e-12


curves_of_3 = st.lists(st.lists(st.floats(0, 1), min_size=5, max_size=5).map(sorted), min_size=3, max_size=3).map(
    np.array
)
weights_of_3 = st.lists(st.floats(0.01, 1), min_size=3, max_size=3).map(lambda w: np.array(w) / sum(w))


@given(st.integers(0, 15), weights_of_3, curves_of_3)
def test_greedy_is_optimal_on_concave_curves(budget: int, weights: np.ndarray, increments: np.ndarray) -> None:
    falling = -np.sort(-increments[:, 1:], axis=1) / 4
    curves = np.concatenate([np.zeros((3, 1)), falling.cumsum(1)], axis=1)
    counts = greedy_fan_out(budget, weights, curves)
    assert sum(counts) == min(budget, 12)
    lists = [x for x in itertools.product(range(5), repeat=3) if sum(x) == sum(counts)]
    best = max(expected_hit_rate(x, weights, curves) for x in lists)
    assert expected_hit_rate(counts, weights, curves) >= best - 1e-12


@given(st.integers(0, 15), weights_of_3, curves_of_3)
def test_greedy_takes_any_measured_curves(budget: int, weights: np.ndarray, curves: np.ndarray) -> None:
    counts = greedy_fan_out(budget, weights, curves)
    assert sum(counts) == min(budget, 12)
    assert min(counts) >= 0
    assert max(counts) <= 4


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8), st.integers(1, 40))
def test_clipping(fan_out: list[int], vocab_size: int) -> None:
    clipped = clip_fan_out(fan_out, vocab_size)
    assert all(count <= vocab_size - 1 for count in clipped[:-1])
    assert clipped[-1] <= vocab_size
    assert all(a <= b for a, b in zip(clipped, fan_out, strict=True))
    assert clip_fan_out(clipped, vocab_size) == clipped


@given(st.integers(1, 200), lookaheads, rates, st.floats(0.1, 4))
def test_a_larger_budget_never_hits_less(budget: int, lookahead: int, a: float, r: float) -> None:
    more = power_law_hit_rate(geometric_fan_out(budget + 1, lookahead, a, r), a, r)
    assert more >= power_law_hit_rate(geometric_fan_out(budget, lookahead, a, r), a, r) - 1e-12
