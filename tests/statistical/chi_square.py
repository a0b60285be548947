"""Pearson's chi-square test as a number of standard deviations."""

from __future__ import annotations

import math

import numpy as np


def chi_square_deviation(observed: np.ndarray, expected_probs: np.ndarray) -> float:
    """How far Pearson's statistic lies above its mean, in standard deviations (Wilson and Hilferty, 1931).

    About standard normal if ``observed`` was drawn from ``expected_probs``; far above if it was not. Cells with
    an expected count below 5 are joined to one.

    Args:
        observed: [n] counts.
        expected_probs: [n] with sum 1; an observation in a cell of probability 0 gives infinity.
    """
    total = observed.sum()
    if observed[expected_probs == 0].any():
        return math.inf
    expected = expected_probs * total
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(observed[~rare], observed[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    scale = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - scale)) / math.sqrt(scale))
