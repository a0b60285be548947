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


def finishing_time(depth: int, table_step: float, draft_step: float) -> float:
    """T of prepared speculations of ``depth`` tokens, where what is not ready in time is drafted just in time.

    A table takes ``depth`` + 1 steps: the first computes the last token sent.  A late one costs what is left of the
    running step, half of one on average, and a just-in-time step for each missing token.

    Args:
        depth: D.
        table_step, draft_step: time of a step of all branches, and of one just in time; a verification takes 1.

    >>> finishing_time(4, .15, .05), round(finishing_time(4, .25, .05), 6), finishing_time(4, .25, .25)
    (0.75, 1.175, 1.25)
    """
    took = (depth + 1) * table_step
    if took <= 1:
        return took
    return min(took, 1 + table_step / 2 + (depth + 1 - 1 / table_step) * draft_step)


def best_depth(speedups: NDArray[np.floating], current: int, margin: float) -> int:
    """The depth of the highest speedup, the largest of equal ones; ``current`` unless that gains more than ``margin``.

    Args:
        speedups: [K] for depths 1..K.
        current: 1..K.
        margin: a share of the speedup, >= 0.

    >>> best_depth(np.array([1., 2., 2.05]), 2, .03), best_depth(np.array([1., 2., 2.1]), 2, .03)
    (2, 3)
    """
    best = len(speedups) - 1 - int(np.argmax(speedups[::-1]))
    return best + 1 if speedups[best] > speedups[current - 1] * (1 + margin) else current
