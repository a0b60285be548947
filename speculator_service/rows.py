"""State of the sequences that the draft model holds: one row per engine slot, everything vectorised over rows.

Pure bookkeeping in numpy, no model and no channel.  Positions: the committed text of a row is ``text[:committed]``,
its last token being the bonus token of the last outcome.  The *chain* s_1..s_depth follows it at positions
``committed``...  KV exists for positions [0, computed).  *Place* j of a chain is where s_{j+1} is or would be: its
candidates are known once s_j is computed, so for all places up to ``computed - committed``.

The table of a row and its branches are the business of `speculator_service.branches`.  Chains end before the draft
model's context does, and shrink near it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from speculator_service import settling, tables
from speculator_service.drawn import Drawn
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
    NUM_STOPS,
    PHASE,
    ROUND,
    SOURCE,
    RowShape,
    make_arrays,
)
from speculator_service.saguaro.sources import Source
from speculator_service.settling import Settled
from ssd_proto.records import NO_KEY, Sampling

__all__ = ["NO_TOKEN", "RowShape", "Rows", "Settled"]


class Rows:
    """All rows. The arrays of ``state`` are attributes, too."""

    def __init__(self, shape: RowShape) -> None:
        self.shape = shape
        self.lookahead, self.context_length = shape.lookahead, shape.context_length
        self.state = state = make_arrays(shape)
        rows = shape.max_rows
        self.owner, self.slot, self.generation = (np.full(rows, -1, np.int64) for _ in range(3))
        self.temperature, self.top_p, self.min_p = (np.zeros(rows, np.float32) for _ in range(3))
        self.top_k, self.seed, self.reserved = (np.zeros(rows, np.int64) for _ in range(3))
        self.shared_noise = np.zeros(rows, bool)
        self.has_table = np.ones(rows, bool)
        """Whether outcomes are prepared for, after the last one."""
        self.downweight = np.ones(rows)  # C
        marks, self.stop_tokens, self.text = state.marks, state.stop_tokens, state.text
        self.phase, self.round, self.awaited, self.source = (marks[m] for m in (PHASE, ROUND, AWAITED, SOURCE))
        self.committed, self.computed, self.is_sampled = (marks[m] for m in (COMMITTED, COMPUTED, IS_SAMPLED))
        self.depth, self.goal, self.num_stops = (marks[m] for m in (DEPTH, GOAL, NUM_STOPS))
        self.keys, self.end = state.columns[KEY], state.columns[END]
        self.q, self.branch_text, self.branch_q = state.q, state.branch_text, state.branch_q
        self.any_sampled = self.any_drawn = False
        """Whether any row that is not free is sampled; is drawn with a temperature at all."""
        self._arrival, self._arrivals = np.zeros(rows, np.int64), 0
        self._places = np.arange(shape.lookahead)
        settling.prepare(state)
        none = np.empty(0, np.int64)
        nothing = Drawn(none, np.empty((0, 1), np.int64), None)
        self.record(none, nothing)
        self.record_runs(none, none, nothing)

    def in_phase(self, phase: int) -> NDArray[np.int64]:
        """Rows in ``phase``."""
        return (self.phase == phase).nonzero()[0]

    def phases(self) -> set[int]:
        """Phases that some row is in."""
        return set(self.phase.tolist())

    def room(self, committed: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """Length of the speculation after ``committed`` tokens: K, or what is left of the context."""
        return np.minimum(np.maximum(self.context_length - np.asarray(committed, np.int64), 0), self.lookahead)

    def span(self, committed: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """Trunk positions that a round may touch: after adoption of the last branch, and its glue."""
        return np.minimum(np.asarray(committed, np.int64) + 2 * self.lookahead + 1, self.context_length)

    def occupy(self, row: int, owner: int, slot: int, generation: int, round_: int, tokens: NDArray[np.int64]) -> None:
        """Begin a sequence in a free row; its prompt is ``tokens``. `sample_like` says how it is drafted."""
        self.owner[row], self.slot[row], self.generation[row], self.round[row] = owner, slot, generation, round_
        self.text[row, : len(tokens)] = tokens
        self.committed[row], self.depth[row], self.computed[row] = len(tokens), 0, 0
        self.keys[row] = self.awaited[row] = NO_KEY
        self.source[row] = Source.EMPTY
        self.has_table[row] = True
        self._arrivals += 1
        self._arrival[row] = self._arrivals
        self.phase[row] = Phase.PREFILL

    def sample_like(self, row: int, sampling: Sampling, downweight: float) -> None:
        """Draft the sequence in the way its verifier draws it."""
        is_drawn = sampling.shared_noise or self.shape.num_kept > 0
        self.temperature[row] = sampling.temperature if is_drawn else 0.0
        self.top_k[row], self.top_p[row], self.min_p[row] = sampling.top_k, sampling.top_p, sampling.min_p
        self.seed[row], self.shared_noise[row] = sampling.seed, sampling.shared_noise
        self.downweight[row] = downweight
        self.stop_tokens[row] = NO_TOKEN
        self.stop_tokens[row, : len(sampling.stop_tokens)] = sampling.stop_tokens
        self.num_stops[row] = len(sampling.stop_tokens)
        self.is_sampled[row] = self.temperature[row] > 0 and not sampling.shared_noise
        self._note_drawing()

    def next_prompt(self) -> int | None:
        """The row whose prompt is computed next: those that a verifier waits for first, then by arrival."""
        rows = self.in_phase(Phase.PREFILL)
        if not len(rows):
            return None
        return int(rows[np.lexsort((self._arrival[rows], self.awaited[rows] == NO_KEY))[0]])

    def vacate(self, rows: NDArray[np.int64]) -> None:
        """Free the rows."""
        self.phase[rows] = Phase.FREE
        self.owner[rows] = -1
        self.keys[rows] = self.awaited[rows] = NO_KEY
        self._note_drawing()

    def _note_drawing(self) -> None:
        is_served = self.phase != Phase.FREE
        self.any_sampled = bool((self.is_sampled[is_served] > 0).any())
        self.any_drawn = bool((self.temperature[is_served] > 0).any())

    # -- outcomes ----------------------------------------------------------------------------------

    def commit(
        self, rows: NDArray[np.int64], accepted: NDArray[np.int64], bonus: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> None:
        """See `speculator_service.settling`."""
        settling.commit(self.state, rows, accepted, bonus, tokens)

    def rest(self, rows: NDArray[np.int64]) -> None:
        """Compute nothing for these rows, whose answers are given, until `wake`.

        That comes with an outcome, which commits at least one token: then there is one to compute.
        """
        self.depth[rows] = 0
        self.computed[rows] = np.minimum(self.computed[rows], self.committed[rows])
        self.phase[rows] = Phase.REST

    def wake(self, rows: NDArray[np.int64]) -> None:
        """Compute the texts of those ``rows`` that rest, like prompts."""
        self.phase[rows[self.phase[rows] == Phase.REST]] = Phase.PREFILL

    def settle(
        self,
        rows: NDArray[np.int64],
        accepted: NDArray[np.int64],
        bonus: NDArray[np.int64],
        tokens: NDArray[np.int64],
        num_sent: NDArray[np.int64],
        jit_depth: int,
    ) -> Settled:
        """See `speculator_service.settling`."""
        return settling.settle(self.state, rows, accepted, bonus, tokens, num_sent, jit_depth)

    # -- the chain ---------------------------------------------------------------------------------

    def chains(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[b, K] tokens, valid up to ``depth``."""
        return self.text[rows[:, None], self.committed[rows][:, None] + self._places]

    def give(self, rows: NDArray[np.int64], source: int, tokens: NDArray[np.int64], depth: NDArray[np.int64]) -> None:
        """Let ``tokens`` [b, K], valid up to ``depth`` [b], be the whole chain of rows that have none. Not sampled."""
        depth = np.minimum(depth, self.room(self.committed[rows]))
        self.text[rows[:, None], self.committed[rows][:, None] + self._places] = tokens
        self.q[rows] = 0
        self.depth[rows] = self.goal[rows] = depth
        self.source[rows] = source
        self.phase[rows] = Phase.FORK

    def next_inputs(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions [b] and tokens [b] of the trunk that the rows compute next."""
        return self.computed[rows], self.text[rows, self.computed[rows]]

    def extend(self, rows: NDArray[np.int64], drawn: Drawn) -> None:
        """Take what was drawn [b] after `next_inputs`: candidates, and the next token of chains below their goal."""
        self.computed[rows] += 1
        self.record(rows, drawn)

    def record(self, rows: NDArray[np.int64], drawn: Drawn) -> None:
        """Take what was drawn [b] after the last computed position of the rows."""
        tables.record_all(self.state, rows, *drawn.arrays())

    def lag(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[b] tokens of the text and the chain that are not computed."""
        lag: NDArray[np.int64] = self.committed[rows] + self.depth[rows] - self.computed[rows]
        return lag

    def record_runs(self, rows: NDArray[np.int64], counts: NDArray[np.int64], drawn: Drawn) -> None:
        """Take what was drawn [n] after each of the next ``counts`` [b] positions of rows with complete chains."""
        tables.record_runs(self.state, rows, counts, *drawn.arrays())

    def finish_chains(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of rows in `Phase.DRAFT`, those that have reached their goal; they are in `Phase.FORK` now."""
        complete = rows[self.depth[rows] >= self.goal[rows]]
        self.phase[complete] = Phase.FORK
        return complete

    def finish_prompt(self, row: int, drawn: Drawn, jit_depth: int) -> None:
        """Take what was drawn [1] after a prompt.

        If nobody waits the first table is begun: nothing was sent, so all its outcomes are at k = 0.
        """
        is_awaited = self.awaited[row] != NO_KEY
        self.depth[row] = 0
        self.goal[row] = min(jit_depth, int(self.room(int(self.committed[row])))) if is_awaited else 0
        self.source[row] = Source.PRIMARY if is_awaited else Source.EMPTY
        self.record(np.array([row]), drawn)
        self.phase[row] = Phase.FORK if self.depth[row] >= self.goal[row] else Phase.DRAFT
