"""How a budget of B outcomes is shared among the positions k = 0..K (the paper, sections 4.1 and A.2).

`geometric_fan_out` with `round_fan_out` is the closed form under a power law; `greedy_fan_out` takes measured hit
curves and is to be preferred where they exist.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from speculator_service.saguaro.domain import check_at_least, check_positive
from speculator_service.saguaro.speedup import accepted_distribution

_GUARD = 1e-9
"""Share of a unit that is rounding error of a float: 2.9999999996 means 3."""
_NOISE = 1e-15
"""Rise of the slope of a hit curve that is rounding error."""


def geometric_fan_out(
    budget: int, lookahead: int, acceptance_rate: float, miss_exponent: float, *, last_constant_ratio: float = 1.0
) -> NDArray[np.float64]:
    """Optimal real-valued fan-out under the miss law ``1 - h(F) = c F^-r`` (Theorem 12).

    F_k proportional to w_k^{1/(1+r)} with w_k = P(k accepted), which is the paper's
    F_k = F_0 rho^k (k < K), F_K = F_0 rho^K (1 - a)^{-1/(1+r)}, rho = a^{1/(1+r)}
    in a form that also holds in the limits: a = 0 (all at F_0), a = 1 (all at F_K), K = 0.
    F_K is no part of the decreasing series: F_K > F_{K-1} iff a > 1/2.

    Args:
        budget: B >= 0.
        lookahead: K >= 0.
        acceptance_rate: a in [0, 1].
        miss_exponent: r > 0.
        last_constant_ratio: c_K / c > 0; at position K the bonus token comes from p, not from a residual.

    Returns:
        [K + 1] with sum B.

    >>> geometric_fan_out(10, 2, .5, 1).round(5)
    array([4.14214, 2.92893, 2.92893])
    """
    check_at_least(0, budget=budget)
    check_positive(miss_exponent=miss_exponent, last_constant_ratio=last_constant_ratio)
    weights = accepted_distribution(acceptance_rate, lookahead)
    weights[-1] *= last_constant_ratio
    shares = weights ** (1 / (1 + miss_exponent))
    result: NDArray[np.float64] = budget * shares / shares.sum()
    return result


def round_fan_out(fan_out: NDArray[np.floating]) -> tuple[int, ...]:
    """Integers with the same sum by largest remainder, ties to the smaller k.

    n_0 >= .. >= n_{K-1} if the real values fall: of two neighbours with equal floors the earlier has the larger
    remainder and is served first, and one unit cannot invert floors that differ.

    Args:
        fan_out: [K + 1] real values >= 0 whose sum is an integer.

    >>> round_fan_out(geometric_fan_out(20, 4, .8, 1))
    (4, 4, 3, 3, 6)
    """
    if not (np.isfinite(fan_out).all() and (fan_out >= 0).all()):
        raise ValueError(f"fan_out must be finite and at least 0, got {fan_out}.")
    budget = round(float(fan_out.sum()))
    counts = np.floor(fan_out + _GUARD).astype(np.int64)
    remainders = np.round(fan_out - counts, 9)  # float noise must not decide a tie
    counts[np.argsort(-remainders, kind="stable")[: budget - counts.sum()]] += 1
    return tuple(counts.tolist())


def clip_fan_out(fan_out: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """At most V - 1 bonus tokens at k < K, where one token was sent, and V at K.

    >>> clip_fan_out((9, 3, 9), 6)
    (5, 3, 6)
    """
    check_at_least(1, vocab_size=vocab_size)
    return (*(min(count, vocab_size - 1) for count in fan_out[:-1]), min(fan_out[-1], vocab_size))


def shifted_law_curves(lookahead: int, miss_exponent: float, max_fan_out: int) -> NDArray[np.float64]:
    """Hit curves ``h(F) = 1 - (1 + F)^-r``: like the power law for large F, but concave from h(0) = 0 on.

    The pure law has h(0) = -inf and h(1) = 0 and is of no use to `greedy_fan_out`.

    Returns:
        [K + 1, max_fan_out + 1].
    """
    check_at_least(0, lookahead=lookahead, max_fan_out=max_fan_out)
    check_positive(miss_exponent=miss_exponent)
    curve = 1 - (1.0 + np.arange(max_fan_out + 1)) ** -miss_exponent
    return np.tile(curve, (lookahead + 1, 1))


def greedy_fan_out(budget: int, weights: NDArray[np.floating], hit_curves: NDArray[np.floating]) -> tuple[int, ...]:
    """Best integer fan-out for any concave hit curves (Theorem 18): the B largest marginal gains w_k h_k'(F).

    Measured curves that are not concave are replaced by their least concave majorant.

    Args:
        budget: B >= 0.
        weights: [K + 1] w_k, the probability that k tokens are accepted.
        hit_curves: [K + 1, F_max + 1] h_k(F): how often the bonus token at position k is among the F first
            candidates, F = 0..F_max.

    Returns:
        K + 1 counts with sum ``min(B, (K + 1) F_max)``. Ties go to the smaller k.

    >>> greedy_fan_out(10, accepted_distribution(.5, 2), shifted_law_curves(2, 1, 10))
    (4, 3, 3)
    """
    check_at_least(0, budget=budget)
    if hit_curves.ndim != 2 or len(hit_curves) != len(weights):
        raise ValueError(f"hit_curves must have shape [{len(weights)}, F_max + 1], got {hit_curves.shape}.")
    slopes = np.array([_concave_slopes(increments) for increments in np.diff(hit_curves, axis=1)])
    gains = np.asarray(weights)[:, None] * slopes
    best = np.argsort(-np.round(gains, 15).ravel(), kind="stable")[:budget]
    return tuple(np.bincount(best // max(1, gains.shape[1]), minlength=len(weights)).tolist())


def concave_majorant(hit_curves: NDArray[np.floating]) -> NDArray[np.float64]:
    """Least concave majorants of curves [K + 1, F_max + 1], for several calls of `greedy_fan_out`.

    >>> concave_majorant(np.array([[0., 0., .8, .9]]))
    array([[0. , 0.4, 0.8, 0.9]])
    """
    majorants = np.array(hit_curves, np.float64)
    for curve in majorants:
        curve[1:] = curve[0] + np.cumsum(_concave_slopes(np.diff(curve)))
    return majorants


def _concave_slopes(increments: NDArray[np.floating]) -> NDArray[np.floating]:
    """Increments [F_max] of the least concave majorant of a curve, from the curve's own (pool adjacent violators)."""
    if (np.diff(increments) <= _NOISE).all():
        return increments
    blocks: list[tuple[float, int]] = []  # (sum, length), means falling
    for increment in increments.tolist():
        total, length = increment, 1
        while blocks and blocks[-1][0] * length <= total * blocks[-1][1]:
            before = blocks.pop()
            total, length = total + before[0], length + before[1]
        blocks.append((total, length))
    return np.array([total / length for total, length in blocks for _ in range(length)])


def expected_hit_rate(fan_out: Sequence[int], weights: NDArray[np.floating], hit_curves: NDArray[np.floating]) -> float:
    """``sum_k w_k h_k(F_k)``, what a fan-out list is worth. Arguments as for `greedy_fan_out`, F_k <= F_max."""
    curves = np.asarray(hit_curves)
    return float(np.asarray(weights) @ curves[np.arange(len(fan_out)), list(fan_out)])


def power_law_hit_rate(
    fan_out: Sequence[float] | NDArray[np.floating],
    acceptance_rate: float,
    miss_exponent: float,
    miss_constant: float = 1.0,
) -> float:
    """``sum_k P(k accepted) h(F_k)`` with ``h(F) = 1 - c F^-r``, and 0 where that is negative or F = 0.

    >>> round(power_law_hit_rate((4, 3, 3), .5, 1), 6), round(power_law_hit_rate((10 / 3,) * 3, .5, 1), 6)
    (0.708333, 0.7)
    """
    check_positive(miss_exponent=miss_exponent, miss_constant=miss_constant)
    counts = np.asarray(fan_out, np.float64)
    hits = np.zeros(len(counts))
    some = counts > 0
    hits[some] = np.maximum(1 - miss_constant * counts[some] ** -miss_exponent, 0)
    return float(accepted_distribution(acceptance_rate, len(counts) - 1) @ hits)
