"""Prediction of verification outcomes (k, t*) from the draft's own logits (the paper, section 4.1)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from speculator_service.saguaro.fan_out import FanOut
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


def predict_bonus_tokens(
    candidates: NDArray[np.int64], sent: NDArray[np.int64], columns_accepted: NDArray[np.int64], rank: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Bonus tokens at positions where a token was sent: the best candidates without that token.

    Where s_{k+1} was sent it cannot be the bonus token: it would have been accepted.

    Args:
        candidates: [b, K, M] tokens at positions 0..K-1, best first; M > every rank asked for, unless M = V.
        sent: [b, K] s_1..s_K; the token sent at position k is ``sent[:, k]``. -1: nothing was sent there.
        columns_accepted: [n] k < K of each column wanted.
        rank: [n] place among the remaining candidates, from 0.

    Returns:
        [b, n] tokens; -1 where there are not that many candidates.
    """
    num_candidates = candidates.shape[2]
    is_sent = candidates == sent[:, :, None]
    place = np.where(is_sent.any(2), is_sent.argmax(2), num_candidates)  # [b, K] of the sent token
    wanted = rank + (rank >= place[:, columns_accepted])  # [b, n]
    rows = np.arange(len(candidates))[:, None]
    tokens = candidates[rows, columns_accepted, np.minimum(wanted, num_candidates - 1)]
    return np.where(wanted < num_candidates, tokens, -1)


def predict_outcomes(candidates: NDArray[np.int64], sent: NDArray[np.int64], fan_out: FanOut) -> NDArray[np.int64]:
    """Keys of all outcomes with k < K, in column order.

    Args:
        candidates: [b, K, M], see `predict_bonus_tokens`.
        sent: [b, K].

    Returns:
        [b, first_late] keys (`ssd_proto.records.outcome_keys`), `NO_KEY` where there is no candidate.

    >>> logits = torch.tensor([[[5., 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]]])
    >>> keys = predict_outcomes(top_candidates(logits, 4), np.array([[0, 5]]), FanOut((2, 1, 3)))
    >>> (keys & 0xFFFFFFFF).tolist()
    [[1, 2, 4]]
    """
    early = slice(0, fan_out.first_late)
    accepted = fan_out.accepted[early]
    return _keys(accepted, predict_bonus_tokens(candidates, sent, accepted, fan_out.rank[early]))


def predict_all_accepted(candidates: NDArray[np.int64], fan_out: FanOut) -> NDArray[np.int64]:
    """Keys of the outcomes with k = K: nothing was sent at position K, so nothing is left out.

    Args:
        candidates: [b, M] tokens at position K, best first.

    Returns:
        [b, F_K] keys, `NO_KEY` where there is no candidate.
    """
    return _keys(np.array(fan_out.lookahead), _padded(candidates, fan_out.counts[-1]))


def predict_first_outcomes(candidates: NDArray[np.int64], fan_out: FanOut) -> NDArray[np.int64]:
    """Keys of the outcomes when nothing was sent (the first round): k is 0, so all columns go there.

    Args:
        candidates: [b, M] tokens after the committed ones, best first.

    Returns:
        [b, num_outcomes] keys, `NO_KEY` where there is no candidate.
    """
    return _keys(np.array(0), _padded(candidates, fan_out.num_outcomes))


def _padded(candidates: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    tokens = np.full((len(candidates), count), -1, np.int64)
    available = min(count, candidates.shape[1])
    tokens[:, :available] = candidates[:, :available]
    return tokens


def _keys(accepted: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(tokens >= 0, outcome_keys(accepted, tokens), NO_KEY)
