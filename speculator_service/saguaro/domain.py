"""Checks of the domains of the formulas: a wrong argument is a `ValueError` that names it and its range."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_SUM_TOLERANCE = 1e-4
"""How far from 1 the sum of float32 probabilities over a large vocabulary may lie."""


def check_probabilities(**values: float) -> None:
    """Each value must lie in [0, 1]."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value}.")


def check_at_least(minimum: float, **values: float) -> None:
    """Each value must be finite and at least ``minimum``."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= minimum):
            raise ValueError(f"{name} must be finite and at least {minimum}, got {value}.")


def check_positive(**values: float) -> None:
    """Each value must be finite and greater than 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be finite and greater than 0, got {value}.")


def check_distributions(**values: NDArray[np.floating]) -> None:
    """The last axis of each array must hold probabilities: not negative, with sum 1; all shapes must be equal."""
    for name, value in values.items():
        if not ((value >= 0).all() and (np.abs(value.sum(-1) - 1) <= _SUM_TOLERANCE).all()):
            raise ValueError(f"{name} must hold probabilities in [0, 1] with sum 1 along its last axis.")
    if len({value.shape for value in values.values()}) > 1:
        shapes = ", ".join(f"{name} {value.shape}" for name, value in values.items())
        raise ValueError(f"The shapes must be equal: {shapes}.")
