"""Choice of Saguaro's C: acceptance against hit rate, weighed by the speedup (the paper, section 4.2, Theorem 15)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculator_service.saguaro.batch_speedup import SpeculatorQuality, speedup_with
from speculator_service.saguaro.domain import check_at_least, check_distributions, check_probabilities
from speculator_service.saguaro.speedup import accepted_distribution, expected_tokens

DEFAULT_GRID = tuple(round(0.05 * i, 2) for i in range(21))


def saguaro_probs(q: NDArray[np.floating], fan_out: int, downweight: float) -> NDArray[np.float64]:
    """sigma_{F,C} of a dense distribution (Definition 14).

    q'(t) = C q(t) / Z for t in S = top_F(q), q(t) / Z otherwise;  Z = C Q_S + 1 - Q_S

    Args:
        q: [..., V] with sum 1. Ties are broken in favour of the smaller token.
        fan_out: F >= 0.
        downweight: C in [0, 1]. C = 0 with all of q on S counts as C = 1, as C cancels there.

    >>> saguaro_probs(np.array([.49, .49, .01, .01]), 2, 47 / 147).round(6)
    array([0.47, 0.47, 0.03, 0.03])
    """
    check_probabilities(downweight=downweight)
    check_at_least(0, fan_out=fan_out)
    check_distributions(q=q)
    lowered = np.array(q, np.float64)
    first = np.argsort(-lowered, axis=-1, kind="stable")[..., :fan_out]
    np.put_along_axis(lowered, first, downweight * np.take_along_axis(lowered, first, -1), -1)
    total = lowered.sum(-1, keepdims=True)
    return np.where(total > 0, lowered / np.where(total > 0, total, 1), q)


class DownweightCurve(NamedTuple):
    """What each C of a grid would do."""

    downweight: NDArray[np.float64]
    """[g] C."""
    acceptance_rate: NDArray[np.float64]
    """[g] alpha of the ratio rule; rises with C near 1."""
    rejected_hit_rate: NDArray[np.float64]
    """[g] probability that the bonus token is prepared given that a token was rejected; falls with C (Theorem 15)."""


def downweight_curve(
    p: NDArray[np.floating], q: NDArray[np.floating], fan_out: int, grid: Sequence[float] = DEFAULT_GRID
) -> DownweightCurve:
    """Acceptance and hit rate for every C of the grid, computed from measured pairs of distributions.

    Prepared at a position are the F first tokens of the draft without the one that was sent and rejected, x. So

    P(rejected and hit) = r(top_F) + r(F+1st token) P(x in top_F | rejected),   r = max(p - q', 0),

    as r(x) = 0. Averages over positions weigh each by its probability.

    Args:
        p: [n, m] target probabilities of the draft's m first tokens; the rest of p may be missing.
        q: [n, m] the draft's probabilities of these tokens for C = 1, falling along the row, with sum 1.
        fan_out: F >= 0.
        grid: C's.

    >>> p, q = np.array([[.48, .48, .02, .02]]), np.array([[.49, .49, .01, .01]])
    >>> curve = downweight_curve(p, q, 2, [47 / 147, 1])
    >>> curve.acceptance_rate.round(6), curve.rejected_hit_rate.round(6)
    (array([0.98, 0.98]), array([1. , 0.5]))
    """
    check_distributions(q=q)
    if p.shape != q.shape or not ((p >= 0).all() and (p.sum(-1) <= 1 + 1e-4).all()):
        raise ValueError(f"p must have the shape of q, {q.shape}, and hold probabilities with sum at most 1.")
    acceptance, hits = [], []
    for downweight in grid:
        lowered = saguaro_probs(q, fan_out, downweight)
        accepted = np.minimum(p, lowered).sum(-1)
        residual = np.maximum(p - lowered, 0)
        rejected_first = np.maximum(lowered - p, 0)[:, :fan_out].sum(-1)
        is_first = np.minimum(rejected_first / np.maximum(1 - accepted, 1e-30), 1)
        hit = residual[:, :fan_out].sum(-1) + residual[:, fan_out : fan_out + 1].sum(-1) * is_first
        rejected = float((1 - accepted).sum())
        acceptance.append(float(accepted.mean()))
        hits.append(min(1.0, float(hit.sum()) / rejected) if rejected > 1e-12 else 1.0)
    return DownweightCurve(np.array(grid, np.float64), np.array(acceptance), np.array(hits))


def downweight_speedups(
    curve: DownweightCurve,
    lookahead: int,
    last_hit_rate: float,
    primary_time: float,
    *,
    backup: SpeculatorQuality | None = None,
    batch_size: float = 1,
) -> NDArray[np.float64]:
    """Predicted speedup for every C of a curve (Corollary 16).

    p_hit,p = (1 - alpha^K) h_rejected + alpha^K h_K: where all K are accepted the bonus token comes from p, on
    which C has no influence.

    Args:
        curve: from `downweight_curve`.
        lookahead: K >= 1.
        last_hit_rate: h_K(F_K).
        primary_time: T_p.
        backup: None: the primary, just in time, with T_b = T_p.
        batch_size: b.

    Returns:
        [g].
    """
    check_at_least(1, lookahead=lookahead)
    check_probabilities(last_hit_rate=last_hit_rate)
    speedups = []
    for alpha, rejected_hit_rate in zip(curve.acceptance_rate.tolist(), curve.rejected_hit_rate.tolist(), strict=True):
        all_accepted = float(accepted_distribution(min(1.0, alpha), lookahead)[-1])
        hit_rate = (1 - all_accepted) * rejected_hit_rate + all_accepted * last_hit_rate
        primary = SpeculatorQuality(primary_time, expected_tokens(min(1.0, alpha), lookahead), hit_rate)
        speedups.append(speedup_with(primary, backup or primary, batch_size))
    return np.array(speedups)


def best_downweight(curve: DownweightCurve, speedups: NDArray[np.float64], margin: float = 1e-3) -> float:
    """The C of the highest speedup; of those within ``margin`` (a share of it) the one that changes q least.

    >>> curve = DownweightCurve(np.array([0., .5, 1.]), np.zeros(3), np.zeros(3))
    >>> best_downweight(curve, np.array([1., 2., 1.9])), best_downweight(curve, np.array([2., 2., 1.9999]))
    (0.5, 1.0)
    """
    check_at_least(0, margin=margin)
    return float(curve.downweight[speedups >= speedups.max() * (1 - margin)].max())
