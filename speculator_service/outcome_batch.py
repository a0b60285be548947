"""A verifier's batch of outcomes, as arrays for the speculator, and which of them can be used.

Anything else that a verifier may send must neither disturb other sequences nor reach the draft model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculator_service.compiled import compiled

_TOKENS: int = 7
"""Number of the first token among the words of an `outcome_dtype` record."""


class OutcomeBatch(NamedTuple):
    """Outcomes [n]; see `ssd_proto.records.outcome_dtype`. All arrays are C-contiguous."""

    records: NDArray[np.void]
    """As they came."""
    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    rounds: NDArray[np.int64]
    accepted: NDArray[np.int64]
    bonus: NDArray[np.int64]
    num_sent: NDArray[np.int64]
    tokens: NDArray[np.int64]
    """[n, K]"""

    @classmethod
    def of(cls, records: NDArray[np.void]) -> OutcomeBatch:
        """``records`` [n] of `outcome_dtype`."""
        words = records.view("<i4").reshape(len(records), records.dtype.itemsize // 4)
        slots, generations, rounds, accepted, bonus, _, num_sent = words[:, :_TOKENS].T.astype(np.int64, order="C")
        return cls(records, slots, generations, rounds, accepted, bonus, num_sent, words[:, _TOKENS:].astype(np.int64))

    def pick(self, index: NDArray[np.integer] | NDArray[np.bool_]) -> OutcomeBatch:
        """Those at ``index``, or where it is true."""
        records, *fields = self
        return OutcomeBatch(records[index], *(array[index] for array in fields))


class Judged(NamedTuple):
    """What outcomes [n] are worth."""

    turn: NDArray[np.int64]
    """How many outcomes of the same sequence precede it in the batch; -1: its sequence is not open."""
    is_valid: NDArray[np.bool_]
    """Whether its own fields make sense; tokens that were not accepted do not matter."""


def judge(batch: OutcomeBatch, generation: NDArray[np.int64], vocab_size: int) -> Judged:
    """``generation`` [slots]: of the sequences that are open, -1 where none is."""
    turn, is_valid = np.empty(len(batch.slots), np.int64), np.empty(len(batch.slots), np.bool_)
    slots, generations, accepted, bonus = batch.slots, batch.generations, batch.accepted, batch.bonus
    _judge(slots, generations, accepted, bonus, batch.tokens, generation, vocab_size, turn, is_valid)
    return Judged(turn, is_valid)


def prepare() -> None:
    """Have everything here compiled."""
    none, tokens = np.empty(0, np.int64), np.empty((0, 1), np.int64)
    judge(OutcomeBatch(np.empty(0, np.void), none, none, none, none, none, none, tokens), none, 1)


@compiled
def _judge(
    slots: NDArray[np.int64],
    generations: NDArray[np.int64],
    accepted: NDArray[np.int64],
    bonus: NDArray[np.int64],
    tokens: NDArray[np.int64],
    generation: NDArray[np.int64],
    vocab_size: int,
    turn: NDArray[np.int64],
    is_valid: NDArray[np.bool_],
) -> None:
    seen = np.zeros(len(generation), np.int64)
    for i, slot in enumerate(slots):
        if not 0 <= slot < len(generation) or generations[i] < 0 or generation[slot] != generations[i]:
            turn[i], is_valid[i] = -1, False
            continue
        turn[i] = seen[slot]
        seen[slot] += 1
        is_valid[i] = 0 <= accepted[i] <= tokens.shape[1] and 0 <= bonus[i] < vocab_size
        if is_valid[i]:
            for token in tokens[i, : accepted[i]]:
                is_valid[i] &= 0 <= token < vocab_size
