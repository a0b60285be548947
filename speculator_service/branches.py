"""Tables in the making: which outcomes are prepared for, and the branches that are drafted for them step by step.

A branch for outcome (k, t*) continues the prefix of ``committed + k`` positions.  Its bonus token is known once the
draft model has seen s_k; until then the column has no key.  So one step both extends trunks that lack the last token
of their chain and all branches that are known.  (Trunks that lack more have a step of their own before, the *glue*.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculator_service import tables
from speculator_service.draft.base import BranchStep
from speculator_service.drawn import Drawn
from speculator_service.planner import Plan
from speculator_service.row_arrays import ACCEPTED
from speculator_service.rows import Rows
from speculator_service.saguaro.sources import NUM_SOURCES


class Cells(NamedTuple):
    """Cells of tables that a step has finished; all arrays are [n] if not said otherwise."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    depths: NDArray[np.int64]
    """Tokens that the branch has now."""
    keys: NDArray[np.int64]
    is_final: NDArray[np.bool_]
    """Whether these are all that it shall have."""
    tokens: NDArray[np.int64]
    """[n, K]"""


class Branches:
    """The tables of ``rows``."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        none, lookahead = np.empty(0, np.int64), rows.lookahead
        no_plan = np.empty((NUM_SOURCES, lookahead + 1, rows.shape.num_outcomes), np.int64)
        tables.fork(rows.state, none, no_plan, no_plan, 1)  # compiled now, not within a round
        step, live = self.next_step(none)
        self.take_step(step, live, Drawn(none, np.empty((0, 1), np.int64), None))

    def fork(self, rows: NDArray[np.int64], plan: Plan) -> None:
        """Begin the tables of rows in `Phase.FORK`.

        They go to `Phase.TABLE`, or to `Phase.DONE` if there is nothing to do.
        """
        tables.fork(self._rows.state, rows, plan.accepted, plan.rank, plan.depth)

    def next_step(self, rows: NDArray[np.int64]) -> tuple[BranchStep, NDArray[np.int64]]:
        """The next step of the tables of ``rows`` [b] (all in `Phase.TABLE`), G - 1 the most columns that one uses.

        And the places of its live rows [n] in the flattened [b, G] ones.
        """
        used = np.count_nonzero(self._rows.state.columns[ACCEPTED, rows] >= 0, axis=-1)  # unused columns are last
        shape = (len(rows), 1 + int(used.max(initial=0)))
        tokens, prefix, depth = (np.zeros(shape, np.int64) for _ in range(3))
        live, places = np.zeros(shape, np.bool_), np.empty(tokens.size, np.int64)
        count = tables.next_step(self._rows.state, rows, tokens, prefix, depth, live, places)
        return BranchStep(rows, tokens, prefix, depth, live), places[:count]

    def take_step(self, step: BranchStep, live: NDArray[np.int64], drawn: Drawn) -> tuple[NDArray[np.int64], Cells]:
        """Take what was ``drawn`` [n] for the ``live`` rows [n] of a step.

        Returns the rows of which more outcomes are known now, and the cells that were finished.
        """
        named, cells = np.empty(len(step.slots), np.int64), np.empty((tables.NUM_CELL_NUMBERS, len(live)), np.int64)
        tokens = np.empty((len(live), self._rows.lookahead), np.int64)
        num_named, count = tables.take_step(
            self._rows.state, step.slots, step.depth, live, *drawn.arrays(), named, cells, tokens
        )
        rows, columns, depths, keys, is_final = cells[:, :count]
        return named[:num_named], Cells(rows, columns, depths, keys, is_final > 0, tokens[:count])
