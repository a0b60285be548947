"""State of the sequences that the draft model holds: one row per engine slot, everything vectorised over rows.

Pure bookkeeping in numpy, no model and no channel.  Positions: the committed text of a row is ``text[:committed]``,
its last token being the bonus token of the last outcome.  The *chain* s_1..s_depth follows it at positions
``committed``...  KV exists for positions [0, computed).  A branch for outcome (k, t*) continues the prefix of
``committed + k`` positions.  Chains and branches end before the draft model's context does, and shrink near it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from speculator_service.draft.base import BranchStep
from speculator_service.phase import Phase
from speculator_service.saguaro.fan_out import FanOut
from speculator_service.saguaro.outcomes import predict_all_accepted, predict_first_outcomes, predict_outcomes
from ssd_proto.records import NO_KEY, outcome_keys

S = TypeVar("S", bound=np.generic)

_TOKEN_MASK = 0xFFFF_FFFF


class Settled(NamedTuple):
    """What outcomes [b] did to their rows."""

    adopted: NDArray[np.bool_]
    """The outcome was prepared: the branch becomes the trunk."""
    branch: NDArray[np.int64]
    """Branch 1..B to adopt (meaningless where not adopted)."""
    prefix: NDArray[np.int64]
    """Trunk positions before the branch."""
    finished: NDArray[np.int64]
    """Finished cells of the branch."""
    diverged: NDArray[np.bool_]
    """The verifier accepted tokens that are not the chain's (it had no speculation in time)."""
    kept: NDArray[np.bool_]
    """The chain was not used but its tokens were right: the rest of it is the new chain."""
    predicted: NDArray[np.bool_]
    """The outcome was in the table (perhaps with no cell finished)."""


class TableEntries(NamedTuple):
    """Cells finished by a step; all arrays [n]."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    depths: NDArray[np.int64]


class Rows:
    """All rows. ``context_length`` bounds committed text and chain.

    ``num_candidates`` of the likeliest tokens are kept for each position.
    """

    def __init__(self, max_rows: int, context_length: int, vocab_size: int, fan_out: FanOut) -> None:
        lookahead, columns = fan_out.lookahead, fan_out.num_outcomes
        candidates = min(fan_out.num_candidates, vocab_size)
        self.fan_out, self.lookahead, self.context_length = fan_out, lookahead, context_length
        self.num_candidates = candidates
        self.phase = np.full(max_rows, Phase.FREE, np.int8)
        self.owner, self.slot, self.generation, self.round = (np.full(max_rows, -1, np.int64) for _ in range(4))
        self.committed, self.depth, self.computed, self.reserved = (np.zeros(max_rows, np.int64) for _ in range(4))
        self.awaited = np.full(max_rows, NO_KEY, np.int64)  # the outcome that a reply is owed for
        self.text = np.zeros((max_rows, context_length + 2 * lookahead + 2), np.int64)
        self.candidates = np.zeros((max_rows, lookahead, candidates), np.int64)  # at the chain's positions
        self.keys = np.full((max_rows, columns), NO_KEY, np.int64)
        self.branch_text = np.zeros((max_rows, columns, lookahead), np.int64)
        self.branch_candidates = np.zeros((max_rows, columns, lookahead, candidates), np.int64)
        self.prefix, self.start, self.end = (np.zeros((max_rows, columns), np.int64) for _ in range(3))
        self.steps = np.zeros(max_rows, np.int64)  # steps of the table that were made
        self._steps_needed, self._arrival = np.zeros(max_rows, np.int64), np.zeros(max_rows, np.int64)
        self._arrivals = 0
        self._positions = np.arange(lookahead + 1)

    def in_phase(self, phase: int) -> NDArray[np.int64]:
        """Rows in ``phase``."""
        return np.flatnonzero(self.phase == phase)

    def room(self, committed: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """Length of the speculation after ``committed`` tokens: K, or what is left of the context."""
        return np.clip(self.context_length - np.asarray(committed, np.int64), 0, self.lookahead)

    def span(self, committed: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """Trunk positions that a round may touch: after adoption of the last branch, and its glue."""
        return np.minimum(np.asarray(committed, np.int64) + 2 * self.lookahead + 1, self.context_length)

    def occupy(self, row: int, owner: int, slot: int, generation: int, round_: int, tokens: NDArray[np.int64]) -> None:
        """Begin a sequence in a free row; its prompt is ``tokens``."""
        self.owner[row], self.slot[row], self.generation[row], self.round[row] = owner, slot, generation, round_
        self.text[row, : len(tokens)] = tokens
        self.committed[row], self.depth[row], self.computed[row] = len(tokens), 0, 0
        self.keys[row] = self.awaited[row] = NO_KEY
        self._arrivals += 1
        self._arrival[row] = self._arrivals
        self.phase[row] = Phase.PREFILL

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
        self.keys[rows] = NO_KEY

    # -- outcomes ----------------------------------------------------------------------------------

    def commit(
        self, rows: NDArray[np.int64], accepted: NDArray[np.int64], bonus: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> None:
        """Append ``tokens[:, :accepted]`` and ``bonus`` to the text and advance to the next round; a reply is owed."""
        new = self._committed_tokens(accepted, bonus, tokens)
        i, j = np.nonzero(self._positions <= accepted[:, None])
        self.text[rows[i], self.committed[rows[i]] + j] = new[i, j]
        self.committed[rows] += accepted + 1
        self.round[rows] += 1
        self.awaited[rows] = outcome_keys(accepted, bonus)

    def settle(
        self, rows: NDArray[np.int64], accepted: NDArray[np.int64], bonus: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> Settled:
        """Apply outcomes [b] (``tokens`` [b, K] are those that were verified) to rows whose prompt is computed.

        Prepared outcomes take over their branch, others cut the trunk back to what is valid.  The caller makes the
        draft model adopt the branches.  The rows go to `Phase.FORK`, or `Phase.DRAFT` if tokens are missing.
        """
        committed, depth = self.committed[rows], self.depth[rows]
        chain = self.text[rows[:, None], committed[:, None] + self._positions[:-1]]
        new = self._committed_tokens(accepted, bonus, tokens)
        same = (new[:, :-1] == chain) & (self._positions[:-1] < depth[:, None])
        common = np.minimum(np.logical_and.accumulate(same, axis=1).sum(1), accepted + 1)

        found = self.keys[rows] == outcome_keys(accepted, bonus)[:, None]
        column = found.argmax(1) if found.shape[1] else np.zeros(len(rows), np.int64)
        predicted = found.any(1) & (common >= accepted)
        done = np.zeros(len(rows), np.int64)
        hits = np.flatnonzero(predicted)
        at = rows[hits], column[hits]
        done[hits] = np.clip(self.steps[rows[hits]] - self.start[at], 0, self.end[at])
        adopted = done > 0
        kept = ~adopted & (common > accepted)

        self._shift_candidates(rows[kept], common[kept])
        self.commit(rows, accepted, bonus, tokens)
        prefix = committed + accepted
        self._take_branches(rows[adopted], column[adopted])
        self.depth[rows] = np.where(adopted, done, np.where(kept, depth - common, 0))
        valid = np.where(kept, prefix + self.depth[rows], committed + common)
        self.computed[rows] = np.where(adopted, prefix + done, np.minimum(self.computed[rows], valid))
        self.keys[rows] = NO_KEY
        self.steps[rows] = 0
        complete = self.depth[rows] >= self.room(self.committed[rows])
        self.phase[rows] = np.where(complete, Phase.FORK, Phase.DRAFT)
        return Settled(adopted, column + 1, prefix, done, common < accepted, kept, predicted)

    def _committed_tokens(
        self, accepted: NDArray[np.int64], bonus: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """[b, K + 1]: the tokens that an outcome commits; what follows the bonus token is meaningless."""
        new = np.concatenate([tokens, bonus[:, None]], axis=1)
        new[np.arange(len(new)), accepted] = bonus
        return new

    def _shift_candidates(self, rows: NDArray[np.int64], count: NDArray[np.int64]) -> None:
        source = np.minimum(self._positions[:-1] + count[:, None], self.lookahead - 1)
        self.candidates[rows] = self.candidates[rows[:, None], source]

    def _take_branches(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        where = self.committed[rows][:, None] + self._positions[:-1]
        self.text[rows[:, None], where] = self.branch_text[rows, columns]
        self.candidates[rows] = self.branch_candidates[rows, columns]

    # -- the chain, one token a step ---------------------------------------------------------------

    def next_inputs(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions [b] and tokens [b] that rows in `Phase.DRAFT` compute next."""
        return self.computed[rows], self.text[rows, self.computed[rows]]

    def extend_chains(self, rows: NDArray[np.int64], top: NDArray[np.int64]) -> NDArray[np.int64]:
        """Take the candidates ``top`` [b, >= M] after `next_inputs`; returns the rows that are complete now."""
        self.computed[rows] += 1
        place = self.computed[rows] - self.committed[rows]
        grown = place >= 0  # otherwise the row is still catching up with committed text
        self._append(rows[grown], place[grown], top[grown])
        complete = rows[self.depth[rows] >= self.room(self.committed[rows])]
        self.phase[complete] = Phase.FORK
        return complete

    def _append(self, rows: NDArray[np.int64], place: NDArray[np.int64], top: NDArray[np.int64]) -> None:
        self.text[rows, self.committed[rows] + place] = top[:, 0]
        self.candidates[rows, place] = top[:, : self.num_candidates]
        self.depth[rows] = place + 1

    def chains(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[b, K] tokens, valid up to ``depth``."""
        return self.text[rows[:, None], self.committed[rows][:, None] + self._positions[:-1]]

    def finish_prompt(self, row: int, top: NDArray[np.int64]) -> bool:
        """Take the candidates ``top`` [n] after a prompt; returns whether a reply is due now.

        If nobody waits, the first table is begun: nothing was sent, so all its outcomes are at k = 0.
        """
        rows = np.array([row])
        if self.awaited[row] == NO_KEY:
            keys = predict_first_outcomes(top[None], self.fan_out)
            accepted = np.zeros(self.fan_out.num_outcomes, np.int64)
            self._begin(rows, keys, accepted, np.zeros_like(accepted))
            return False
        self._append(rows, np.array([0]), top[None])
        complete = bool(self.depth[row] >= self.room(int(self.committed[row])))
        self.phase[row] = Phase.FORK if complete else Phase.DRAFT
        return complete

    # -- tables ------------------------------------------------------------------------------------

    def fork(self, rows: NDArray[np.int64]) -> None:
        """Begin the tables of rows with a complete speculation."""
        accepted = self.fan_out.accepted
        sent = np.where(self._positions[:-1] < self.depth[rows][:, None], self.chains(rows), -1)
        keys = np.full((len(rows), self.fan_out.num_outcomes), NO_KEY, np.int64)
        keys[:, : self.fan_out.first_late] = predict_outcomes(self.candidates[rows], sent, self.fan_out)
        keys[accepted >= self.depth[rows][:, None]] = NO_KEY
        self._begin(rows, keys, accepted, (accepted == self.lookahead).astype(np.int64))

    def _begin(
        self, rows: NDArray[np.int64], keys: NDArray[np.int64], accepted: NDArray[np.int64], start: NDArray[np.int64]
    ) -> None:
        self.prefix[rows] = self.committed[rows][:, None] + accepted
        self.start[rows] = start
        end = np.clip(self.context_length - 1 - self.prefix[rows], 0, self.lookahead)
        late = (start > 0) & self._has_glue(rows)[:, None]
        end[(keys == NO_KEY) & ~late] = 0
        self.end[rows] = end
        self.keys[rows] = np.where(end > 0, keys, NO_KEY)
        self.steps[rows] = 0
        needed = np.where(end > 0, start + end, 0).max(axis=1, initial=0)
        self._steps_needed[rows] = np.maximum(needed, self._has_glue(rows))
        self.phase[rows] = np.where(self._steps_needed[rows] > 0, Phase.TABLE, Phase.DONE)

    def _has_glue(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether s_K exists and its KV does not."""
        return (self.depth[rows] == self.lookahead) & (self.computed[rows] == self.committed[rows] + self.lookahead - 1)

    def next_step(self, rows: NDArray[np.int64]) -> BranchStep:
        """The next step of the tables of ``rows`` (all in `Phase.TABLE`)."""
        own_depth = self.steps[rows][:, None] - self.start[rows]  # [b, B]
        live = (own_depth >= 0) & (own_depth < self.end[rows]) & (self.keys[rows] != NO_KEY)
        own_depth = np.where(live, own_depth, 0)
        before = np.take_along_axis(self.branch_text[rows], np.maximum(own_depth - 1, 0)[:, :, None], 2)[:, :, 0]
        tokens = np.where(own_depth == 0, self.keys[rows] & _TOKEN_MASK, before)
        glue = self._has_glue(rows) & (self.steps[rows] == 0)
        position = self.committed[rows] + self.lookahead - 1  # of s_K
        live = _beside(glue, live)
        return BranchStep(
            slots=rows,
            tokens=np.where(live, _beside(self.text[rows, position], tokens), 0),
            prefix=_beside(np.where(glue, position, 0), self.prefix[rows]),
            depth=_beside(np.zeros_like(rows), own_depth),
            live=live,
        )

    def take_step(self, step: BranchStep, top: NDArray[np.int64]) -> tuple[NDArray[np.int64], TableEntries]:
        """Take the candidates ``top`` [b, G, M] of a step.

        Returns the rows whose outcomes with k = K are known now, and the cells that were finished.
        """
        rows = step.slots
        glued = step.live[:, 0]
        late = slice(self.fan_out.first_late, None)
        fresh = rows[glued]
        if len(fresh):
            self.computed[fresh] += 1
            keys = predict_all_accepted(top[glued, 0], self.fan_out)
            self.keys[fresh, late] = np.where(self.end[fresh, late] > 0, keys, NO_KEY)
        i, column = np.nonzero(step.live[:, 1:])
        depth = step.depth[i, column + 1]
        self.branch_text[rows[i], column, depth] = top[i, column + 1, 0]
        self.branch_candidates[rows[i], column, depth] = top[i, column + 1]
        self.steps[rows] += 1
        self.phase[rows[self.steps[rows] >= self._steps_needed[rows]]] = Phase.DONE
        return fresh, TableEntries(rows[i], column, depth + 1)


def _beside(column: NDArray[S], columns: NDArray[S]) -> NDArray[S]:
    """[b, B + 1]: row 0 of a step beside its branches."""
    return np.concatenate([column[:, None], columns], axis=1)
