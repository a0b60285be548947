"""Tables in the making: which outcomes are prepared for, and the branches that are drafted for them step by step.

A branch for outcome (k, t*) continues the prefix of ``committed + k`` positions.  Its bonus token is known once the
draft model has seen s_k; until then the column has no key.  So one step both extends trunks that lag behind their
chain (the *glue*) and all branches that are known.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from speculator_service.draft.base import BranchStep
from speculator_service.drawn import Drawn
from speculator_service.phase import Phase
from speculator_service.planner import Plan
from speculator_service.rows import NO_TOKEN, Rows
from speculator_service.saguaro.outcomes import outcome_columns, rank_candidates
from ssd_proto.records import NO_KEY

S = TypeVar("S", bound=np.generic)

_TOKEN_MASK = 0xFFFF_FFFF


class Cells(NamedTuple):
    """Cells of tables that a step has finished; all arrays [n]."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    depths: NDArray[np.int64]
    """Tokens that the branch has now."""


class Branches:
    """The tables of ``rows``."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._places = np.arange(rows.lookahead + 1)

    def fork(self, rows: NDArray[np.int64], plan: Plan) -> None:
        """Begin the tables of rows in `Phase.FORK`.

        They go to `Phase.TABLE`, or to `Phase.DONE` if there is nothing to do.
        """
        state = self._rows
        state.goal[rows] = depth = state.depth[rows]
        accepted = plan.accepted[state.source[rows], depth]
        state.accepted[rows], state.rank[rows] = accepted, plan.rank[state.source[rows], depth]
        known = state.computed[rows] - state.committed[rows]
        state.prefix[rows] = prefix = state.committed[rows][:, None] + accepted
        state.start[rows] = np.maximum(accepted - known[:, None], 0)
        end = np.clip(state.context_length - 1 - prefix, 0, plan.depth)
        end[(accepted < 0) | (accepted > self._first_stop(rows)[:, None])] = 0
        state.end[rows] = end
        state.keys[rows] = NO_KEY
        state.steps[rows] = 0
        self._name(rows, accepted <= known[:, None])
        self._count_steps(rows)

    def _first_stop(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[b] k up to which an outcome is followed by another round: tokens of the chain before a stop token."""
        state = self._rows
        is_stop = (state.chains(rows)[:, :, None] == state.stop_tokens_of(rows)[:, None, :]).any(2)
        is_stop &= self._places[:-1] < state.depth[rows][:, None]
        return np.where(is_stop.any(1), is_stop.argmax(1), state.lookahead)

    def _name(self, rows: NDArray[np.int64], columns: NDArray[np.bool_]) -> None:
        """Find the bonus tokens of ``columns`` [b, B]; those without one are not drafted for."""
        state = self._rows
        in_chain = self._places < state.depth[rows][:, None]
        padded = np.concatenate([state.chains(rows), np.full((len(rows), 1), NO_TOKEN)], axis=1)
        ranked = rank_candidates(
            state.candidates[rows], np.where(in_chain, padded, NO_TOKEN), state.stop_tokens_of(rows)
        )
        keys = outcome_columns(ranked, state.accepted[rows], state.rank[rows])
        keys[state.end[rows] == 0] = NO_KEY
        state.keys[rows] = np.where(columns, keys, state.keys[rows])
        state.end[rows] = np.where(columns & (keys == NO_KEY), 0, state.end[rows])

    def _count_steps(self, rows: NDArray[np.int64]) -> None:
        """Steps that the tables need in all; those that have made them are done."""
        state = self._rows
        end = state.end[rows]
        needed = np.where(end > 0, state.start[rows] + end, 0).max(axis=1, initial=0)
        state.steps_needed[rows] = np.maximum(needed, state.steps[rows] + self._lag(rows))
        unfinished = state.steps[rows] < state.steps_needed[rows]
        state.phase[rows] = np.where(unfinished, Phase.TABLE, Phase.DONE)

    def _lag(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[b] tokens of the chain, bonus token included, that the trunk does not have yet."""
        state = self._rows
        return state.committed[rows] + state.depth[rows] - state.computed[rows]

    def next_step(self, rows: NDArray[np.int64]) -> BranchStep:
        """The next step of the tables of ``rows`` (all in `Phase.TABLE`)."""
        state = self._rows
        own_depth = state.steps[rows][:, None] - state.start[rows]  # [b, B]
        live = (own_depth >= 0) & (own_depth < state.end[rows]) & (state.keys[rows] != NO_KEY)
        own_depth = np.where(live, own_depth, 0)
        before = np.take_along_axis(state.branch_text[rows], np.maximum(own_depth - 1, 0)[:, :, None], 2)[:, :, 0]
        tokens = np.where(own_depth == 0, state.keys[rows] & _TOKEN_MASK, before)
        glue = self._lag(rows) > 0
        position, token = state.next_inputs(rows)
        live = _beside(glue, live)
        return BranchStep(
            slots=rows,
            tokens=np.where(live, _beside(token, tokens), 0),
            prefix=np.where(live, _beside(position, state.prefix[rows]), 0),
            depth=_beside(np.zeros_like(rows), own_depth),
            live=live,
        )

    def take_step(self, step: BranchStep, trunks: Drawn, branches: Drawn) -> tuple[NDArray[np.int64], Cells]:
        """Take what was drawn for the live rows of a step: ``trunks`` [t] of row 0, ``branches`` [n] of the others.

        Returns the rows of which more outcomes are known now, and the cells that were finished.
        """
        state, rows = self._rows, step.slots
        i, column = np.nonzero(step.live[:, 1:])
        depth = step.depth[i, column + 1]
        at, count = (rows[i], column, depth), branches.candidates.shape[1]
        state.branch_text[at] = branches.tokens
        state.branch_candidates[(*at, slice(count))] = branches.candidates
        state.branch_candidates[(*at, slice(count, None))] = NO_TOKEN
        state.branch_q[at] = 0 if branches.q is None else branches.q
        state.steps[rows] += 1

        glued = rows[step.live[:, 0]]
        named = self._take_trunks(glued, trunks) if len(glued) else glued
        state.phase[rows[state.steps[rows] >= state.steps_needed[rows]]] = Phase.DONE
        return named, Cells(rows[i], column, depth + 1)

    def _take_trunks(self, rows: NDArray[np.int64], trunks: Drawn) -> NDArray[np.int64]:
        """Take what was drawn [b] for trunks that were extended; returns the rows of which more outcomes are known."""
        state = self._rows
        state.extend(rows, trunks)
        place = state.computed[rows] - state.committed[rows]
        columns = state.accepted[rows] == place[:, None]
        self._name(rows, columns)
        self._count_steps(rows)
        return rows[columns.any(1)]


def _beside(column: NDArray[S], columns: NDArray[S]) -> NDArray[S]:
    """[b, B + 1]: row 0 of a step beside its branches."""
    return np.concatenate([column[:, None], columns], axis=1)
