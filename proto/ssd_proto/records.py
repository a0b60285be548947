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
    """The outcome was in the published table at full depth; nobody waited."""
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


class OpenSequence(NamedTuple):
    """Verifier -> speculator: speculate for this sequence from now on (replaces an older generation)."""

    slot: int
    generation: int
    tokens: NDArray[np.int32]
    """[L] prompt, and after a retraction the output so far; the next outcome is round 0."""


class CloseSequence(NamedTuple):
    """Verifier -> speculator: forget this sequence. Ignored if the generation is not the open one."""

    slot: int
    generation: int


Event = OpenSequence | CloseSequence | NDArray[np.void]
"""What `SpeculatorChannel.poll` yields, in the order of posting; arrays are `outcome_dtype` batches."""


class Proposals(NamedTuple):
    """Answer to a batch of outcomes, row by row."""

    depth: NDArray[np.int32]
    """[b] number of tokens, 0..lookahead; -1 where there is no answer yet."""
    tokens: NDArray[np.int32]
    """[b, lookahead] valid up to ``depth``."""
    kind: NDArray[np.int32]
    """[b] `ProposalKind`."""
