"""Worked numbers of Theorems 1 and 7, Corollaries 8 and 9, and the hit-rate chain."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from speculator_service.saguaro.speedup import (
    acceptance_rate,
    accepted_distribution,
    break_even_hit_rate,
    expected_tokens,
    fast_backup_ratio,
    hit_rate_trajectory,
    same_speculator_ratio,
    sd_speedup,
    ssd_speedup,
    unconditional_hit_rate,
)

P = np.array([0.40, 0.25, 0.15, 0.10, 0.06, 0.04])
Q = np.array([0.10, 0.40, 0.20, 0.10, 0.10, 0.10])


def test_acceptance_rate_is_overlap_and_distance() -> None:
    assert acceptance_rate(P, Q) == pytest.approx(1 - np.abs(P - Q).sum() / 2)
    batch = acceptance_rate(np.stack([P, P, Q]), np.stack([Q, P, Q]))
    assert batch == pytest.approx([0.7, 1, 1])


@pytest.mark.parametrize(("a", "lookahead", "tokens"), [(0.8, 4, 3.3616), (0.5, 2, 1.75), (0.9, 7, 5.6953279)])
def test_expected_tokens(a: float, lookahead: int, tokens: float) -> None:
    assert expected_tokens(a, lookahead) == pytest.approx(tokens, abs=1e-9)
    assert expected_tokens(a, lookahead) == pytest.approx((1 - a ** (lookahead + 1)) / (1 - a))
    law = accepted_distribution(a, lookahead)
    assert law.sum() == pytest.approx(1)
    assert law @ np.arange(1, lookahead + 2) == pytest.approx(tokens)


def test_expected_tokens_at_the_ends() -> None:
    assert expected_tokens(1, 4) == 5
    assert expected_tokens(0, 4) == 1
    assert expected_tokens(0.3, 0) == 1
    assert accepted_distribution(0, 2).tolist() == [1, 0, 0]
    assert accepted_distribution(1, 2).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "speedup"),
    [((0.8, 4, 1, 0.5, 0), 3.4), ((0.8, 4, 4, 0.5, 0.5), 3.636364), ((0.5, 3, 2, 1.25, 0.25), 2.0)],
)
def test_ssd_speedup(arguments: tuple[float, ...], speedup: float) -> None:
    assert round(ssd_speedup(*arguments), 6) == speedup


def test_primary_that_cannot_be_interrupted() -> None:
    assert ssd_speedup(0.5, 3, 2, 1.25, 0.25, interruptible=False) == pytest.approx(2.5 / (0.625 + 0.75))
    assert ssd_speedup(0.5, 3, 2, 0.9, 0.25, interruptible=False) == ssd_speedup(0.5, 3, 2, 0.9, 0.25)


@pytest.mark.parametrize(("hit_rate", "time", "ratio"), [(0.9, 0.25, 1.219512), (0.5, 2, 1.2), (0, 1, 1)])
def test_corollary_8(hit_rate: float, time: float, ratio: float) -> None:
    assert round(same_speculator_ratio(hit_rate, time), 6) == ratio
    both = ssd_speedup(hit_rate, 3, 3, time, time) / sd_speedup(3, time)
    assert same_speculator_ratio(hit_rate, time) == pytest.approx(both)
    if time <= 1:
        assert same_speculator_ratio(hit_rate, time) == pytest.approx((1 + time) / (1 + (1 - hit_rate) * time))


def test_corollary_8_is_strict_iff_there_are_hits_and_drafting_takes_time() -> None:
    assert same_speculator_ratio(0.01, 0.01) > 1
    assert same_speculator_ratio(0.5, 0) == same_speculator_ratio(0, 0.5) == 1


def test_corollary_9() -> None:
    bounds = fast_backup_ratio(0.85, 4, 1, 4, 0.3)
    assert [round(bound, 6) for bound in bounds] == [1.105, 1.15375, 1.15375, 1.3]
    assert bounds.value == pytest.approx(ssd_speedup(0.85, 4, 1, 0.9, 0) / sd_speedup(4, 0.3))
    more = fast_backup_ratio(0.85, 4, 2, 4, 0.3)
    assert more.lower < more.lower_with_bonus < more.value < more.upper


def test_break_even() -> None:
    p = break_even_hit_rate(4, 0.3)
    assert round(p, 6) == 0.692308
    assert fast_backup_ratio(p, 4, 1, 4, 0.3).value == pytest.approx(1)
    assert break_even_hit_rate(1.1, 0.3) == 0


@pytest.mark.parametrize(("primary", "backup", "rate"), [(0.9, 0.6, 0.857143), (0.9, 0.3, 0.75), (0.8, 0.8, 0.8)])
def test_unconditional_hit_rate(primary: float, backup: float, rate: float) -> None:
    assert round(unconditional_hit_rate(primary, backup), 6) == rate
    assert hit_rate_trajectory(primary, backup, 200)[-1] == pytest.approx(unconditional_hit_rate(primary, backup))


def test_trajectory_is_the_recursion() -> None:
    assert hit_rate_trajectory(0.9, 0.6, 3).round(4).tolist() == [0.9, 0.87, 0.861, 0.8583]
    p = 0.25
    for value in hit_rate_trajectory(0.7, 0.2, 9, initial=0.25):
        assert value == pytest.approx(p)
        p = p * 0.7 + (1 - p) * 0.2
    assert hit_rate_trajectory(0, 1, 4, initial=0).tolist() == pytest.approx([0, 1, 0, 1, 0])


def test_chain_that_never_changes() -> None:
    assert unconditional_hit_rate(1, 0) == 1
    assert unconditional_hit_rate(1, 0, initial=0.3) == 0.3
    assert hit_rate_trajectory(1, 0, 2, initial=0.3).tolist() == [0.3] * 3


def test_hit_rate_rises_with_both_as_derived() -> None:
    for primary, backup in [(0.9, 0.6), (0.5, 0.1), (0.2, 0.9)]:
        here, step = unconditional_hit_rate(primary, backup), 1e-7
        scale = (1 + backup - primary) ** 2
        by_primary = (unconditional_hit_rate(primary + step, backup) - here) / step
        by_backup = (unconditional_hit_rate(primary, backup + step) - here) / step
        assert by_primary == pytest.approx(backup / scale, rel=1e-4)
        assert by_backup == pytest.approx((1 - primary) / scale, rel=1e-4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: expected_tokens(1.1, 2), r"acceptance_rate must be in \[0, 1\], got 1.1"),
        (lambda: expected_tokens(math.nan, 2), r"acceptance_rate must be in \[0, 1\]"),
        (lambda: expected_tokens(0.5, -1), "lookahead must be finite and at least 0, got -1"),
        (lambda: acceptance_rate(P, Q[:5]), "q must hold probabilities"),
        (lambda: acceptance_rate(P, np.stack([Q, Q])), "shapes must be equal"),
        (lambda: acceptance_rate(-P, Q), "p must hold probabilities"),
        (lambda: ssd_speedup(-0.1, 2, 1, 0, 0), "hit_rate"),
        (lambda: ssd_speedup(0.5, 0.9, 1, 0, 0), "expected_tokens_hit must be finite and at least 1"),
        (lambda: ssd_speedup(0.5, 2, 0, 0, 0), "expected_tokens_miss"),
        (lambda: ssd_speedup(0.5, 2, 1, math.inf, 0), "primary_time must be finite"),
        (lambda: ssd_speedup(0.5, 2, 1, 0, -1), "backup_time"),
        (lambda: sd_speedup(2, -1), "draft_time"),
        (lambda: same_speculator_ratio(2, 1), "hit_rate"),
        (lambda: fast_backup_ratio(0.5, 1, 2, 2, 0.1), "expected_tokens_hit must be finite and at least 2"),
        (lambda: break_even_hit_rate(1, 0.1), "expected_tokens must be greater than 1"),
        (lambda: unconditional_hit_rate(0.5, 1.5), "backup_hit_rate"),
        (lambda: hit_rate_trajectory(0.5, 0.5, -1), "rounds"),
        (lambda: hit_rate_trajectory(0.5, 0.5, 1, initial=2), "initial"),
    ],
)
def test_outside_of_the_domain(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
