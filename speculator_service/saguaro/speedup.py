"""Expected tokens, hit rates and speedups (the paper, sections 2.1 and 3.2, appendix A.1).

Times are in units of one verification; speedups are against autoregressive decoding. ``batch_speedup`` holds
what depends on the batch size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculator_service.saguaro.domain import check_at_least, check_distributions, check_probabilities


def acceptance_rate(p: NDArray[np.floating], q: NDArray[np.floating]) -> NDArray[np.float64]:
    """Probability that a token sampled from q is accepted by the ratio rule (Theorem 1).

    alpha = sum_x min(p(x), q(x)) = 1 - 1/2 ||p - q||_1

    Args:
        p: [..., V] target probabilities.
        q: [..., V] probabilities the draft token is sampled from.

    Returns:
        [...] in [0, 1].

    >>> float(acceptance_rate(np.array([.48, .48, .02, .02]), np.array([.49, .49, .01, .01])).round(6))
    0.98
    """
    check_distributions(p=p, q=q)
    alpha: NDArray[np.float64] = np.minimum(p, q).sum(-1, dtype=np.float64)
    return alpha


def accepted_distribution(acceptance_rate: float, lookahead: int) -> NDArray[np.float64]:
    """P(k accepted) for k = 0..K: ``a^k (1 - a)`` for k < K, ``a^K`` for k = K.

    Args:
        acceptance_rate: a in [0, 1].
        lookahead: K >= 0.

    Returns:
        [K + 1] with sum 1.

    >>> accepted_distribution(.5, 2)
    array([0.5 , 0.25, 0.25])
    """
    check_probabilities(acceptance_rate=acceptance_rate)
    check_at_least(0, lookahead=lookahead)
    law: NDArray[np.float64] = np.power(float(acceptance_rate), np.arange(lookahead + 1))
    law[:-1] *= 1 - acceptance_rate
    return law


def expected_tokens(acceptance_rate: float, lookahead: int) -> float:
    """Tokens of a round, the bonus token included: ``E(a, K) = (1 - a^(K+1)) / (1 - a)``, ``E(1, K) = K + 1``.

    Args:
        acceptance_rate: a in [0, 1].
        lookahead: K >= 0.

    Returns:
        In [1, K + 1].

    >>> [round(expected_tokens(a, K), 7) for a, K in [(.8, 4), (.5, 2), (.9, 7)]]
    [3.3616, 1.75, 5.6953279]
    """
    check_probabilities(acceptance_rate=acceptance_rate)
    check_at_least(0, lookahead=lookahead)
    # The quotient above, defined at a = 1 too.
    return math.fsum(math.pow(acceptance_rate, k) for k in range(lookahead + 1))


def ssd_speedup(
    hit_rate: float,
    expected_tokens_hit: float,
    expected_tokens_miss: float,
    primary_time: float,
    backup_time: float,
    *,
    interruptible: bool = True,
) -> float:
    """Speedup of SSD at batch size 1 (Theorem 7).

    (p E_hit + (1 - p) E_miss) / (p max(1, T_p) + (1 - p) (1 + T_b))

    Args:
        hit_rate: p, the unconditional hit rate.
        expected_tokens_hit: E_hit >= 1.
        expected_tokens_miss: E_miss >= 1.
        primary_time: T_p >= 0.
        backup_time: T_b >= 0.
        interruptible: the primary speculation stops when the outcome arrives. If not, a miss waits for its
            end too: ``max(1, T_p) + T_b`` instead of ``1 + T_b``.

    >>> round(ssd_speedup(.8, 4, 1, .5, 0), 6), round(ssd_speedup(.8, 4, 4, .5, .5), 6)
    (3.4, 3.636364)
    >>> ssd_speedup(.5, 3, 2, 1.25, .25)
    2.0
    """
    check_probabilities(hit_rate=hit_rate)
    check_at_least(1, expected_tokens_hit=expected_tokens_hit, expected_tokens_miss=expected_tokens_miss)
    check_at_least(0, primary_time=primary_time, backup_time=backup_time)
    hit_time = max(1, primary_time)
    miss_time = (1 if interruptible else hit_time) + backup_time
    tokens = hit_rate * expected_tokens_hit + (1 - hit_rate) * expected_tokens_miss
    return tokens / (hit_rate * hit_time + (1 - hit_rate) * miss_time)


def sd_speedup(expected_tokens: float, draft_time: float) -> float:
    """Speedup of ordinary speculative decoding: ``E_SD / (1 + T_SD)``.

    >>> sd_speedup(4, .25)
    3.2
    """
    check_at_least(1, expected_tokens=expected_tokens)
    check_at_least(0, draft_time=draft_time)
    return expected_tokens / (1 + draft_time)


def same_speculator_ratio(hit_rate: float, draft_time: float) -> float:
    """SSD against SD with one speculator as SD's draft, primary and backup (Corollary 8).

    (1 + T) / (p max(1, T) + (1 - p) (1 + T)) >= 1, greater iff p > 0 and T > 0.

    >>> [round(same_speculator_ratio(p, T), 6) for p, T in [(.9, .25), (.5, 2), (0, 1)]]
    [1.219512, 1.2, 1.0]
    """
    check_probabilities(hit_rate=hit_rate)
    check_at_least(0, draft_time=draft_time)
    return (1 + draft_time) / (hit_rate * max(1, draft_time) + (1 - hit_rate) * (1 + draft_time))


class RatioBounds(NamedTuple):
    """SSD against SD with a primary that is done in time and a backup that takes none (Corollary 9)."""

    lower: float
    """(1 + T_SD) p E_hit / E_SD: holds for any E_miss >= 0."""
    lower_with_bonus: float
    """(1 + T_SD) (p E_hit + 1 - p) / E_SD: a miss yields its bonus token, E_miss >= 1."""
    value: float
    """(1 + T_SD) (p E_hit + (1 - p) E_miss) / E_SD."""
    upper: float
    """(1 + T_SD) E_hit / E_SD."""


def fast_backup_ratio(
    hit_rate: float,
    expected_tokens_hit: float,
    expected_tokens_miss: float,
    expected_tokens_sd: float,
    sd_time: float,
) -> RatioBounds:
    """Ratio of SSD to SD and its bounds (Corollary 9) for T_p < 1, T_b = 0.

    Args:
        hit_rate: p, the unconditional hit rate.
        expected_tokens_hit: E_hit >= E_miss.
        expected_tokens_miss: E_miss >= 1.
        expected_tokens_sd: E_SD >= 1.
        sd_time: T_SD >= 0.

    >>> [round(bound, 6) for bound in fast_backup_ratio(.85, 4, 1, 4, .3)]
    [1.105, 1.15375, 1.15375, 1.3]
    """
    check_probabilities(hit_rate=hit_rate)
    check_at_least(1, expected_tokens_miss=expected_tokens_miss, expected_tokens_sd=expected_tokens_sd)
    check_at_least(expected_tokens_miss, expected_tokens_hit=expected_tokens_hit)
    check_at_least(0, sd_time=sd_time)
    scale = (1 + sd_time) / expected_tokens_sd
    hits = hit_rate * expected_tokens_hit
    return RatioBounds(
        scale * hits,
        scale * (hits + 1 - hit_rate),
        scale * (hits + (1 - hit_rate) * expected_tokens_miss),
        scale * expected_tokens_hit,
    )


def break_even_hit_rate(expected_tokens: float, sd_time: float) -> float:
    """Hit rate above which SSD with an empty backup (T_b = 0, E_miss = 1) beats SD; E_hit = E_SD = E, T_p < 1.

    p = (E / (1 + T_SD) - 1) / (E - 1), and 0 where that is negative.

    Args:
        expected_tokens: E > 1 (at E = 1 the draft is worth nothing to either).
        sd_time: T_SD >= 0.

    >>> round(break_even_hit_rate(4, .3), 6)
    0.692308
    """
    check_at_least(1, expected_tokens=expected_tokens)
    check_at_least(0, sd_time=sd_time)
    if expected_tokens == 1:
        raise ValueError("expected_tokens must be greater than 1, got 1.")
    return max(0.0, (expected_tokens / (1 + sd_time) - 1) / (expected_tokens - 1))


def unconditional_hit_rate(primary_hit_rate: float, backup_hit_rate: float, initial: float | None = None) -> float:
    """Long-run hit rate of the chain "was the last speculation primary or backup" (section A.1).

    p_hit = p_b / (1 + p_b - p_p), the fixed point of ``p(t+1) = p(t) p_p + (1 - p(t)) p_b``.

    Args:
        primary_hit_rate: p_hit,p, after a primary speculation.
        backup_hit_rate: p_hit,b, after a backup speculation.
        initial: p(0), by default p_hit,p; the answer for p_p = 1, p_b = 0, where nothing ever changes.

    >>> [round(unconditional_hit_rate(p, b), 6) for p, b in [(.9, .6), (.9, .3), (.8, .8)]]
    [0.857143, 0.75, 0.8]
    """
    start = primary_hit_rate if initial is None else initial
    check_probabilities(primary_hit_rate=primary_hit_rate, backup_hit_rate=backup_hit_rate, initial=start)
    primary_miss_rate = 1 - primary_hit_rate
    if primary_miss_rate == 0 and backup_hit_rate == 0:
        return start
    return backup_hit_rate / (backup_hit_rate + primary_miss_rate)


def hit_rate_trajectory(
    primary_hit_rate: float, backup_hit_rate: float, rounds: int, initial: float | None = None
) -> NDArray[np.float64]:
    """Hit rate over time: ``p(t) = p_hit + (p(0) - p_hit) (p_p - p_b)^t`` for t = 0..rounds.

    Args:
        primary_hit_rate, backup_hit_rate, initial: see `unconditional_hit_rate`.
        rounds: at least 0.

    Returns:
        [rounds + 1].

    >>> hit_rate_trajectory(.9, .6, 3).round(4)
    array([0.9   , 0.87  , 0.861 , 0.8583])
    """
    check_at_least(0, rounds=rounds)
    limit = unconditional_hit_rate(primary_hit_rate, backup_hit_rate, initial)
    start = primary_hit_rate if initial is None else initial
    trajectory: NDArray[np.float64] = limit + (start - limit) * np.power(
        float(primary_hit_rate - backup_hit_rate), np.arange(rounds + 1)
    )
    return trajectory
