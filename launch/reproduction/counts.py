"""Counted outcomes and what follows from them: acceptance, hit curves, allocations and hit rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reproduction.rounds import NUM_RANKS, Rounds
from speculator_service.saguaro.allocation import (
    expected_hit_rate,
    geometric_fan_out,
    greedy_fan_out,
    round_fan_out,
)
from speculator_service.saguaro.estimates import PowerLaw

NUM_FOLDS = 2
MIN_MISSES = 5
"""Points of fewer misses say little about the law."""

Allocate = Callable[["Outcomes", int], tuple[int, ...]]
"""From counts and a budget B to F_0..F_K with sum B."""


def count(rounds: Rounds, lookahead: int) -> NDArray[np.int64]:
    """Count outcomes.

    Returns:
        [fold 2, source 2, all accepted 2, k K + 1, rank `NUM_RANKS` + 1]. Folds are the prompts of even and of odd
        index; *all accepted* is 1 where no token was rejected, so that the bonus token is drawn from p itself.
    """
    shape = (NUM_FOLDS, 2, 2, lookahead + 1, NUM_RANKS + 1)
    is_complete = (rounds.num_accepted == rounds.num_sent).astype(np.int64)
    cell = (rounds.prompt % NUM_FOLDS, rounds.source, is_complete, rounds.num_accepted, rounds.rank)
    return np.bincount(np.ravel_multi_index(cell, shape), minlength=np.prod(shape)).reshape(shape)


class Outcomes(NamedTuple):
    """Counts of one kind of speculation."""

    counts: NDArray[np.int64]
    """[all accepted 2, K + 1, `NUM_RANKS` + 1], see `count`."""

    @property
    def num(self) -> int:
        """Outcomes in all."""
        return int(self.counts.sum())

    @property
    def lookahead(self) -> int:
        """K."""
        return self.counts.shape[1] - 1

    @property
    def weights(self) -> NDArray[np.float64]:
        """[K + 1] share of the outcomes with k accepted tokens."""
        return self.counts.sum((0, 2)) / max(1, self.num)

    @property
    def expected_tokens(self) -> float:
        """E: tokens of a round, the bonus token included."""
        return 1 + float(self.weights @ np.arange(self.lookahead + 1))

    @property
    def acceptance_rate(self) -> float:
        """a: accepted tokens among those that were decided on; 0 if there were none."""
        accepted = int(self.counts.sum((0, 2)) @ np.arange(self.lookahead + 1))
        return accepted / max(1, accepted + int(self.counts[0].sum()))

    @property
    def hit_curves(self) -> NDArray[np.float64]:
        """[K + 1, `NUM_RANKS` + 1] h_k(F) for F = 0..; 0 where there are no outcomes with k."""
        return _cumulative(self.counts.sum(0)) / np.maximum(1, self.counts.sum((0, 2)))[:, None]

    def misses(self, *, all_accepted: bool, max_fan_out: int) -> tuple[NDArray[np.int64], int]:
        """Misses for F = 1..``max_fan_out``, all positions together, and of how many outcomes."""
        ranks = self.counts[int(all_accepted)].sum(0)
        return int(ranks.sum()) - _cumulative(ranks)[1 : max_fan_out + 1], int(ranks.sum())


def _cumulative(ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """[..., R + 1] from [..., R + 1]: outcomes whose rank is less than F, F = 0..R; the last rank is no candidate."""
    hits = np.zeros_like(ranks)
    hits[..., 1:] = ranks[..., :-1].cumsum(-1)
    return hits


def outcomes(counts: NDArray[np.int64], *, source: int | None = None, fold: int | None = None) -> Outcomes:
    """Part of an array from `count`: one source or both, one fold or both."""
    folds = counts if fold is None else counts[fold : fold + 1]
    sources = folds if source is None else folds[:, source : source + 1]
    return Outcomes(sources.sum((0, 1)))


class Fit(NamedTuple):
    """Power law of a miss curve."""

    law: PowerLaw
    r_squared: float
    """Share of the variance of log miss rates that the law explains, each point with its weight."""
    max_fan_out: int
    """Last point that was used."""


def fit_power_law(misses: NDArray[np.integer], trials: int) -> Fit | None:
    """Weighted least squares of log miss rate on log F: ``1 - h(F) = c F^-r``.

    Weights are the inverse variances of the log of a binomial share, n m / (1 - m).

    Args:
        misses: [F_max] for F = 1, 2, ...
        trials: n.

    Returns:
        None with less than 2 points of at least `MIN_MISSES` misses, or if there is no fall.
    """
    used = int(np.logical_and.accumulate(misses >= MIN_MISSES).sum())
    if used < 2:
        return None
    rates = np.minimum(misses[:used] / trials, 1 - 1 / (2 * trials))
    x, y, weights = np.log(np.arange(1, used + 1)), np.log(rates), trials * rates / (1 - rates)
    slope, intercept = np.polyfit(x, y, 1, w=np.sqrt(weights))
    if slope >= 0:
        return None
    left = weights @ (y - slope * x - intercept) ** 2
    whole = weights @ (y - np.average(y, weights=weights)) ** 2
    return Fit(PowerLaw(float(np.exp(intercept)), float(-slope)), float(1 - left / whole), used)


def uniform(outcomes: Outcomes, budget: int) -> tuple[int, ...]:
    """The same fan-out at every position; ``budget`` is a multiple of K + 1."""
    return (budget // (outcomes.lookahead + 1),) * (outcomes.lookahead + 1)


def geometric(outcomes: Outcomes, budget: int) -> tuple[int, ...]:
    """Theorem 12 with the acceptance rate and the exponent of these outcomes; uniform where there is no exponent."""
    ranks = outcomes.counts.sum((0, 1))
    fit = fit_power_law(outcomes.num - _cumulative(ranks)[1 : budget + 1], outcomes.num)
    if fit is None:
        return uniform(outcomes, budget)
    real = geometric_fan_out(budget, outcomes.lookahead, outcomes.acceptance_rate, fit.law.exponent)
    return round_fan_out(real)


def greedy(outcomes: Outcomes, budget: int) -> tuple[int, ...]:
    """The best allocation for these outcomes' own hit curves (Theorem 18)."""
    return greedy_fan_out(budget, outcomes.weights, outcomes.hit_curves[:, : budget + 1])


ALLOCATIONS: dict[str, Allocate] = {"uniform": uniform, "geometric": geometric, "greedy": greedy}


class HitRate(NamedTuple):
    """What an allocation is worth on outcomes that it was not made from."""

    rate: float
    standard_error: float
    """As if outcomes were independent."""
    fan_outs: tuple[tuple[int, ...], ...]
    """One allocation per fold."""


def cross_fitted_hit_rate(
    counts: NDArray[np.int64], budget: int, allocate: Allocate, *, source: int | None = None
) -> HitRate:
    """Allocate by one half of the prompts, count hits in the other, and the other way round.

    Args:
        counts: from `count`.
        budget: B at most `NUM_RANKS`.
        allocate: one of `ALLOCATIONS`.
        source: of the speculations; None: both.
    """
    hits, num, fan_outs = 0.0, 0, []
    for fold in range(NUM_FOLDS):
        made_from = outcomes(counts, source=source, fold=1 - fold)
        held_out = outcomes(counts, source=source, fold=fold)
        fan_outs.append(allocate(made_from, budget))
        hits += held_out.num * expected_hit_rate(fan_outs[-1], held_out.weights, held_out.hit_curves)
        num += held_out.num
    rate = min(1.0, hits / max(1, num))
    return HitRate(rate, float(np.sqrt(rate * (1 - rate) / max(1, num))), tuple(fan_outs))


def merged(arrays: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Counts of several runs together."""
    total: NDArray[np.int64] = np.sum(list(arrays), axis=0)
    return total
