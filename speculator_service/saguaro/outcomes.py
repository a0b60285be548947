"""Prediction of verification outcomes (k, t*) from the draft's own logits (the paper, section 4.1)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from speculator_service.compiled import compiled

_SCAN_AT_MOST = 32
"""Candidates up to which the scan below is faster on a CPU than a partial sort (7 times for F = 3)."""
_LANES = 64
_BLOCK = 64


def top_candidates(logits: torch.Tensor, count: int, rows: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Most likely tokens, best first; copies to the host and hence synchronises with the device.

    Args:
        logits: [n, V].
        count: at most this many; V if that is less.
        rows: [m] of the logits, those that are wanted; None: all.

    Returns:
        [m, count] token ids; of equal ones the lower is better (on a CPU).
    """
    count = min(count, logits.shape[-1])
    if logits.device.type == "cpu" and count <= _SCAN_AT_MOST:
        values = logits.float().contiguous().numpy()
        rows = np.arange(len(values)) if rows is None else rows
        found = np.zeros((len(rows), count), np.int64)
        _scan(values, rows, found)
        return found
    if rows is not None and 2 * len(rows) < len(logits):  # otherwise the copy costs more than it saves
        logits, rows = logits.index_select(0, torch.from_numpy(rows).to(logits.device)), None
    result: NDArray[np.int64] = logits.topk(count, dim=-1).indices.to("cpu", torch.int64).numpy()
    return result if rows is None else result[rows]


@compiled
def _scan(values: NDArray[np.float32], rows: NDArray[np.int64], result: NDArray[np.int64]) -> None:
    """`top_candidates` of the rows of ``values`` [n, V]. Most values are only compared with a floor, many at once."""
    count, size = result.shape[1], values.shape[1]
    best, unused = np.empty(count, np.float32), np.empty(count, np.int64)
    lanes = np.empty(_LANES, np.float32)
    for i, row in enumerate(rows):
        line = values[row]
        floor = np.float32(-np.inf)
        if size >= 4 * _LANES:  # the best maxima of parts: as many values are not below the last of them
            num_lanes = _find_maxima(line, lanes, 2 * count)
            filled = 0
            for lane in range(num_lanes):
                filled = _insert(best, unused, filled, lanes[lane], lane)
            floor = best[count - 1]
        filled = 0
        for start in range(0, size, _BLOCK):
            block = line[start : start + _BLOCK]
            if _num_from(block, floor) > 0:
                for j in range(len(block)):
                    if block[j] >= floor:
                        filled = _insert(best, result[i], filled, block[j], start + j)


@compiled
def _find_maxima(line: NDArray[np.float32], lanes: NDArray[np.float32], least: int) -> int:
    """``lanes`` begin with the maxima of parts of ``line``, ``least`` or more of them; returns how many."""
    lanes[:] = line[:_LANES]
    for start in range(_LANES, len(line) - _LANES + 1, _LANES):
        _raise(lanes, line[start : start + _LANES])
    number = _LANES
    while number // 2 >= least:
        number //= 2
        _raise(lanes[:number], lanes[number : 2 * number])
    return number


@compiled
def _raise(lanes: NDArray[np.float32], block: NDArray[np.float32]) -> None:
    """The larger of both, in ``lanes``."""
    for lane in range(len(lanes)):
        lanes[lane] = block[lane] if block[lane] > lanes[lane] else lanes[lane]


@compiled
def _num_from(block: NDArray[np.float32], floor: np.float32) -> int:
    number = 0
    for j in range(len(block)):
        number += block[j] >= floor
    return number


@compiled
def _insert(best: NDArray[np.float32], ids: NDArray[np.int64], filled: int, value: np.float32, token: int) -> int:
    """Put a value among the ``filled`` first of ``best``, which fall, after equal ones; returns how many are filled."""
    place = min(filled, len(best) - 1)
    if filled == len(best) and value <= best[place]:
        return filled
    while place > 0 and best[place - 1] < value:
        best[place], ids[place] = best[place - 1], ids[place - 1]
        place -= 1
    best[place], ids[place] = value, token
    return min(filled + 1, len(best))


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


def bonus_rank(ranked: NDArray[np.int64], bonus: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the bonus tokens [b] stand among ``ranked`` [b, M]: rank [b] (-1: absent) and how many there were [b]."""
    found = ranked == bonus[:, None]
    return np.where(found.any(1), found.argmax(1), -1), (ranked >= 0).sum(1)


@compiled
def nth_candidate(candidates: NDArray[np.int64], sent: int, stop_tokens: NDArray[np.int64], rank: int) -> int:
    """The candidate of a position [M] that `rank_candidates` puts at place ``rank``; -1: there are not so many.

    >>> nth_candidate(np.array([4, 7, 2, 9]), 7, np.array([2]), 1)
    9
    """
    for token in candidates:
        if _can_be_bonus(token, sent, stop_tokens):
            if rank == 0:
                return int(token)
            rank -= 1
    return -1


@compiled
def candidate_rank(
    candidates: NDArray[np.int64], sent: int, stop_tokens: NDArray[np.int64], bonus: int
) -> tuple[int, int]:
    """`bonus_rank` among the candidates of a position [M].

    >>> candidate_rank(np.array([4, 7, 2, 9]), 7, np.array([2]), 9)
    (1, 2)
    """
    rank, count = -1, 0
    for token in candidates:
        if _can_be_bonus(token, sent, stop_tokens):
            if token == bonus:
                rank = count
            count += 1
    return rank, count


@compiled
def _can_be_bonus(token: int, sent: int, stop_tokens: NDArray[np.int64]) -> bool:
    return token >= 0 and token != sent and token not in stop_tokens
