"""What an outcome does to its row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculator_service.compiled import compiled
from speculator_service.phase import Phase
from speculator_service.row_arrays import (
    AWAITED,
    COMMITTED,
    COMPUTED,
    DEPTH,
    END,
    GOAL,
    IS_SAMPLED,
    KEY,
    NO_TOKEN,
    PHASE,
    ROUND,
    SOURCE,
    START,
    STEPS,
    RowArrays,
    copy_to,
    stop_tokens_of,
)
from speculator_service.saguaro.outcomes import candidate_rank
from speculator_service.saguaro.sources import Source
from ssd_proto.records import NO_KEY

_DRAFT, _FORK, _DONE = Phase.DRAFT, Phase.FORK, Phase.DONE
_HIT, _PRIMARY = Source.HIT, Source.PRIMARY


class Settled(NamedTuple):
    """What outcomes [b] did to their rows, and what they say about the speculation that was verified."""

    adopted: NDArray[np.bool_]
    """The outcome was prepared: the branch becomes the trunk."""
    diverged: NDArray[np.bool_]
    """The verifier accepted tokens that are not the chain's (it had no speculation in time)."""
    kept: NDArray[np.bool_]
    """The chain was not used but its tokens were right: the rest of it is the new chain."""
    predicted: NDArray[np.bool_]
    """The outcome was in the table (perhaps with no cell finished)."""
    stopped: NDArray[np.bool_]
    """A stop token was committed: nothing follows."""
    verified: NDArray[np.bool_]
    """The speculation that was verified is the row's chain, whole."""
    branch: NDArray[np.int64]
    """Branch 1..B to adopt (meaningless where not adopted)."""
    prefix: NDArray[np.int64]
    """Trunk positions before the branch."""
    finished: NDArray[np.int64]
    """Finished cells of the branch."""
    source: NDArray[np.int64]
    """`Source` of the chain that was verified."""
    num_sent: NDArray[np.int64]
    """Its length."""
    rank: NDArray[np.int64]
    """Place of the bonus token among the candidates at position k; -1: not among them."""
    num_known: NDArray[np.int64]
    """How many candidates there were."""


_NUM_FLAGS = 6


def settle(
    state: RowArrays,
    rows: NDArray[np.int64],
    accepted: NDArray[np.int64],
    bonus: NDArray[np.int64],
    tokens: NDArray[np.int64],
    num_sent: NDArray[np.int64],
    jit_depth: int,
) -> Settled:
    """Apply outcomes [b] (``tokens`` [b, K] are those that were verified) to rows whose prompt is computed.

    Prepared outcomes take over their branch, others cut the trunk back to what is valid.  The caller makes the draft
    model adopt the branches.  The rows go to `Phase.FORK`, to `Phase.DRAFT` if tokens are missing (``jit_depth`` are
    wanted), or to `Phase.DONE` after a stop token.
    """
    flags = np.empty((_NUM_FLAGS, len(rows)), np.bool_)
    numbers = np.empty((len(Settled._fields) - _NUM_FLAGS, len(rows)), np.int64)
    _settle_all(state, rows, accepted, bonus, tokens, num_sent, jit_depth, flags, numbers)
    return Settled(*flags, *numbers)


def commit(
    state: RowArrays,
    rows: NDArray[np.int64],
    accepted: NDArray[np.int64],
    bonus: NDArray[np.int64],
    tokens: NDArray[np.int64],
) -> None:
    """Append ``tokens[:, :accepted]`` and ``bonus`` to the texts and advance to the next round; a reply is owed."""
    _commit_all(state, rows, accepted, bonus, tokens)


def prepare(state: RowArrays) -> None:
    """Have everything here compiled."""
    none = np.empty(0, np.int64)
    tokens = np.empty((0, state.branch_text.shape[2]), np.int64)
    settle(state, none, none, none, tokens, none, 1)
    commit(state, none, none, none, tokens)


@compiled
def _settle_all(
    state: RowArrays,
    rows: NDArray[np.int64],
    accepted: NDArray[np.int64],
    bonus: NDArray[np.int64],
    tokens: NDArray[np.int64],
    num_sent: NDArray[np.int64],
    jit_depth: int,
    flags: NDArray[np.bool_],
    numbers: NDArray[np.int64],
) -> None:
    """`settle`; ``flags`` and ``numbers`` become the fields of `Settled`."""
    for i, row in enumerate(rows):
        k, committed = accepted[i], state.marks[COMMITTED, row]
        depth, source = state.marks[DEPTH, row], state.marks[SOURCE, row]
        common = _num_common(state, row, tokens[i], k, bonus[i])
        rank, num_known = _rank_of(state, row, k, bonus[i])
        column = _column_of(state, row, k, bonus[i])
        is_predicted = column >= 0 and common >= k
        end = state.columns[END, row, column] if is_predicted else 0
        done = min(max(state.marks[STEPS, row] - state.columns[START, row, column], 0), end) if is_predicted else 0
        is_stopped = _contains_stop(state, row, tokens[i], k, bonus[i])
        is_adopted = done > 0 and not is_stopped
        is_kept = not is_adopted and common > k and not is_stopped
        flags[0, i], flags[1, i], flags[2, i] = is_adopted, common < k, is_kept
        flags[3, i], flags[4, i], flags[5, i] = is_predicted, is_stopped, num_sent[i] == depth and common >= k
        numbers[0, i], numbers[1, i], numbers[2, i] = max(column, 0) + 1, committed + k, done
        numbers[3, i], numbers[4, i], numbers[5, i], numbers[6, i] = source, depth, rank, num_known

        commit_one(state, row, tokens[i], k, bonus[i])
        if is_adopted:
            _take_branch(state, row, column, done)
        elif is_kept:
            _shift_chain(state, row, common)
        else:
            _drop_chain(state, row, committed + common)
        state.columns[KEY, row], state.marks[STEPS, row] = NO_KEY, 0
        _set_goal(state, row, jit_depth, is_adopted and done >= end)
        if is_stopped:
            state.marks[PHASE, row] = _DONE


@compiled
def _num_common(state: RowArrays, row: int, tokens: NDArray[np.int64], k: int, bonus: int) -> int:
    """First tokens of the outcome, bonus token included, that are also those of the chain."""
    common, committed = 0, state.marks[COMMITTED, row]
    while common <= min(k, state.marks[DEPTH, row] - 1):
        if state.text[row, committed + common] != (tokens[common] if common < k else bonus):
            break
        common += 1
    return common


@compiled
def _rank_of(state: RowArrays, row: int, k: int, bonus: int) -> tuple[int, int]:
    """`Settled.rank` and `Settled.num_known`."""
    place = state.marks[COMMITTED, row] + k
    if place > state.marks[COMPUTED, row]:
        return -1, 0
    sent = state.text[row, place] if k < state.marks[DEPTH, row] else NO_TOKEN
    return candidate_rank(state.candidates[row, k], sent, stop_tokens_of(state, row), bonus)


@compiled
def _contains_stop(state: RowArrays, row: int, tokens: NDArray[np.int64], k: int, bonus: int) -> bool:
    stop_tokens = stop_tokens_of(state, row)
    for j in range(k):
        if tokens[j] in stop_tokens:
            return True
    return bonus in stop_tokens


@compiled
def _column_of(state: RowArrays, row: int, k: int, bonus: int) -> int:
    """Column of the table that was prepared for the outcome, or -1."""
    key = (k << 32) | bonus
    for column in range(state.columns.shape[2]):
        if state.columns[KEY, row, column] == key:
            return column
    return -1


@compiled
def commit_one(state: RowArrays, row: int, tokens: NDArray[np.int64], k: int, bonus: int) -> None:
    """`commit` of one outcome."""
    committed = state.marks[COMMITTED, row]
    copy_to(state.text[row, committed:], tokens[:k])
    state.text[row, committed + k] = bonus
    state.marks[COMMITTED, row] += k + 1
    state.marks[ROUND, row] += 1
    state.marks[AWAITED, row] = (k << 32) | bonus


@compiled
def _commit_all(
    state: RowArrays,
    rows: NDArray[np.int64],
    accepted: NDArray[np.int64],
    bonus: NDArray[np.int64],
    tokens: NDArray[np.int64],
) -> None:
    for i, row in enumerate(rows):
        commit_one(state, row, tokens[i], accepted[i], bonus[i])


@compiled
def _take_branch(state: RowArrays, row: int, column: int, done: int) -> None:
    """The branch, with ``done`` tokens, becomes the chain after the committed text; its KV begins with the bonus."""
    committed, lookahead = state.marks[COMMITTED, row], state.branch_text.shape[2]
    copy_to(state.text[row, committed:], state.branch_text[row, column])
    for place in range(lookahead):
        copy_to(state.candidates[row, place], state.branch_candidates[row, column, place])
        if state.marks[IS_SAMPLED, row]:
            copy_to(state.q[row, place], state.branch_q[row, column, place])
    state.marks[SOURCE, row] = _HIT
    state.marks[DEPTH, row] = done
    state.marks[COMPUTED, row] = committed - 1 + done


@compiled
def _shift_chain(state: RowArrays, row: int, count: int) -> None:
    """The first ``count`` tokens of the chain are committed: what is known of the others moves up."""
    lookahead = state.branch_text.shape[2]
    for place in range(lookahead + 1):
        copy_to(state.candidates[row, place], state.candidates[row, min(place + count, lookahead)])
    for place in range(lookahead):
        copy_to(state.q[row, place], state.q[row, min(place + count, lookahead - 1)])
    state.marks[DEPTH, row] -= count
    # The last token is computed once more, which brings the candidates that follow it.
    last = state.marks[COMMITTED, row] + state.marks[DEPTH, row] - 1
    state.marks[COMPUTED, row] = min(state.marks[COMPUTED, row], last)


@compiled
def _drop_chain(state: RowArrays, row: int, num_valid: int) -> None:
    """Nothing of the chain follows the committed text, of which the trunk has at most ``num_valid`` positions."""
    state.marks[SOURCE, row], state.marks[DEPTH, row] = _PRIMARY, 0
    state.marks[COMPUTED, row] = min(state.marks[COMPUTED, row], num_valid)


@compiled
def _set_goal(state: RowArrays, row: int, jit_depth: int, is_final: bool) -> None:
    """How many tokens the chain shall have, and what the row needs for that.

    A branch that was complete may be in use already; otherwise somebody waits, and for no more than pays.
    """
    room = max(min(state.context_length - state.marks[COMMITTED, row], state.branch_text.shape[2]), 0)
    depth = state.marks[DEPTH, row]
    state.marks[GOAL, row] = depth if is_final else max(depth, min(room, jit_depth))
    state.marks[PHASE, row] = _FORK if depth >= state.marks[GOAL, row] else _DRAFT
