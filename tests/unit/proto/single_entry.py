"""One entry at a time, for tests that speak of single entries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ssd_proto.records import DraftProbs, Entries


def one(*values: int) -> tuple[NDArray[np.int64], ...]:
    return tuple(np.array([value]) for value in values)


def entry(
    address: tuple[int, int, int, int],
    key: int,
    depth: int,
    tokens: Sequence[int],
    is_final: bool = False,
    q: tuple[int, NDArray[np.int64]] | None = None,
) -> Entries:
    """``address``: slot, generation, round and column; ``q``: row and words [K, m]."""
    probs = None if q is None else DraftProbs(np.array([q[0]]), q[1][None])
    return Entries(*one(*address), *one(key, depth), np.array([is_final]), np.array([tokens]), probs)
