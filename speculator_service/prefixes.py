"""A prefix cache for draft prompts: what two texts have in common at their beginning is computed once.

A row whose sequence has ended keeps its KV until the row or its cells are needed.  A new sequence takes the free row
that begins like it; and before a prompt is computed, KV is copied from any row that begins in the same way, whether its
sequence has ended or not.  So requests with the same system prompt share it, also when they come at the same time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from speculator_service.draft.base import DraftModel
from speculator_service.phase import Phase
from speculator_service.rows import Rows

_LEAST_COPIED = 16
"""Positions that are worth a copy."""


class PrefixCache:
    """KV of ``rows`` that is of use to other rows. ``engine`` holds it."""

    def __init__(self, engine: DraftModel, rows: Rows) -> None:
        self._engine, self._rows = engine, rows
        self._ended_at = np.zeros(len(rows.phase), np.int64)  # a count, not a time; 0: the row keeps nothing
        self._num_ended = 0

    @property
    def num_kept(self) -> int:
        """KV cells that ended sequences keep; they are as good as free."""
        return sum(self._engine.held_tokens(row) for row in np.flatnonzero(self._ended_at).tolist())

    def keep(self, rows: NDArray[np.int64]) -> None:
        """The sequences of ``rows`` have ended; the rows are free."""
        for row in rows.tolist():
            self._num_ended += 1
            self._ended_at[row] = self._num_ended

    def take_row(self, tokens: NDArray[np.int64]) -> tuple[int, int] | None:
        """A free row for a text that begins with ``tokens`` [L], and the number of its positions that are computed.

        None if no row is free.  The last token is never among the computed ones: what follows it is wanted.
        """
        free = self._rows.in_phase(Phase.FREE)
        if not len(free):
            return None
        row, common = self._most_common(free[self._ended_at[free] > 0], tokens, 0)
        # Of a text that goes on differently for long, a copy is taken: it may be continued itself.
        if common >= _LEAST_COPIED and 2 * common >= self._rows.computed[row]:
            self._ended_at[row] = 0
            return row, common
        row = int(free[self._ended_at[free].argmin()])  # one that keeps nothing, or what was of no use for longest
        self.forget(row)
        return row, 0

    def reclaim(self) -> bool:
        """Give back the cells of the sequence that ended first; False if none keeps any."""
        rows = np.flatnonzero(self._ended_at)
        if not len(rows):
            return False
        self.forget(int(rows[self._ended_at[rows].argmin()]))
        return True

    def forget(self, row: int) -> None:
        """Give back the cells of ``row``."""
        self._ended_at[row] = 0
        self._engine.release(row)

    def borrow(self, row: int) -> int:
        """Copy what another row has computed of the prompt of ``row``; returns the number of positions copied."""
        state = self._rows
        tokens, start = state.text[row, : state.committed[row]], int(state.computed[row])
        others = np.flatnonzero((state.phase != Phase.FREE) | (self._ended_at > 0))
        other, stop = self._most_common(others[others != row], tokens, start)
        if stop < start + _LEAST_COPIED or not self._engine.copy_trunk(other, row, start, stop):
            return 0
        state.computed[row] = stop
        return stop - start

    def _most_common(self, rows: NDArray[np.int64], tokens: NDArray[np.int64], start: int) -> tuple[int, int]:
        """That of ``rows`` which has most of ``tokens`` [L] computed, and how many, at most L - 1.

        Only rows with at least `_LEAST_COPIED` tokens from ``start`` on; (0, 0) if there is none.
        """
        state, length, enough = self._rows, len(tokens) - 1, start + _LEAST_COPIED
        if length < enough:
            return 0, 0
        rows = rows[state.computed[rows] >= enough]
        rows = rows[(state.text[rows, start:enough] == tokens[start:enough]).all(1)]  # few are compared as a whole
        best, most = 0, 0
        for row in rows.tolist():
            end = min(length, int(state.computed[row]))
            differs = np.flatnonzero(state.text[row, :end] != tokens[:end])
            common = int(differs[0]) if len(differs) else end
            if common > most:
                best, most = row, common
        return best, most
