"""Saguaro's C: Theorems 15 and 19, and the choice by speedup."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from speculator_service.saguaro.batch_speedup import SpeculatorQuality, batch_speedup
from speculator_service.saguaro.downweight import (
    DEFAULT_GRID,
    best_downweight,
    downweight_curve,
    downweight_speedups,
    saguaro_probs,
)
from speculator_service.saguaro.speedup import acceptance_rate, expected_tokens, unconditional_hit_rate

P = np.array([[0.48, 0.48, 0.02, 0.02]])
Q = np.array([[0.49, 0.49, 0.01, 0.01]])
C = 47 / 147


def falling(generator: np.random.Generator, rows: int, vocab_size: int) -> np.ndarray:
    return -np.sort(-generator.dirichlet(np.ones(vocab_size), rows), axis=-1)


def test_four_token_example() -> None:
    assert pytest.approx(47 / 300) == C * 0.49
    lowered = saguaro_probs(Q, 2, C)
    assert lowered[0] == pytest.approx([0.47, 0.47, 0.03, 0.03])
    assert acceptance_rate(P, Q) == pytest.approx(0.98)
    assert acceptance_rate(P, lowered) == pytest.approx(0.98)


@pytest.mark.parametrize(("fan_out", "before", "after"), [(1, 0, 0.5), (2, 0.5, 1), (3, 1, 1)])
def test_four_token_hit_rates(fan_out: int, before: float, after: float) -> None:
    """q' of the example is lowered on two tokens; with another F the same q' is reached by hand."""
    if fan_out == 2:
        curve = downweight_curve(P, Q, fan_out, [C, 1])
        assert curve.rejected_hit_rate == pytest.approx([after, before])
        assert curve.acceptance_rate == pytest.approx([0.98, 0.98])
    assert hit_rate_by_enumeration(P[0], Q[0], Q[0], fan_out) == pytest.approx(before)
    assert hit_rate_by_enumeration(P[0], Q[0], saguaro_probs(Q, 2, C)[0], fan_out) == pytest.approx(after)


def hit_rate_by_enumeration(p: np.ndarray, q: np.ndarray, lowered: np.ndarray, fan_out: int) -> float:
    """Sum over rejected tokens x and bonus tokens t, with the F first tokens other than x prepared."""
    rejection, residual = np.maximum(lowered - p, 0), np.maximum(p - lowered, 0)
    order = np.argsort(-q, kind="stable")
    hits = 0.0
    for token, mass in enumerate(rejection):
        prepared = [t for t in order if t != token][:fan_out]
        hits += mass / rejection.sum() * residual[prepared].sum() / residual.sum()
    return hits


@pytest.mark.parametrize("fan_out", [0, 1, 2, 4, 5])
def test_curve_is_the_enumeration(fan_out: int) -> None:
    generator = np.random.default_rng(fan_out)
    p, q = generator.dirichlet(np.ones(6), 5), falling(generator, 5, 6)
    grid = [0, 0.3, 0.8, 1]
    for i in range(5):
        curve = downweight_curve(p[i : i + 1], q[i : i + 1], fan_out, grid)
        lowered = [saguaro_probs(q[i], fan_out, c) for c in grid]
        assert curve.acceptance_rate == pytest.approx([acceptance_rate(p[i], x) for x in lowered])
        expected = [hit_rate_by_enumeration(p[i], q[i], x, fan_out) for x in lowered]
        assert curve.rejected_hit_rate == pytest.approx(expected)


def test_positions_weigh_by_their_probability() -> None:
    generator = np.random.default_rng(3)
    p, q = generator.dirichlet(np.ones(6), 40), falling(generator, 40, 6)
    curves = [downweight_curve(p[i : i + 1], q[i : i + 1], 2) for i in range(40)]
    together = downweight_curve(p, q, 2)
    acceptance = np.array([curve.acceptance_rate for curve in curves])
    hits = np.array([curve.rejected_hit_rate for curve in curves])
    assert together.acceptance_rate == pytest.approx(acceptance.mean(0))
    assert together.rejected_hit_rate == pytest.approx(((1 - acceptance) * hits).sum(0) / (1 - acceptance).sum(0))


def test_truncated_q_with_the_rest_of_p_missing() -> None:
    """p outside of q's tokens is accepted never and hit never."""
    generator = np.random.default_rng(4)
    p = generator.dirichlet(np.ones(9), 3)
    q = falling(generator, 3, 6)
    dense = downweight_curve(p, np.concatenate([q, np.zeros((3, 3))], axis=1), 2)
    sparse = downweight_curve(p[:, :6], q, 2)
    for a, b in zip(dense, sparse, strict=True):
        assert a == pytest.approx(b)


def test_q_equal_to_p() -> None:
    """Nothing is rejected at C = 1: hits are undefined, hence 1."""
    curve = downweight_curve(Q, Q, 2, [0, 0.1, 0.75, 1])
    assert curve.rejected_hit_rate[-1] == 1
    assert curve.acceptance_rate == pytest.approx([0.02, 0.02 + 0.098 / 0.118, 0.02 + 0.735 / 0.755, 1])


def test_acceptance_over_c() -> None:
    curve = downweight_curve(P, Q, 2, [0.75, 0.1, 0])
    assert curve.acceptance_rate.round(5).tolist() == [0.98649, 0.87051, 0.04]


def test_c_0_with_all_of_q_prepared() -> None:
    assert saguaro_probs(np.array([0.5, 0.5, 0]), 2, 0).tolist() == [0.5, 0.5, 0]


def test_theorem_19_pays() -> None:
    """Same acceptance and twice the hits: C = 47/147 gives the higher speedup."""
    curve = downweight_curve(P, Q, 2, [C, 1])
    speedups = downweight_speedups(curve, 4, 0.9, 0.5, backup=SpeculatorQuality(0.1, 1, 0.5))
    assert speedups[0] > speedups[1]
    assert best_downweight(curve, speedups) == C


def test_speedups_are_corollary_16() -> None:
    curve = downweight_curve(P, Q, 2, [1])
    all_accepted = 0.98**3
    primary_hit_rate = (1 - all_accepted) * 0.5 + all_accepted * 0.8
    tokens = expected_tokens(0.98, 3)
    backup = SpeculatorQuality(0.1, 1.5, 0.3)
    expected = batch_speedup(4, unconditional_hit_rate(primary_hit_rate, 0.3), tokens, 1.5, 0.4, 0.1)
    assert downweight_speedups(curve, 3, 0.8, 0.4, backup=backup, batch_size=4) == pytest.approx([expected])
    just_in_time = batch_speedup(4, primary_hit_rate, tokens, tokens, 0.4, 0.4)
    assert downweight_speedups(curve, 3, 0.8, 0.4, batch_size=4) == pytest.approx([just_in_time])


def test_a_draft_without_misses_is_left_alone() -> None:
    curve = downweight_curve(Q, Q, 2)
    assert curve.downweight.tolist() == list(DEFAULT_GRID)
    speedups = downweight_speedups(curve, 4, 1.0, 0.5, backup=SpeculatorQuality(0, 1, 0.5))
    assert best_downweight(curve, speedups) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: saguaro_probs(Q, 2, 1.1), r"downweight must be in \[0, 1\]"),
        (lambda: saguaro_probs(Q, -1, 1), "fan_out"),
        (lambda: saguaro_probs(2 * Q, 1, 1), "q must hold probabilities"),
        (lambda: downweight_curve(P[:, :3], Q, 2), "p must have the shape of q"),
        (lambda: downweight_curve(2 * P, Q, 2), "sum at most 1"),
        (lambda: downweight_speedups(downweight_curve(P, Q, 2), 0, 0.5, 0.5), "lookahead"),
        (lambda: downweight_speedups(downweight_curve(P, Q, 2), 1, 1.5, 0.5), "last_hit_rate"),
    ],
)
def test_outside_of_the_domain(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
