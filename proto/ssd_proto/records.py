"""Records of the data plane: what the verifier posts, and what it is answered with.

All of them are batches: numpy structured arrays with one row per sequence, so that a round costs a
constant number of Python calls whatever the batch size.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class ProposalKind(IntEnum):
    """Where the tokens that were verified came from."""

    EMPTY = 0
    """Nothing was there in time: the row did a plain decode step in the verify shape."""
    HIT = 1
    """The outcome was in the published table, complete; nobody waited."""
    SHORT_HIT = 2
    """The outcome was in the table, but cut short; the speculator finished it."""
    BACKUP = 3
    """The outcome was not in the table; the backup speculator answered (a miss)."""


@lru_cache
def outcome_dtype(lookahead: int) -> np.dtype[np.void]:
    """Row of a batch of verification outcomes (design: "outcome record").

    ``slot``           the verifier's request-pool index
    ``generation``     changes whenever a slot is given to another sequence
    ``round``          counts from 0 (the round that verified nothing: the prompt's own first token)
    ``num_accepted``   k, 0..lookahead
    ``bonus``          t*
    ``proposal``       `ProposalKind` of the speculation that this round verified
    ``num_sent``       tokens of that speculation which came from the speculator, 0..lookahead
    ``tokens``         all ``lookahead`` tokens that were verified; those past ``num_sent`` are the
                       verifier's own padding, which may be accepted like any other token
    """
    return np.dtype(
        [
            ("slot", "<i4"),
            ("generation", "<i4"),
            ("round", "<i4"),
            ("num_accepted", "<i4"),
            ("bonus", "<i4"),
            ("proposal", "<i4"),
            ("num_sent", "<i4"),
            ("tokens", "<i4", (lookahead,)),
        ]
    )


def outcome_keys(num_accepted: NDArray[np.integer], bonus: NDArray[np.integer]) -> NDArray[np.int64]:
    """Key of outcome (k, t*) in the table: ``k << 32 | t*``.  Shapes are those of the arguments."""
    return (np.asarray(num_accepted, np.int64) << 32) | np.asarray(bonus, np.int64)


NO_KEY = -1
"""A table column without outcome."""


class Sampling(NamedTuple):
    """How the verifier draws the tokens of a sequence, as far as drafts can follow it. Never decides about the text."""

    temperature: float = 0.0
    """0: greedy. Above, and without ``shared_noise``, drafts are sampled and their q is sent."""
    top_k: int = 0
    """0: no limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Of the sequence's draws, 0..2**63 - 1."""
    shared_noise: bool = False
    """The verifier takes argmax(log p + noise of ``seed``), drafts argmax(log q + the same noise); no q is sent."""
    stop_tokens: tuple[int, ...] = ()
    """At most `MAX_STOP_TOKENS` that end the sequence where they are drawn: no speculation follows them."""


GREEDY = Sampling()
MAX_STOP_TOKENS = 16


class OpenSequence(NamedTuple):
    """Verifier -> speculator: speculate for this sequence from now on (replaces an older generation)."""

    slot: int
    generation: int
    tokens: NDArray[np.int32]
    """[L] prompt, and after a retraction the output so far; the next outcome is round 0."""
    sampling: Sampling = GREEDY


class CloseSequence(NamedTuple):
    """Verifier -> speculator: forget this sequence. Ignored if the generation is not the open one."""

    slot: int
    generation: int


Event = OpenSequence | CloseSequence | NDArray[np.void]
"""What `SpeculatorChannel.poll` yields, in the order of posting; arrays are `outcome_dtype` batches."""


class DraftProbs(NamedTuple):
    """Distributions that drafts were sampled from, of n entries of a table. See `pack_probs` for the words."""

    rows: NDArray[np.integer]
    """[n] place in the table's memory for them: the speculator's row, 0..num_rows-1."""
    words: NDArray[np.int64]
    """[n, K, m] token and probability; meaningless past the depth."""


def pack_probs(ids: NDArray[np.integer], probs: NDArray[np.floating]) -> NDArray[np.int64]:
    """Words ``float32 bits of q << 32 | token`` of sparse distributions; shapes are those of the arguments."""
    bits = np.asarray(probs, np.float32).view(np.int32).astype(np.int64)
    return (bits << 32) | np.asarray(ids, np.int64)


def unpack_probs(words: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Inverse of `pack_probs`. A word that is 0 has no probability: nothing was sampled there."""
    return (words & 0xFFFF_FFFF).astype(np.int32), (words >> 32).astype(np.int32).view(np.float32)


class Entries(NamedTuple):
    """Entries of speculation tables, n of them: what the speculator has drafted for outcomes so far."""

    slots: NDArray[np.integer]
    """[n]"""
    generations: NDArray[np.integer]
    """[n]"""
    rounds: NDArray[np.integer]
    """[n]"""
    columns: NDArray[np.integer]
    """[n] place in the table; ``num_outcomes`` is that of the reply."""
    keys: NDArray[np.int64]
    """[n] `outcome_keys`"""
    depths: NDArray[np.integer]
    """[n] tokens drafted, 0..K; 0 in a reply says that there is no speculation."""
    is_final: NDArray[np.bool_]
    """[n] whether the entry will not be continued, so that nobody need wait for more; a reply ends the wait anyway."""
    tokens: NDArray[np.integer]
    """[n, K] meaningless past the depth."""
    q: DraftProbs | None = None
    """What the tokens of all these entries were sampled from; None if they were not."""

    def pick(self, mask: NDArray[np.bool_]) -> Entries:
        """Those where ``mask`` [n] is true, without q."""
        slots, generations, rounds, columns, keys, depths, is_final, tokens, _ = self
        return Entries(
            slots[mask],
            generations[mask],
            rounds[mask],
            columns[mask],
            keys[mask],
            depths[mask],
            is_final[mask],
            tokens[mask],
        )


class Proposals(NamedTuple):
    """Answer to a batch of outcomes, row by row."""

    depth: NDArray[np.int32]
    """[b] number of tokens, 0..lookahead; -1 where there is no answer yet."""
    tokens: NDArray[np.int32]
    """[b, lookahead] valid up to ``depth``."""
    kind: NDArray[np.int32]
    """[b] `ProposalKind`."""
    q: NDArray[np.int64] | None
    """[b, lookahead, m] what ``tokens`` were sampled from (`pack_probs`); 0 where they were not, and past ``depth``.

    None: all is 0.
    """
