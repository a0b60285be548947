"""Saguaro's C from measured outcomes: an on-line experiment (the paper, section 4.2).

`downweight` computes the effect of C from p and q. The verifier does not report p; so every sequence gets a C of a
small grid, and the acceptance and the hits that follow are compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculator_service.saguaro.discounted import DiscountedMeans
from speculator_service.saguaro.domain import check_positive, check_probabilities

ARMS = (1.0, 0.7, 0.4, 0.15, 0.0)
"""C's that are tried. Falling, so that q is changed least by the first."""

_EXPLORE_EVERY = 5
"""One sequence in so many gets another arm than the best."""
_LEAST_OUTCOMES = 100
"""Of an arm, before it is compared."""


class ArmReport(NamedTuple):
    """What is known of one C."""

    downweight: float
    num_outcomes: float
    expected_tokens: float
    """E; not a number without outcomes."""
    hit_rate: float
    """Not a number without outcomes."""
    speedup: float
    """Predicted at the last `DownweightTuner.update`; not a number before the arm had outcomes enough."""
    standard_error: float
    """Of ``speedup``."""


class DownweightTuner:
    """Gives sequences a C and finds the one with the highest predicted speedup.

    C = 1, which changes nothing, is the best until another is significantly better: by ``confidence`` standard errors
    of the difference. A larger C is returned to when the gain is less than half of that.

    Args:
        arms: C's in [0, 1], falling, all different.
        half_life: outcomes of an arm after which an older one of it counts half.
        confidence: greater than 0.

    >>> tuner = DownweightTuner((1., .5, 0.))
    >>> [tuner.next_arm() for _ in range(10)]
    [1.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.0]
    """

    def __init__(self, arms: Sequence[float] = ARMS, *, half_life: float = 4000.0, confidence: float = 2.0) -> None:
        if not arms or any(second >= first for first, second in itertools.pairwise(arms)):
            raise ValueError(f"arms must be falling and at least 1, got {list(arms)}.")
        for arm in arms:
            check_probabilities(arm=arm)
        check_positive(confidence=confidence)
        self._arms = np.array(arms, np.float64)
        self._confidence = confidence
        self._tokens = DiscountedMeans(len(arms), half_life)
        self._hits = DiscountedMeans(len(arms), half_life)
        self._best = 0
        self._num_sequences = self._num_explored = 0
        self._speedup = np.full((len(arms), 2), math.nan)
        """[A, 2] predicted, and its standard error."""

    @property
    def best(self) -> float:
        """The C that most sequences get."""
        return float(self._arms[self._best])

    def next_arm(self) -> float:
        """C of a sequence that begins: the best one, and for every fifth sequence one of the others, in turn."""
        self._num_sequences += 1
        if self._num_sequences % _EXPLORE_EVERY or len(self._arms) == 1:
            return self.best
        others = np.delete(self._arms, self._best)
        self._num_explored += 1
        return float(others[(self._num_explored - 1) % len(others)])

    def observe(
        self, downweight: NDArray[np.floating], num_accepted: NDArray[np.integer], hit: NDArray[np.bool_]
    ) -> None:
        """Count the outcomes of sampled speculations; all arguments are [n].

        Args:
            downweight: C, an arm.
            num_accepted: k.
            hit: whether the outcome was prepared.
        """
        arm = np.abs(downweight[:, None] - self._arms).argmin(1)
        self._tokens.observe(arm, num_accepted + 1.0)
        self._hits.observe(arm, hit)

    def update(self, speedup: Callable[[float, float], float]) -> float:
        """Compare the arms; returns the best C.

        Args:
            speedup: of a primary speculator with expected tokens E >= 1 and hit rate p in [0, 1], rising in both;
                it holds the times, which are the same for all arms.
        """
        for arm in range(len(self._arms)):
            if self._tokens.weight(arm) >= _LEAST_OUTCOMES:
                self._speedup[arm] = self._predict(arm, speedup)
        speedups, errors = self._speedup.T
        if not math.isnan(speedups[self._best]):
            noise = self._confidence * np.hypot(errors, errors[self._best])
            gain = speedups - speedups[self._best]  # nan: not known yet, and no comparison holds
            better = np.flatnonzero(gain > noise)
            larger = np.flatnonzero(gain[: self._best] > -noise[: self._best] / 2)
            if len(better):
                top = better[np.argmax(speedups[better])]
                ties = speedups[top] - speedups[better] <= self._confidence * np.hypot(errors[top], errors[better])
                self._best = int(better[ties][0])
            elif len(larger):
                self._best = int(larger[0])
        return self.best

    def report(self) -> tuple[ArmReport, ...]:
        """All arms, in order."""
        return tuple(
            ArmReport(
                float(downweight),
                self._tokens.weight(arm),
                self._tokens.mean(arm),
                self._hits.mean(arm),
                *map(float, self._speedup[arm]),
            )
            for arm, downweight in enumerate(self._arms)
        )

    def _predict(self, arm: int, speedup: Callable[[float, float], float]) -> tuple[float, float]:
        """Speedup, and its standard error to first order."""
        tokens, hit_rate = max(1.0, self._tokens.mean(arm)), min(max(self._hits.mean(arm), 0.0), 1.0)
        tokens_error, hit_error = self._tokens.standard_error(arm), self._hits.standard_error(arm)
        value = speedup(tokens, hit_rate)
        by_tokens = speedup(tokens + tokens_error, hit_rate) - value
        by_hits = speedup(tokens, min(1.0, hit_rate + hit_error)) - speedup(tokens, max(0.0, hit_rate - hit_error))
        return value, math.hypot(by_tokens, by_hits / 2)
