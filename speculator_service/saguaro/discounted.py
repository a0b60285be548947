"""Means of counted values with exponential forgetting, several at once."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from speculator_service.saguaro.domain import check_at_least, check_positive

_LEAST_WEIGHT = 1e-12
"""Keeps means finite where nothing was counted."""


class DiscountedMeans:
    """Mean and standard error of the values of each of some groups.

    Args:
        num_groups: G >= 1.
        half_life: values after which an older one counts half: values of its own group, or with ``forget_together``
            of all groups, so that groups without new values become uncertain again.
        forget_together: see ``half_life``.

    >>> means = DiscountedMeans(2, half_life=1e9)
    >>> means.observe(np.array([0, 0, 1]), np.array([1., 2., 5.]))
    >>> round(means.mean(0), 6), round(means.mean(1, prior=3., prior_weight=1.), 6)
    (1.5, 4.0)
    """

    def __init__(self, num_groups: int, half_life: float, *, forget_together: bool = False) -> None:
        check_at_least(1, num_groups=num_groups)
        check_positive(half_life=half_life)
        self._half_life, self._together = half_life, forget_together
        self._weight = np.zeros(num_groups)
        self._sum = np.zeros(num_groups)
        self._squares = np.zeros(num_groups)

    def observe(self, group: NDArray[np.integer], value: NDArray[np.floating] | NDArray[np.bool_]) -> None:
        """Count values [n] of groups [n]."""
        size = len(self._weight)
        number = np.bincount(group, minlength=size)
        decay = 0.5 ** ((number.sum() if self._together else number) / self._half_life)
        values = value.astype(np.float64)
        self._weight = decay * self._weight + number
        self._sum = decay * self._sum + np.bincount(group, values, minlength=size)
        self._squares = decay * self._squares + np.bincount(group, values * values, minlength=size)

    def scale_odds(self, factor: NDArray[np.floating]) -> None:
        """Take the values so far, which are 0 or 1, for ones whose means have ``factor`` [G] times the odds.

        Where all were equal the next one is taken for likely to be the other half a time: no odds are 0 or infinite.
        """
        least = 0.5 / (self._weight + 1)
        mean = np.clip(self._sum / np.maximum(self._weight, _LEAST_WEIGHT), least, 1 - least)
        self._sum = self._weight * scaled_odds(mean, factor)
        self._squares = self._sum.copy()

    def weight(self, group: int) -> float:
        """Values that still count."""
        return float(self._weight[group])

    def mean(self, group: int, prior: float = math.nan, prior_weight: float = 0.0) -> float:
        """Mean, drawn to ``prior`` as by ``prior_weight`` values; ``prior`` itself where nothing counts."""
        weight = self._weight[group] + prior_weight
        if weight <= 0:
            return prior
        return float((self._sum[group] + (prior_weight * prior if prior_weight else 0.0)) / weight)

    def standard_error(self, group: int) -> float:
        """Of the mean without a prior; infinity for less than two values.

        One more term keeps it from being 0 where all values were equal so far.
        """
        weight = float(self._weight[group])
        if weight < 2:
            return math.inf
        mean = float(self._sum[group]) / weight
        variance = max(0.0, float(self._squares[group]) / weight - mean * mean)
        return math.sqrt((variance + 1 / weight) / weight)


def scaled_odds(probability: NDArray[np.float64], factor: NDArray[np.floating]) -> NDArray[np.float64]:
    """[...] probabilities with ``factor`` times the odds p / (1 - p): never outside of [0, 1]. Undone by its inverse.

    >>> scaled_odds(np.array([.5, .75, 1.]), np.array([3., 1 / 3, 9.]))
    array([0.75, 0.5 , 1.  ])
    """
    scaled = probability * factor
    result: NDArray[np.float64] = scaled / (scaled + 1 - probability)
    return result
