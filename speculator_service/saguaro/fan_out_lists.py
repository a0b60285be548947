"""Fan-out lists by the depth of the speculation that was verified, and the table columns that follow from them.

After d verified tokens only k = 0..d can happen, and k = d means "all accepted", whatever K is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from speculator_service.saguaro.allocation import clip_fan_out, concave_majorant, greedy_fan_out


def written_lists(fan_out: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    """Lists for all depths that follow from a hand-written one: what k > d cannot use goes to k = d.

    Args:
        fan_out: F_0..F_K.
        vocab_size: V; no list has more than V - 1 at k < d, or V at k = d.

    Returns:
        [K + 1, K + 1] F_k by depth and k.

    >>> written_lists((3, 2, 1), 100)
    array([[6, 0, 0],
           [3, 3, 0],
           [3, 2, 1]])
    """
    lists = np.zeros((len(fan_out), len(fan_out)), np.int64)
    for depth in range(len(fan_out)):
        lists[depth, : depth + 1] = clip_fan_out((*fan_out[:depth], sum(fan_out[depth:])), vocab_size)
    return lists


def measured_lists(
    budget: int, acceptance: NDArray[np.floating], hit_curves: NDArray[np.floating], vocab_size: int
) -> NDArray[np.int64]:
    """Best lists for all depths (Theorem 18).

    Args:
        budget: B.
        acceptance: [K] probability that token k + 1 is accepted, given that those before it are.
        hit_curves: [K + 1, F_max + 1] h_k(F) where a token was rejected at k; row K: where none was.
        vocab_size: V, see `written_lists`.

    Returns:
        [K + 1, K + 1] F_k by depth and k; sums are at most B.
    """
    size = len(acceptance) + 1
    curves = concave_majorant(hit_curves)
    lists = np.zeros((size, size), np.int64)
    for depth in range(size):
        weights, at_depth = conditioned(acceptance, curves, depth)
        lists[depth, : depth + 1] = clip_fan_out(greedy_fan_out(budget, weights, at_depth), vocab_size)
    return lists


def conditioned(
    acceptance: NDArray[np.floating], hit_curves: NDArray[np.floating], depth: int
) -> tuple[NDArray[np.float64], NDArray[np.floating]]:
    """Position weights [depth + 1] and hit curves [depth + 1, F_max + 1] after ``depth`` verified tokens."""
    reached = np.concatenate([[1.0], np.cumprod(acceptance[:depth])])
    weights = reached * np.concatenate([1 - acceptance[:depth], [1.0]])
    return weights, np.concatenate([hit_curves[:depth], hit_curves[-1:]])


def columns(counts: NDArray[np.integer], num_columns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Table columns of fan-out lists: ascending k, then ascending rank, unused ones last.

    Args:
        counts: [..., K + 1] F_k, sums at most ``num_columns``.
        num_columns: B.

    Returns:
        [..., B] k of each column, -1 where it is unused, and [..., B] rank, from 0.

    >>> columns(np.array([2, 0, 1]), 4)
    (array([ 0,  0,  2, -1]), array([0, 1, 0, 0]))
    """
    ends = counts.cumsum(-1)[..., None, :]  # [..., 1, K + 1]
    place = np.arange(num_columns)[:, None]
    accepted = (place >= ends).sum(-1)  # [..., B]
    used = accepted < counts.shape[-1]
    at = np.where(used, accepted, 0)
    first = np.take_along_axis(ends[..., 0, :] - counts, at, -1)
    return np.where(used, accepted, -1), np.where(used, place[:, 0] - first, 0)
