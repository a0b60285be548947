"""Compiled loops over the tables of rows; `speculator_service.branches` says what they are for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from speculator_service.compiled import compiled
from speculator_service.phase import Phase
from speculator_service.row_arrays import (
    ACCEPTED,
    COMMITTED,
    COMPUTED,
    DEPTH,
    END,
    GOAL,
    IS_SAMPLED,
    KEY,
    NO_TOKEN,
    PHASE,
    PREFIX,
    RANK,
    SOURCE,
    START,
    STEPS,
    STEPS_NEEDED,
    RowArrays,
    copy_to,
    stop_tokens_of,
)
from speculator_service.saguaro.outcomes import nth_candidate
from ssd_proto.records import NO_KEY

_TABLE, _DONE = Phase.TABLE, Phase.DONE
_TOKEN_MASK = 0xFFFF_FFFF
NUM_CELL_NUMBERS = 5
"""Of `take_step`'s ``cells``."""


@compiled
def fork(
    state: RowArrays,
    rows: NDArray[np.int64],
    plan_accepted: NDArray[np.int64],
    plan_rank: NDArray[np.int64],
    plan_depth: int,
) -> None:
    """Begin the tables of ``rows`` [b] with columns as planned [S, K + 1, B], branches of ``plan_depth`` tokens."""
    for row in rows:
        depth = state.marks[DEPTH, row]
        state.marks[GOAL, row], state.marks[STEPS, row] = depth, 0
        known = state.marks[COMPUTED, row] - state.marks[COMMITTED, row]
        last = _first_stop(state, row)
        for column in range(state.columns.shape[2]):
            k = plan_accepted[state.marks[SOURCE, row], depth, column]
            prefix = state.marks[COMMITTED, row] + k
            room = max(min(state.context_length - 1 - prefix, plan_depth), 0)
            state.columns[ACCEPTED, row, column] = k
            state.columns[RANK, row, column] = plan_rank[state.marks[SOURCE, row], depth, column]
            state.columns[PREFIX, row, column] = prefix
            state.columns[START, row, column] = max(k - known, 0)
            state.columns[END, row, column] = room if 0 <= k <= last else 0
            state.columns[KEY, row, column] = NO_KEY
            if k <= known:
                _name(state, row, column)
        _count_steps(state, row)


@compiled
def _first_stop(state: RowArrays, row: int) -> int:
    """k up to which an outcome is followed by another round: tokens of the chain before a stop token."""
    stop_tokens = stop_tokens_of(state, row)
    for place in range(state.marks[DEPTH, row]):
        if state.text[row, state.marks[COMMITTED, row] + place] in stop_tokens:
            return place
    return state.branch_text.shape[2]


@compiled
def _name(state: RowArrays, row: int, column: int) -> None:
    """Find the bonus token of a column; one without is not drafted for."""
    if state.columns[END, row, column] == 0:
        return
    k = state.columns[ACCEPTED, row, column]
    sent = state.text[row, state.marks[COMMITTED, row] + k] if k < state.marks[DEPTH, row] else NO_TOKEN
    token = nth_candidate(state.candidates[row, k], sent, stop_tokens_of(state, row), state.columns[RANK, row, column])
    if token >= 0:
        state.columns[KEY, row, column] = (k << 32) | token
    else:
        state.columns[END, row, column] = 0


@compiled
def _count_steps(state: RowArrays, row: int) -> None:
    """Steps that the table needs in all; one that has made them is done."""
    needed = state.marks[STEPS, row] + _lag(state, row)
    for column in range(state.columns.shape[2]):
        if state.columns[END, row, column] > 0:
            needed = max(needed, state.columns[START, row, column] + state.columns[END, row, column])
    state.marks[STEPS_NEEDED, row] = needed
    state.marks[PHASE, row] = _TABLE if state.marks[STEPS, row] < needed else _DONE


@compiled
def _lag(state: RowArrays, row: int) -> int:
    """Tokens of the chain, bonus token included, that the trunk does not have yet."""
    return state.marks[COMMITTED, row] + state.marks[DEPTH, row] - state.marks[COMPUTED, row]


@compiled
def next_step(
    state: RowArrays,
    rows: NDArray[np.int64],
    tokens: NDArray[np.int64],
    prefix: NDArray[np.int64],
    depth: NDArray[np.int64],
    live: NDArray[np.bool_],
    places: NDArray[np.int64],
) -> int:
    """Fill in the next step of ``rows`` [b]: the fields [b, G] of a `BranchStep`, which are 0 before.

    ``places`` [b G] begins with the places of the live rows, whose number is returned.
    """
    count, width = 0, live.shape[1]
    for i, row in enumerate(rows):
        if _lag(state, row) > 0:
            live[i, 0] = True
            tokens[i, 0], prefix[i, 0] = state.text[row, state.marks[COMPUTED, row]], state.marks[COMPUTED, row]
            places[count] = i * width
            count += 1
        for column in range(width - 1):
            own = state.marks[STEPS, row] - state.columns[START, row, column]
            key = state.columns[KEY, row, column]
            if key == NO_KEY or not 0 <= own < state.columns[END, row, column]:
                continue
            g = column + 1
            live[i, g] = True
            tokens[i, g] = key & _TOKEN_MASK if own == 0 else state.branch_text[row, column, own - 1]
            prefix[i, g], depth[i, g] = state.columns[PREFIX, row, column], own
            places[count] = i * width + g
            count += 1
    return count


@compiled
def take_step(
    state: RowArrays,
    rows: NDArray[np.int64],
    depth: NDArray[np.int64],
    places: NDArray[np.int64],
    tokens: NDArray[np.int64],
    candidates: NDArray[np.int64],
    q: NDArray[np.int64],
    named: NDArray[np.int64],
    cells: NDArray[np.int64],
    cell_tokens: NDArray[np.int64],
) -> tuple[int, int]:
    """Take what was drawn for the live rows of a step.

    Args:
        rows: [b], ``depth`` [b, G], ``places`` [n]: of the step.
        tokens: [n], ``candidates`` [n, M'], ``q`` [n, m] or [n, 0]: drawn.
        named: [b] begins with the rows of which more outcomes are known afterwards.
        cells: [NUM_CELL_NUMBERS, n] begins with the row, column, depth, key and finality of branch cells that are
            finished.
        cell_tokens: [n, K] begins with their tokens.

    Returns:
        How many of both.
    """
    num_named, num_cells, width = 0, 0, depth.shape[1]
    for row in rows:
        state.marks[STEPS, row] += 1
    for n, place in enumerate(places):
        i, g = place // width, place % width
        row, column = rows[i], g - 1
        if g == 0:
            state.marks[COMPUTED, row] += 1
            record(state, row, tokens[n], candidates[n], q[n])
            if _name_new(state, row):
                named[num_named] = row
                num_named += 1
            _count_steps(state, row)
        else:
            _record_cell(state, row, column, depth[i, g], tokens[n], candidates[n], q[n])
            depth_now, end = depth[i, g] + 1, state.columns[END, row, column]
            cells[0, num_cells], cells[1, num_cells], cells[2, num_cells] = row, column, depth_now
            cells[3, num_cells], cells[4, num_cells] = state.columns[KEY, row, column], depth_now >= end
            copy_to(cell_tokens[num_cells], state.branch_text[row, column])
            num_cells += 1
    for row in rows:
        if state.marks[STEPS, row] >= state.marks[STEPS_NEEDED, row]:
            state.marks[PHASE, row] = _DONE
    return num_named, num_cells


@compiled
def _name_new(state: RowArrays, row: int) -> bool:
    """Name the columns that are known since the trunk's last token; whether there are any."""
    place = state.marks[COMPUTED, row] - state.marks[COMMITTED, row]
    found = False
    for column in range(state.columns.shape[2]):
        if state.columns[ACCEPTED, row, column] == place:
            _name(state, row, column)
            found = True
    return found


@compiled
def _record_cell(
    state: RowArrays,
    row: int,
    column: int,
    place: int,
    token: int,
    candidates: NDArray[np.int64],
    q: NDArray[np.int64],
) -> None:
    state.branch_text[row, column, place] = token
    copy_to(state.branch_candidates[row, column, place], candidates)
    for rank in range(len(candidates), state.branch_candidates.shape[3]):
        state.branch_candidates[row, column, place, rank] = NO_TOKEN
    if state.marks[IS_SAMPLED, row]:
        copy_to(state.branch_q[row, column, place], q)


@compiled
def record(state: RowArrays, row: int, token: int, candidates: NDArray[np.int64], q: NDArray[np.int64]) -> None:
    """Take what was drawn after the last computed position: ``candidates`` [M'] or fewer, ``q`` [m] or nothing."""
    place = state.marks[COMPUTED, row] - state.marks[COMMITTED, row]
    if place < 0:
        return  # the row is still catching up with committed text
    copy_to(state.candidates[row, place], candidates)
    for rank in range(len(candidates), state.candidates.shape[2]):
        state.candidates[row, place, rank] = NO_TOKEN
    if state.marks[DEPTH, row] <= place < state.marks[GOAL, row]:
        state.text[row, state.marks[COMMITTED, row] + place] = token
        state.marks[DEPTH, row] = place + 1
        if state.marks[IS_SAMPLED, row]:
            copy_to(state.q[row, place], q)


@compiled
def record_runs(
    state: RowArrays,
    rows: NDArray[np.int64],
    counts: NDArray[np.int64],
    tokens: NDArray[np.int64],
    candidates: NDArray[np.int64],
    q: NDArray[np.int64],
) -> None:
    """Take what was drawn after each of the next ``counts`` [b] positions of ``rows`` [b], whose chains are complete.

    ``tokens`` [n], ``candidates`` [n, M'] and ``q`` [n, m] or [n, 0]: of all rows, one after the other.
    """
    n = 0
    for i, row in enumerate(rows):
        for _ in range(counts[i]):
            state.marks[COMPUTED, row] += 1
            record(state, row, tokens[n], candidates[n], q[n])
            n += 1


@compiled
def record_all(
    state: RowArrays,
    rows: NDArray[np.int64],
    tokens: NDArray[np.int64],
    candidates: NDArray[np.int64],
    q: NDArray[np.int64],
) -> None:
    for i, row in enumerate(rows):
        record(state, row, tokens[i], candidates[i], q[i])
