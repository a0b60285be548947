"""How many tokens to draft: choice among the lookaheads 1..K by predicted speedup (Theorem 7, Corollary 16)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def expected_tokens_by_depth(acceptance: NDArray[np.floating]) -> NDArray[np.float64]:
    """[K] E(D) of a speculation of D = 1..K tokens, the bonus token included.

    Args:
        acceptance: [K] probability that token D is accepted, given that those before it are.

    >>> expected_tokens_by_depth(np.array([.5, .5]))
    array([1.5 , 1.75])
    """
    tokens: NDArray[np.float64] = 1 + np.cumprod(np.asarray(acceptance, np.float64)).cumsum()
    return tokens


def best_depth(
    speedups: NDArray[np.floating], current: int, margin: float, allowed: NDArray[np.bool_] | None = None
) -> int:
    """The depth of the highest speedup, the largest of equal ones; ``current`` unless that gains more than ``margin``.

    Args:
        speedups: [K] for depths 1..K.
        current: 1..K.
        margin: a share of the speedup, >= 0.
        allowed: [K] depths to choose from; None or none at all: every depth.

    >>> best_depth(np.array([1., 2., 2.05]), 2, .03), best_depth(np.array([1., 2., 2.1]), 2, .03)
    (2, 3)
    >>> best_depth(np.array([1., 2., 3.]), 3, .03, np.array([True, True, False]))
    2
    """
    depths = np.arange(len(speedups))
    if allowed is not None and allowed.any():
        depths = depths[allowed]
    best = int(depths[::-1][np.argmax(speedups[depths[::-1]])])
    if current - 1 in depths and speedups[best] <= speedups[current - 1] * (1 + margin):
        return current
    return best + 1
