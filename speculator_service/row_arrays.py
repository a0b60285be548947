"""Arrays with the state of rows, for `speculator_service.rows` and the compiled loops over it."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculator_service.compiled import compiled
from speculator_service.phase import Phase
from speculator_service.saguaro.sources import Source
from ssd_proto.records import MAX_STOP_TOKENS, NO_KEY

NO_TOKEN = -1


class RowShape(NamedTuple):
    """Sizes of the state."""

    max_rows: int
    context_length: int
    """Bounds committed text and chain."""
    lookahead: int
    """K."""
    num_outcomes: int
    """B: columns of a table."""
    max_candidates: int
    """M: most candidates that are kept of a position."""
    num_kept: int
    """m: probabilities kept of a sampled token; 0: nothing is sampled."""


class RowArrays(NamedTuple):
    """The state of R rows; all arrays are int64. Few arrays, since each one is passed to every compiled function."""

    context_length: int
    marks: NDArray[np.int64]
    """[marks, R] single numbers of a row: `PHASE` and so on, below."""
    columns: NDArray[np.int64]
    """[numbers, R, B] numbers of a column of the row's table: `KEY` and so on, below."""
    stop_tokens: NDArray[np.int64]
    """[R, MAX_STOP_TOKENS], the first `NUM_STOPS` of them."""
    text: NDArray[np.int64]
    """[R, context and more]"""
    candidates: NDArray[np.int64]
    """[R, K + 1, M] by place of the chain, best first, `NO_TOKEN` where there are fewer."""
    q: NDArray[np.int64]
    """[R, K, m] of the chain; meaningless where nothing is sampled."""
    branch_text: NDArray[np.int64]
    """[R, B, K]"""
    branch_candidates: NDArray[np.int64]
    """[R, B, K, M]"""
    branch_q: NDArray[np.int64]
    """[R, B, K, m]; meaningless where nothing is sampled."""


PHASE: Final = 0
"""`Phase`"""
ROUND: Final = 1
"""Outcomes that the sequence has had."""
AWAITED: Final = 2
"""Key of the outcome that a reply is owed for, or `NO_KEY`."""
IS_SAMPLED: Final = 3
"""1 if drafts are sampled and their q is sent, else 0."""
NUM_STOPS: Final = 4
COMMITTED: Final = 5
COMPUTED: Final = 6
SOURCE: Final = 7
"""`Source` of the chain."""
DEPTH: Final = 8
"""Tokens that the chain has."""
GOAL: Final = 9
"""Tokens that it shall have."""
STEPS: Final = 10
"""Steps that the table has made."""
STEPS_NEEDED: Final = 11
NUM_MARKS: Final = 12

KEY: Final = 0
"""The outcome that the column is for; `NO_KEY`: unknown yet, or none."""
ACCEPTED: Final = 1
"""k of the outcome; -1: the column is unused."""
RANK: Final = 2
"""Place of its bonus token among the candidates."""
PREFIX: Final = 3
"""Trunk positions before the branch."""
START: Final = 4
"""Step of the table in which the branch begins."""
END: Final = 5
"""Tokens that the branch shall have; 0: it is not drafted."""
NUM_NUMBERS: Final = 6


def make_arrays(shape: RowShape) -> RowArrays:
    """The state of free rows."""
    rows, context, lookahead, columns, candidates, kept = shape
    state = RowArrays(
        context,
        marks=np.zeros((NUM_MARKS, rows), np.int64),
        columns=np.zeros((NUM_NUMBERS, rows, columns), np.int64),
        stop_tokens=np.full((rows, MAX_STOP_TOKENS), NO_TOKEN, np.int64),
        text=np.zeros((rows, context + 2 * lookahead + 2), np.int64),
        candidates=np.full((rows, lookahead + 1, candidates), NO_TOKEN, np.int64),
        q=np.zeros((rows, lookahead, kept), np.int64),
        branch_text=np.zeros((rows, columns, lookahead), np.int64),
        branch_candidates=np.full((rows, columns, lookahead, candidates), NO_TOKEN, np.int64),
        branch_q=np.zeros((rows, columns, lookahead, kept), np.int64),
    )
    state.marks[[PHASE, ROUND, AWAITED, SOURCE]] = np.array([[Phase.FREE], [-1], [NO_KEY], [Source.EMPTY]])
    state.columns[KEY] = NO_KEY
    return state


@compiled
def stop_tokens_of(state: RowArrays, row: int) -> NDArray[np.int64]:
    """[n] tokens that end the sequence."""
    return state.stop_tokens[row, : state.marks[NUM_STOPS, row]]


@compiled
def copy_to(target: NDArray[np.int64], source: NDArray[np.int64]) -> None:
    """``target`` [n] begins with ``source``. As a loop: Numba takes seconds to compile an assignment of slices."""
    for place in range(len(source)):
        target[place] = source[place]
