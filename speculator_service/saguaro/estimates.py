"""On-line estimates of acceptance and hit curves from counted outcomes, with exponential forgetting.

A *source* is a small number for where the verified speculation came from (primary, or one of the backups), since
outcomes after a hit and after a miss obey different laws.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculator_service.saguaro.domain import check_at_least, check_positive, check_probabilities
from speculator_service.saguaro.speedup import expected_tokens


class PowerLaw(NamedTuple):
    """Miss law ``1 - h(F) = c F^-r`` for F >= 1, and 1 for F = 0."""

    constant: float
    """c in (0, 1]; the paper has 1."""
    exponent: float
    """r > 0."""

    def hazards(self, count: int) -> NDArray[np.float64]:
        """[count] probability that candidate number j is the bonus token, given that those before it are not.

        >>> PowerLaw(.5, 1.).hazards(3).round(4)
        array([0.5   , 0.5   , 0.3333])
        """
        ranks = np.arange(1, max(count, 1))
        return np.concatenate([[1 - self.constant], 1 - (1 + 1 / ranks) ** -self.exponent])[:count]


DEFAULT_LAW = PowerLaw(0.5, 1.0)
"""Neutral: half of the bonus tokens are the first candidate, and the misses fall as 1 / F."""


class OutcomeEstimates:
    """Acceptance rates and hit curves per source.

    The hit curve is a Kaplan-Meier estimate, as it is often known only that the bonus token was not among the
    candidates looked at ("censored"), and how many were looked at changes with the fan-out. So is acceptance by
    position, as speculations may be shorter than K. Where all tokens were accepted, however many there were, the
    bonus token comes from p itself and not from a residual: that is curve K. Every number begins with a prior that
    weighs as much as ``prior_weight`` outcomes; for the curves it is the power law fitted to all positions of the
    source.

    Args:
        lookahead: K >= 1.
        max_fan_out: M >= 1, ranks counted; beyond, curves follow the fitted law.
        num_sources: at least 1.
        half_life: outcomes of a source after which an older outcome of it counts half.
        prior_acceptance_rate: in [0, 1].
        prior_law: until there is data.
        prior_weight: greater than 0.

    >>> estimates = OutcomeEstimates(lookahead=2, max_fan_out=2)
    >>> zeros = np.zeros(100, np.int64)
    >>> estimates.observe(zeros, num_accepted=zeros + 1, num_sent=zeros + 2, rank=zeros, num_known=zeros + 2)
    >>> round(estimates.acceptance_rate(0), 2)
    0.52
    >>> estimates.hit_curves(0, 2)[1].round(2)
    array([0.  , 0.92, 0.96])
    """

    def __init__(
        self,
        lookahead: int,
        max_fan_out: int,
        *,
        num_sources: int = 2,
        half_life: float = 2000.0,
        prior_acceptance_rate: float = 0.7,
        prior_law: PowerLaw = DEFAULT_LAW,
        prior_weight: float = 20.0,
    ) -> None:
        check_at_least(1, lookahead=lookahead, max_fan_out=max_fan_out, num_sources=num_sources)
        check_positive(half_life=half_life, prior_weight=prior_weight, prior_exponent=prior_law.exponent)
        check_probabilities(prior_acceptance_rate=prior_acceptance_rate, prior_constant=prior_law.constant)
        self.lookahead, self.max_fan_out, self.num_sources = lookahead, max_fan_out, num_sources
        self._half_life = half_life
        self._prior_acceptance, self._prior_law, self._prior_weight = prior_acceptance_rate, prior_law, prior_weight
        self._accepted = np.zeros((num_sources, lookahead + 1))
        """[S, K + 1] outcomes by k."""
        self._rejections = np.zeros((num_sources, lookahead))
        """[S, K] outcomes in which token k + 1 was rejected."""
        self._hits = np.zeros((num_sources, lookahead + 1, max_fan_out))
        """[S, K + 1, M] outcomes by position and rank of the bonus token; position K: nothing was rejected."""
        self._at_risk = np.zeros((num_sources, lookahead + 1, max_fan_out))
        """[S, K + 1, M] outcomes in which it was seen whether the bonus token has this rank, and no lower one."""

    def observe(
        self,
        source: NDArray[np.integer],
        num_accepted: NDArray[np.integer],
        num_sent: NDArray[np.integer],
        rank: NDArray[np.integer],
        num_known: NDArray[np.integer],
    ) -> None:
        """Count the outcomes of a round; all arguments are [b].

        Args:
            source: of the speculation that was verified, 0..num_sources - 1.
            num_accepted: k.
            num_sent: tokens that were verified, k..K.
            rank: place from 0 of the bonus token among the draft's candidates at position k, without the token
                sent there (none if k = ``num_sent``); -1: not among the ``num_known`` first.
            num_known: candidates that were looked at: F_k if only hits are seen, 0 if none.
        """
        if not len(source):
            return
        sources, positions, ranks = self._hits.shape
        decay = 0.5 ** (np.bincount(source, minlength=sources) / self._half_life)
        self._accepted *= decay[:, None]
        self._rejections *= decay[:, None]
        self._hits *= decay[:, None, None]
        self._at_risk *= decay[:, None, None]

        cell = source * positions + num_accepted
        self._accepted += np.bincount(cell, minlength=sources * positions).reshape(sources, positions)
        rejected = num_accepted < num_sent
        rejections = np.bincount(cell[rejected], minlength=sources * positions).reshape(sources, positions)
        self._rejections += rejections[:, :-1]
        cell = np.where(rejected, cell, source * positions + positions - 1)
        hit = (rank >= 0) & (rank < ranks)
        self._hits += np.bincount(cell[hit] * ranks + rank[hit], minlength=self._hits.size).reshape(self._hits.shape)
        seen = np.where(rank >= 0, rank + 1, num_known).clip(0, ranks)
        ends = np.bincount(cell * (ranks + 1) + seen, minlength=sources * positions * (ranks + 1))
        ends = ends.reshape(sources, positions, ranks + 1)[..., :0:-1]
        self._at_risk += ends.cumsum(-1)[..., ::-1]

    def num_outcomes(self, source: int) -> float:
        """Outcomes of the source that still count."""
        return float(self._accepted[source].sum())

    def acceptance_rate(self, source: int) -> float:
        """a: accepted tokens among those that were decided on (maximum likelihood for Theorem 1's geometric law)."""
        accepted = float(self._accepted[source] @ np.arange(self.lookahead + 1))
        decided = accepted + float(self._rejections[source].sum())
        return (accepted + self._prior_weight * self._prior_acceptance) / (decided + self._prior_weight)

    def acceptance_by_position(self, source: int) -> NDArray[np.float64]:
        """[K] probability that token k + 1 is accepted, given that it was sent and those before it are accepted."""
        accepted = self._accepted[source, :0:-1].cumsum()[::-1]  # outcomes with more than k accepted tokens
        prior = self._prior_weight * self.acceptance_rate(source)
        rates: NDArray[np.float64] = (accepted + prior) / (accepted + self._rejections[source] + self._prior_weight)
        return rates

    def position_weights(self, source: int) -> NDArray[np.float64]:
        """[K + 1] P(k accepted) for K tokens, measured; not geometric if acceptance changes along the speculation."""
        rates = self.acceptance_by_position(source)
        weights: NDArray[np.float64] = np.append(1.0, rates.cumprod()) * np.append(1 - rates, 1.0)
        return weights

    def expected_tokens(self, source: int) -> float:
        """E: tokens of a round that verifies a speculation of this source, however short, and its bonus token."""
        tokens = float(self._accepted[source] @ np.arange(1, self.lookahead + 2))
        prior = self._prior_weight * expected_tokens(self.acceptance_rate(source), self.lookahead)
        return (tokens + prior) / (self.num_outcomes(source) + self._prior_weight)

    def power_law(self, source: int) -> PowerLaw:
        """Law fitted to the hit curve of all positions together: least squares of log miss rate on log F.

        Points weigh by the inverse of Greenwood's variance. With less than two points: the prior law.
        """
        hits, at_risk = self._hits[source].sum(0), self._at_risk[source].sum(0)
        enough = np.logical_and.accumulate((at_risk >= self._prior_weight) & (at_risk - hits >= 1))
        hits, at_risk = hits[enough], at_risk[enough]
        if len(hits) < 2 or hits.sum() < 1:
            return self._prior_law
        log_miss = np.log1p(-hits / at_risk).cumsum()
        variance = ((hits + 0.5) / (at_risk * (at_risk - hits))).cumsum()
        slope, intercept = np.polyfit(np.log(np.arange(1, len(hits) + 1)), log_miss, 1, w=variance**-0.5)
        return PowerLaw(float(np.exp(min(intercept, 0.0))), float(max(-slope, 0.01)))

    def hit_curves(self, source: int, max_fan_out: int) -> NDArray[np.float64]:
        """[K + 1, max_fan_out + 1] h_k(F), F = 0..max_fan_out: rising, measured where there is data.

        Row k < K: where token k + 1 was rejected; row K: where nothing was.
        """
        check_at_least(0, max_fan_out=max_fan_out)
        law = self.power_law(source).hazards(max_fan_out)
        hazards = np.tile(law, (self.lookahead + 1, 1))
        known = min(max_fan_out, self.max_fan_out)
        hits, at_risk = self._hits[source, :, :known], self._at_risk[source, :, :known]
        hazards[:, :known] = (hits + self._prior_weight * law[:known]) / (at_risk + self._prior_weight)
        curves = np.zeros((self.lookahead + 1, max_fan_out + 1))
        curves[:, 1:] = 1 - (1 - hazards).cumprod(1)
        return curves
