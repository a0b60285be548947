"""Prediction of verification outcomes (k, t*) from the draft's own logits (the paper, section 4.1)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ssd_proto.records import NO_KEY, outcome_keys

_SCAN_AT_MOST = 8
"""Candidates up to which repeated argmax is faster on a CPU than a partial sort (2 to 4 times for F = 3)."""


def top_candidates(logits: torch.Tensor, count: int) -> NDArray[np.int64]:
    """Most likely tokens, best first; copies to the host and hence synchronises with the device.

    Args:
        logits: [..., V].
        count: at most this many; V if that is less.

    Returns:
        [..., count] token ids.
    """
    count = min(count, logits.shape[-1])
    if logits.device.type == "cpu" and count <= _SCAN_AT_MOST:
        return _scan(logits.float().numpy(), count)
    indices = logits.topk(count, dim=-1).indices
    result: NDArray[np.int64] = indices.to("cpu", torch.int64).numpy()
    return result


def _scan(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """`top_candidates` by repeated argmax over ``logits``, which are as before afterwards."""
    rows = logits.reshape(-1, logits.shape[-1])
    result = np.empty((len(rows), count), np.int64)
    taken = np.empty((len(rows), count), np.float32)
    every = np.arange(len(rows))
    for place in range(count):
        best = result[:, place] = rows.argmax(axis=1)
        taken[:, place] = rows[every, best]
        rows[every, best] = -np.inf
    rows[every[:, None], result] = taken
    return result.reshape(*logits.shape[:-1], count)


def rank_candidates(
    candidates: NDArray[np.int64], sent: NDArray[np.int64], stop_tokens: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Candidates for the bonus token, without those that are not worth a branch.

    Where s_{k+1} was sent it cannot be the bonus token: it would have been accepted.  Nothing follows a stop token.

    Args:
        candidates: [b, P, M] tokens at P positions, best first; -1: none.
        sent: [b, P] token sent at each position; -1: nothing was sent there.
        stop_tokens: [b, n] that end the sequence; -1: none.

    Returns:
        [b, P, M] those that are left, best first, then -1.

    >>> rank_candidates(np.array([[[4, 7, 2, 9]]]), np.array([[7]]), np.array([[2]])).tolist()
    [[[4, 9, -1, -1]]]
    """
    excluded = (candidates < 0) | (candidates == sent[:, :, None])
    excluded |= (candidates[..., None] == stop_tokens[:, None, None, :]).any(-1)
    order = np.argsort(excluded, axis=-1, kind="stable")
    ranked = np.take_along_axis(candidates, order, -1)
    return np.where(np.take_along_axis(excluded, order, -1), -1, ranked)


def outcome_columns(
    ranked: NDArray[np.int64], accepted: NDArray[np.int64], rank: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Keys of the outcomes of a table.

    Args:
        ranked: [b, P, M] from `rank_candidates`, position k in place k.
        accepted: [b, B] k of each column, 0..P-1; -1: the column is unused.
        rank: [b, B] place of the column's bonus token among the ranked candidates.

    Returns:
        [b, B] keys (`ssd_proto.records.outcome_keys`), `NO_KEY` where there is no candidate.

    >>> logits = torch.tensor([[[5., 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [1, 5, 2, 4, 3, 0]]])
    >>> ranked = rank_candidates(top_candidates(logits, 5), np.array([[0, 5, -1]]), np.empty((1, 0), np.int64))
    >>> keys = outcome_columns(ranked, np.array([[0, 0, 1, 2, 2, 2]]), np.array([[0, 1, 0, 0, 1, 2]]))
    >>> (keys & 0xFFFFFFFF).tolist()
    [[1, 2, 4, 1, 3, 4]]
    """
    rows = np.arange(len(ranked))[:, None]
    available = ranked.shape[2]
    tokens = ranked[rows, np.maximum(accepted, 0), np.minimum(rank, available - 1)]
    exists = (accepted >= 0) & (rank < available) & (tokens >= 0)
    return np.where(exists, outcome_keys(np.maximum(accepted, 0), np.maximum(tokens, 0)), NO_KEY)


def bonus_rank(ranked: NDArray[np.int64], bonus: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the bonus tokens [b] stand among ``ranked`` [b, M]: rank [b] (-1: absent) and how many there were [b]."""
    found = ranked == bonus[:, None]
    return np.where(found.any(1), found.argmax(1), -1), (ranked >= 0).sum(1)
