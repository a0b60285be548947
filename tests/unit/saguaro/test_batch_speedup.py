"""Worked numbers of Corollary 16 and Theorem 17."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from speculator_service.saguaro.batch_speedup import (
    SpeculatorQuality,
    batch_speedup,
    batch_speedup_limit,
    critical_batch_size,
    speedup_with,
)
from speculator_service.saguaro.speedup import ssd_speedup, unconditional_hit_rate


@pytest.mark.parametrize(
    ("batch_size", "arguments", "speedup"),
    [(1, (0.9, 4, 4, 0.3, 0.3), 3.883495), (8, (0.9, 4, 4, 0.3, 0.3), 3.416293), (4, (0.8, 4, 1, 0.5, 0.25), 2.962705)],
)
def test_corollary_16(batch_size: int, arguments: tuple[float, ...], speedup: float) -> None:
    assert round(batch_speedup(batch_size, *arguments), 6) == speedup


def test_limits_of_corollary_16() -> None:
    assert round(batch_speedup_limit(0.9, 4, 4, 0.3), 6) == 3.076923
    assert round(batch_speedup_limit(0.8, 4, 1, 0.25), 6) == 2.72
    assert batch_speedup(500, 0.9, 4, 4, 0.3, 0.3) == pytest.approx(batch_speedup_limit(0.9, 4, 4, 0.3))
    assert batch_speedup(1, 0.7, 4, 2, 1.5, 0.3) == pytest.approx(ssd_speedup(0.7, 4, 2, 1.5, 0.3))
    assert batch_speedup(64, 1, 4, 1, 0.3, 0.3) == 4


def test_speedup_with_uses_the_unconditional_hit_rate() -> None:
    primary, backup = SpeculatorQuality(0.3, 4, 0.9), SpeculatorQuality(0.05, 1, 0.3)
    assert speedup_with(primary, backup, 3) == batch_speedup(3, unconditional_hit_rate(0.9, 0.3), 4, 1, 0.3, 0.05)


@pytest.mark.parametrize(
    ("arguments", "critical"),
    [((0.9, 4, 1, 0.3), 2.990504), ((0.8, 4, 1, 0.5), 1.950843), ((0.5, 4, 1, 0.2), math.inf), ((0.9, 4, 4, 0.3), 0)],
)
def test_theorem_17(arguments: tuple[float, float, float, float], critical: float) -> None:
    assert round(critical_batch_size(*arguments), 6) == critical


def slow(batch_size: float, p: float, time: float, tokens: float = 4) -> float:
    return batch_speedup(batch_size, p, tokens, tokens, time, time)


def test_checks_of_theorem_17() -> None:
    assert round(slow(2, 0.9, 0.3), 5) == 3.78430
    assert round(slow(3, 0.9, 0.3), 5) == 3.69925
    assert batch_speedup(3, 0.9, 4, 1, 0.3, 0) == pytest.approx(3.7)
    assert round(slow(1, 0.8, 0.5), 5) == 3.63636
    assert round(slow(2, 0.8, 0.5), 5) == 3.38983
    assert round(batch_speedup_limit(0.5, 4, 4, 0.2), 4) == 3.3333


def test_separate_hit_rates() -> None:
    assert unconditional_hit_rate(0.9, 0.3) == pytest.approx(0.75)
    assert round(critical_batch_size(0.9, 4, 1, 0.3, fast_hit_rate=0.75), 6) == 13.917330


def test_fast_backup_that_takes_time() -> None:
    assert round(critical_batch_size(0.9, 4, 1, 0.3, fast_time=0.05), 4) == 3.7964


@pytest.mark.parametrize(
    ("p_slow", "p_fast", "tokens_miss", "slow_time", "fast_time"),
    [
        (0.9, 0.75, 1, 0.3, 0),
        (0.9, 0.9, 1.5, 0.3, 0.05),
        (0.9, 0.8, 1.5, 0.3, 0.05),
        (0.95, 0.7, 2, 0.8, 0.1),
        (0.9, 0.85, 1, 1.4, 0),
        (0.9, 0.9, 1, 2, 0.3),
    ],
)
def test_speedups_are_equal_at_the_critical_batch_size(
    p_slow: float, p_fast: float, tokens_miss: float, slow_time: float, fast_time: float
) -> None:
    """Closed form and bisection alike, and T_p >= 1 too."""
    b = critical_batch_size(p_slow, 4, tokens_miss, slow_time, fast_hit_rate=p_fast, fast_time=fast_time)

    def advantage(batch_size: float) -> float:
        fast = batch_speedup(batch_size, p_fast, 4, tokens_miss, slow_time, fast_time)
        return slow(batch_size, p_slow, slow_time) - fast

    assert 0 < b < 100
    assert advantage(b) == pytest.approx(0, abs=1e-9)
    assert advantage(0.9 * b) > 0
    assert advantage(1.1 * b) < 0


def test_bisection_agrees_with_the_closed_form() -> None:
    closed = critical_batch_size(0.9, 4, 1, 0.3, fast_hit_rate=0.75)
    assert critical_batch_size(0.9, 4, 1, 0.3, fast_hit_rate=0.75, fast_time=1e-13) == pytest.approx(closed, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "options", "critical"),
    [
        ((1, 4, 1, 0.3), {}, 0),  # no misses
        ((1, 4, 1, 0.3), {"fast_hit_rate": 0.9}, math.inf),  # only the slow one has none
        ((0, 4, 1, 0.3), {}, math.inf),
        ((0, 4, 3.9, 0.3), {}, 0),
        ((0.9, 4, 1, 0), {}, math.inf),  # the slow one takes no time
        ((0.9, 4, 4, 0), {}, 0),
        ((0.9, 4, 1, 0.3), {"fast_time": 0.3}, math.inf),  # worse and as slow
        ((0.9, 4, 4, 0.3), {"fast_time": 0.1, "fast_hit_rate": 0.9}, 0),
        ((0.9, 4, 4, 0.3), {"fast_time": 0.4}, math.inf),
        ((0.9, 4, 4, 1.5), {}, 0),
    ],
)
def test_degenerate_cases(
    arguments: tuple[float, float, float, float], options: dict[str, float], critical: float
) -> None:
    assert critical_batch_size(*arguments, **options) == critical


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: batch_speedup(-1, 0.5, 2, 1, 0, 0), "batch_size"),
        (lambda: batch_speedup(1, 1.5, 2, 1, 0, 0), r"hit_rate must be in \[0, 1\]"),
        (lambda: batch_speedup_limit(0.5, 2, 0.5, 0), "expected_tokens_miss"),
        (lambda: critical_batch_size(0.9, 2, 3, 0.3), "expected_tokens_hit must be finite and at least 3"),
        (lambda: critical_batch_size(0.9, 4, 1, -0.3), "primary_time"),
        (lambda: critical_batch_size(0.9, 4, 1, 0.3, fast_hit_rate=0.95), r"fast_hit_rate must be in \[0, hit_rate\]"),
    ],
)
def test_outside_of_the_domain(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
