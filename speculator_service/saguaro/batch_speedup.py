"""Speedup against batch size, and where the fast backup overtakes the slow one (the paper, sections 4.3 and A.4).

A batch waits for the backup if any of its b sequences misses, hence p^b. T_p, T_b and p depend on b in reality:
feed values measured near the batch size in question.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from speculator_service.saguaro.domain import check_at_least, check_probabilities
from speculator_service.saguaro.speedup import unconditional_hit_rate


class SpeculatorQuality(NamedTuple):
    """What a speculator, primary or backup, costs and yields; measured."""

    time: float
    """T, of one of its speculations; one verification takes 1."""
    expected_tokens: float
    """E, tokens of a round that verifies one of its speculations, the bonus token included."""
    hit_rate: float
    """p_hit,p or p_hit,b, of the round after such a speculation."""


def speedup_with(primary: SpeculatorQuality, backup: SpeculatorQuality, batch_size: float) -> float:
    """Speedup of SSD with this pair (Corollary 16 with the unconditional hit rate of Theorem 7).

    >>> primary = SpeculatorQuality(.3, 4, .9)
    >>> round(speedup_with(primary, primary, 8), 6)
    3.416293
    """
    hit_rate = unconditional_hit_rate(primary.hit_rate, backup.hit_rate)
    return batch_speedup(
        batch_size, hit_rate, primary.expected_tokens, backup.expected_tokens, primary.time, backup.time
    )


def planned_speedup(primary: SpeculatorQuality, backup: SpeculatorQuality, batch_size: float) -> float:
    """`speedup_with` for plans that may be late: a batch with a miss waits for the tables of its hits all the same.

    Corollary 16 lets a round with a miss take 1 + T_b even if T_p > 1: any T_p would do where p^b is small. Here a
    round takes 1, and max(0, T_p - 1) if all sequences hit, T_b if all miss, the longer of both if some hit and some
    miss, since these are drafted together. That is the same for T_p <= 1 and for b = 1.

    >>> slow, none = SpeculatorQuality(1.5, 4, .5), SpeculatorQuality(0, 4, .5)
    >>> [planned_speedup(slow, none, b) == speedup_with(slow, none, b) for b in (1, 2)]
    [True, False]
    >>> round(planned_speedup(slow, none, 2), 6), round(planned_speedup(slow, none, 30), 6)
    (2.909091, 2.666667)
    """
    hit_rate = unconditional_hit_rate(primary.hit_rate, backup.hit_rate)
    tokens = hit_rate * primary.expected_tokens + (1 - hit_rate) * backup.expected_tokens
    late = max(0, primary.time - 1)
    all_hit, all_miss = math.pow(hit_rate, batch_size), math.pow(1 - hit_rate, batch_size)
    waiting = all_hit * late + all_miss * backup.time + (1 - all_hit - all_miss) * max(late, backup.time)
    return tokens / (1 + waiting)


def batch_speedup(
    batch_size: float,
    hit_rate: float,
    expected_tokens_hit: float,
    expected_tokens_miss: float,
    primary_time: float,
    backup_time: float,
) -> float:
    """Speedup of SSD at batch size b (Corollary 16); `batch_speedup_limit` is its limit.

    (p E_hit + (1 - p) E_miss) / (p^b max(1, T_p) + (1 - p^b) (1 + T_b))

    Args:
        batch_size: b >= 0.
        hit_rate: p, the unconditional hit rate of one sequence.
        expected_tokens_hit: E_hit >= 1.
        expected_tokens_miss: E_miss >= 1.
        primary_time: T_p >= 0.
        backup_time: T_b >= 0.

    >>> round(batch_speedup(1, .9, 4, 4, .3, .3), 6), round(batch_speedup(8, .9, 4, 4, .3, .3), 6)
    (3.883495, 3.416293)
    """
    check_at_least(0, batch_size=batch_size, primary_time=primary_time, backup_time=backup_time)
    check_probabilities(hit_rate=hit_rate)
    check_at_least(1, expected_tokens_hit=expected_tokens_hit, expected_tokens_miss=expected_tokens_miss)
    tokens = hit_rate * expected_tokens_hit + (1 - hit_rate) * expected_tokens_miss
    all_hit = math.pow(hit_rate, batch_size)
    return tokens / (all_hit * max(1, primary_time) + (1 - all_hit) * (1 + backup_time))


def batch_speedup_limit(
    hit_rate: float, expected_tokens_hit: float, expected_tokens_miss: float, backup_time: float
) -> float:
    """Speedup for b to infinity, p < 1 (Corollary 16): ``(p E_hit + (1 - p) E_miss) / (1 + T_b)``.

    >>> round(batch_speedup_limit(.9, 4, 4, .3), 6), round(batch_speedup_limit(.8, 4, 1, .25), 6)
    (3.076923, 2.72)
    """
    check_at_least(0, backup_time=backup_time)
    check_probabilities(hit_rate=hit_rate)
    check_at_least(1, expected_tokens_hit=expected_tokens_hit, expected_tokens_miss=expected_tokens_miss)
    return (hit_rate * expected_tokens_hit + (1 - hit_rate) * expected_tokens_miss) / (1 + backup_time)


def critical_batch_size(
    hit_rate: float,
    expected_tokens_hit: float,
    expected_tokens_miss: float,
    primary_time: float,
    *,
    fast_hit_rate: float | None = None,
    fast_time: float = 0.0,
) -> float:
    """b* (Theorem 17): the slow backup (primary, just in time) is the better one iff b < b*.

    slow: E_hit / (p_s^b max(1, T_p) + (1 - p_s^b) (1 + T_p)); fast: A / (p_f^b max(1, T_p) + (1 - p_f^b) (1 + T_f)),
    A = p_f E_hit + (1 - p_f) E_miss. They are equal at

    b* = log x / log p_s,   x = 1 - (E_hit - A) / (A T_p - E_hit T_f)

    for T_p < 1 and T_f = 0 or p_f = p_s (the theorem has both); otherwise b* is found by bisection: for
    p_f <= p_s there is one crossing at most.

    Args:
        hit_rate: p_s, unconditional, with the slow backup; p_s = p_hit,p.
        expected_tokens_hit: E_hit >= E_miss, of the primary and of the slow backup.
        expected_tokens_miss: E_miss >= 1, of the fast backup.
        primary_time: T_p >= 0, of the primary and of the slow backup.
        fast_hit_rate: p_f <= p_s, unconditional, with the fast backup (`unconditional_hit_rate`); default: p_s,
            as in the paper. Using p_s where p_f is lower puts b* far too low (the last example: 2.99).
        fast_time: T_f >= 0, of the fast backup.

    Returns:
        b* >= 0; infinity if the slow backup is better for all b; 0 if the fast one is never worse.

    >>> round(critical_batch_size(.9, 4, 1, .3), 6), critical_batch_size(.5, 4, 1, .2)
    (2.990504, inf)
    >>> round(critical_batch_size(.9, 4, 1, .3, fast_time=.05), 4)
    3.7964
    >>> round(critical_batch_size(.9, 4, 1, .3, fast_hit_rate=.75), 5)
    13.91733
    """
    p_fast = hit_rate if fast_hit_rate is None else fast_hit_rate
    check_probabilities(hit_rate=hit_rate, fast_hit_rate=p_fast)
    if p_fast > hit_rate:
        raise ValueError(f"fast_hit_rate must be in [0, hit_rate] = [0, {hit_rate}], got {p_fast}.")
    check_at_least(0, primary_time=primary_time, fast_time=fast_time)
    check_at_least(1, expected_tokens_miss=expected_tokens_miss)
    check_at_least(expected_tokens_miss, expected_tokens_hit=expected_tokens_hit)
    tokens_fast = p_fast * expected_tokens_hit + (1 - p_fast) * expected_tokens_miss
    if primary_time < 1 and (fast_time == 0 or p_fast == hit_rate):
        return _closed_form(hit_rate, expected_tokens_hit, tokens_fast, primary_time, fast_time)
    return _by_bisection(hit_rate, p_fast, expected_tokens_hit, tokens_fast, primary_time, fast_time)


def _closed_form(p: float, tokens_slow: float, tokens_fast: float, primary_time: float, fast_time: float) -> float:
    gain = tokens_fast * primary_time - tokens_slow * fast_time
    loss = tokens_slow - tokens_fast
    if loss <= 0 <= gain:
        return 0.0
    if gain <= loss or p == 1:
        return math.inf
    return math.log(1 - loss / gain) / math.log(p) if p > 0 else 0.0


def _by_bisection(
    p_slow: float, p_fast: float, tokens_slow: float, tokens_fast: float, primary_time: float, fast_time: float
) -> float:
    """Where ``tokens_fast time_slow - tokens_slow time_fast`` turns positive; it falls, if at all, before it rises."""
    hit_time = max(1.0, primary_time)

    def advantage(b: float) -> float:
        slow, fast = math.pow(p_slow, b), math.pow(p_fast, b)
        slow_time = slow * hit_time + (1 - slow) * (1 + primary_time)
        return tokens_fast * slow_time - tokens_slow * (fast * hit_time + (1 - fast) * (1 + fast_time))

    if advantage(math.inf) <= 0:
        return math.inf
    low, high = 0.0, 1.0
    while advantage(high) <= 0:
        low, high = high, 2 * high
    while high - low > 1e-12 * high and high > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if advantage(middle) <= 0 else (low, middle)
    return high if high > 1e-12 else 0.0
