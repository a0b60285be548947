"""Speeds are compared within a repetition: absolute ones drift, ratios of neighbours do not."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Ratio(NamedTuple):
    """Of paired measurements."""

    median: float
    least: float
    most: float


def paired_ratio(mine: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ratios of measurements with the same number.

    Raises:
        ValueError: there are none, or not as many of one as of the other.

    >>> paired_ratio([2, 4, 9], [1, 4, 3])
    Ratio(median=2.0, least=1.0, most=3.0)
    """
    ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
    if not ratios:
        raise ValueError("nothing was measured")
    return Ratio(float(statistics.median(ratios)), min(ratios), max(ratios))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of all do not exceed.

    Raises:
        ValueError: there are no values.

    >>> percentile([4, 1, 3, 2], 50), percentile([4, 1, 3, 2], 99), percentile([7], 1)
    (2, 4, 7)
    """
    if not values:
        raise ValueError("nothing was measured")
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]
