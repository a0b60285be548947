"""State of the sequences that the draft model holds: one row per engine slot, everything vectorised over rows.

Pure bookkeeping in numpy, no model and no channel.  Positions: the committed text of a row is ``text[:committed]``,
its last token being the bonus token of the last outcome.  The *chain* s_1..s_depth follows it at positions
``committed``...  KV exists for positions [0, computed).  *Place* j of a chain is where s_{j+1} is or would be: its
candidates are known once s_j is computed, so for all places up to ``computed - committed``.

The table of a row and its branches are the business of `speculator_service.branches`.  Chains end before the draft
model's context does, and shrink near it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculator_service.drawn import Drawn
from speculator_service.phase import Phase
from speculator_service.saguaro.outcomes import bonus_rank, rank_candidates
from speculator_service.saguaro.sources import Source
from ssd_proto.records import MAX_STOP_TOKENS, NO_KEY, Sampling, outcome_keys

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


class Settled(NamedTuple):
    """What outcomes [b] did to their rows, and what they say about the speculation that was verified."""

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
    stopped: NDArray[np.bool_]
    """A stop token was committed: nothing follows."""
    verified: NDArray[np.bool_]
    """The speculation that was verified is the row's chain, whole."""
    source: NDArray[np.int64]
    """`Source` of that chain."""
    num_sent: NDArray[np.int64]
    """Its length."""
    rank: NDArray[np.int64]
    """Place of the bonus token among the candidates at position k; -1: not among them."""
    num_known: NDArray[np.int64]
    """How many candidates there were."""


class Rows:
    """All rows."""

    def __init__(self, shape: RowShape) -> None:
        self.shape = shape
        rows, context, lookahead, columns, candidates, kept = shape
        self.lookahead, self.context_length = lookahead, context
        self.phase = np.full(rows, Phase.FREE, np.int8)
        self.owner, self.slot, self.generation, self.round = (np.full(rows, -1, np.int64) for _ in range(4))
        self.awaited = np.full(rows, NO_KEY, np.int64)  # the outcome that a reply is owed for
        self.temperature, self.top_p, self.min_p = (np.zeros(rows, np.float32) for _ in range(3))
        self.top_k, self.seed = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.shared_noise = np.zeros(rows, bool)
        self.downweight = np.ones(rows)  # C
        self.stop_tokens = np.full((rows, MAX_STOP_TOKENS), NO_TOKEN, np.int64)
        # The chain.
        self.committed, self.computed, self.reserved = (np.zeros(rows, np.int64) for _ in range(3))
        self.depth, self.goal = np.zeros(rows, np.int64), np.zeros(rows, np.int64)  # tokens there are, and wanted
        self.source = np.full(rows, Source.EMPTY, np.int64)
        self.text = np.zeros((rows, context + 2 * lookahead + 2), np.int64)
        self.candidates = np.full((rows, lookahead + 1, candidates), NO_TOKEN, np.int64)
        self.q = np.zeros((rows, lookahead, kept), np.int64)
        # The table.
        self.keys = np.full((rows, columns), NO_KEY, np.int64)
        self.accepted, self.rank = np.zeros((rows, columns), np.int64), np.zeros((rows, columns), np.int64)
        self.prefix, self.start, self.end = (np.zeros((rows, columns), np.int64) for _ in range(3))
        self.branch_text = np.zeros((rows, columns, lookahead), np.int64)
        self.branch_candidates = np.full((rows, columns, lookahead, candidates), NO_TOKEN, np.int64)
        self.branch_q = np.zeros((rows, columns, lookahead, kept), np.int64)
        self.steps, self.steps_needed = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._arrival, self._arrivals = np.zeros(rows, np.int64), 0
        self._places = np.arange(lookahead + 1)

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
        """Begin a sequence in a free row; its prompt is ``tokens``. `sample_like` says how it is drafted."""
        self.owner[row], self.slot[row], self.generation[row], self.round[row] = owner, slot, generation, round_
        self.text[row, : len(tokens)] = tokens
        self.committed[row], self.depth[row], self.computed[row] = len(tokens), 0, 0
        self.keys[row] = self.awaited[row] = NO_KEY
        self.source[row] = Source.EMPTY
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

    @property
    def is_sampled(self) -> NDArray[np.bool_]:
        """[rows] whether drafts are sampled and their q is sent."""
        result: NDArray[np.bool_] = (self.temperature > 0) & ~self.shared_noise
        return result

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

    # -- outcomes ----------------------------------------------------------------------------------

    def commit(
        self, rows: NDArray[np.int64], accepted: NDArray[np.int64], bonus: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> None:
        """Append ``tokens[:, :accepted]`` and ``bonus`` to the text and advance to the next round; a reply is owed."""
        new = _committed_tokens(accepted, bonus, tokens)
        i, j = np.nonzero(self._places <= accepted[:, None])
        self.text[rows[i], self.committed[rows[i]] + j] = new[i, j]
        self.committed[rows] += accepted + 1
        self.round[rows] += 1
        self.awaited[rows] = outcome_keys(accepted, bonus)

    def settle(
        self,
        rows: NDArray[np.int64],
        accepted: NDArray[np.int64],
        bonus: NDArray[np.int64],
        tokens: NDArray[np.int64],
        num_sent: NDArray[np.int64],
        jit_depth: int,
    ) -> Settled:
        """Apply outcomes [b] (``tokens`` [b, K] are those that were verified) to rows whose prompt is computed.

        Prepared outcomes take over their branch, others cut the trunk back to what is valid.  The caller makes the
        draft model adopt the branches.  The rows go to `Phase.FORK`, to `Phase.DRAFT` if tokens are missing
        (``jit_depth`` are wanted), or to `Phase.DONE` after a stop token.
        """
        committed, depth = self.committed[rows], self.depth[rows]
        chain = self.chains(rows)
        new = _committed_tokens(accepted, bonus, tokens)
        same = (new[:, :-1] == chain) & (self._places[:-1] < depth[:, None])
        common = np.minimum(np.logical_and.accumulate(same, axis=1).sum(1), accepted + 1)
        diverged = common < accepted
        source, (rank, num_known) = self.source[rows], self._rank_of(rows, accepted, bonus)
        is_stop = (new[:, :, None] == self.stop_tokens[rows][:, None, :]).any(2)
        stopped = (is_stop & (self._places <= accepted[:, None])).any(1)

        found = self.keys[rows] == outcome_keys(accepted, bonus)[:, None]
        column = found.argmax(1) if found.shape[1] else np.zeros(len(rows), np.int64)
        predicted = found.any(1) & (common >= accepted)
        done, end = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        hits = np.flatnonzero(predicted)
        at = rows[hits], column[hits]
        end[hits] = self.end[at]
        done[hits] = np.clip(self.steps[rows[hits]] - self.start[at], 0, self.end[at])
        adopted = (done > 0) & ~stopped
        kept = ~adopted & (common > accepted) & ~stopped

        self._shift_chains(rows[kept], common[kept])
        self.commit(rows, accepted, bonus, tokens)
        prefix = committed + accepted
        self._take_branches(rows[adopted], column[adopted])
        self.source[rows] = np.where(adopted, Source.HIT, np.where(kept, source, Source.PRIMARY))
        self.depth[rows] = np.where(adopted, done, np.where(kept, depth - common, 0))
        valid = np.where(kept, prefix + self.depth[rows], committed + common)
        self.computed[rows] = np.where(adopted, prefix + done, np.minimum(self.computed[rows], valid))
        # A branch that was complete may be in use already; otherwise somebody waits, and for no more than pays.
        wanted = np.minimum(self.room(self.committed[rows]), jit_depth)
        is_final = adopted & (done >= end)
        self.goal[rows] = np.where(is_final, done, np.maximum(self.depth[rows], wanted))
        self.keys[rows] = NO_KEY
        self.steps[rows] = 0
        complete = self.depth[rows] >= self.goal[rows]
        self.phase[rows] = np.where(stopped, Phase.DONE, np.where(complete, Phase.FORK, Phase.DRAFT))
        return Settled(
            adopted,
            column + 1,
            prefix,
            done,
            diverged,
            kept,
            predicted,
            stopped,
            (num_sent == depth) & ~diverged,
            source,
            depth,
            rank,
            num_known,
        )

    def _rank_of(
        self, rows: NDArray[np.int64], accepted: NDArray[np.int64], bonus: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`bonus_rank` among the candidates at position k; none where they are not known."""
        sent = np.where(accepted < self.depth[rows], self.text[rows, self.committed[rows] + accepted], NO_TOKEN)
        candidates = self.candidates[rows, accepted][:, None]
        ranked = rank_candidates(candidates, sent[:, None], self.stop_tokens_of(rows))[:, 0]
        rank, num_known = bonus_rank(ranked, bonus)
        known = accepted <= self.computed[rows] - self.committed[rows]
        return np.where(known, rank, -1), np.where(known, num_known, 0)

    def stop_tokens_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[b, n] stop tokens of the rows, -1 where there are fewer than n; n is what the rows need."""
        stops = self.stop_tokens[rows]
        return stops[:, : int((stops != NO_TOKEN).sum(1).max(initial=0))]

    def _shift_chains(self, rows: NDArray[np.int64], count: NDArray[np.int64]) -> None:
        source = np.minimum(self._places + count[:, None], self.lookahead)
        self.candidates[rows] = self.candidates[rows[:, None], source]
        self.q[rows] = self.q[rows[:, None], np.minimum(source[:, :-1], self.lookahead - 1)]

    def _take_branches(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        where = self.committed[rows][:, None] + self._places[:-1]
        self.text[rows[:, None], where] = self.branch_text[rows, columns]
        self.candidates[rows, :-1] = self.branch_candidates[rows, columns]
        self.q[rows] = self.branch_q[rows, columns]

    # -- the chain ---------------------------------------------------------------------------------

    def chains(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[b, K] tokens, valid up to ``depth``."""
        return self.text[rows[:, None], self.committed[rows][:, None] + self._places[:-1]]

    def give(self, rows: NDArray[np.int64], source: int, tokens: NDArray[np.int64], depth: NDArray[np.int64]) -> None:
        """Let ``tokens`` [b, K], valid up to ``depth`` [b], be the whole chain of rows that have none. Not sampled."""
        depth = np.minimum(depth, self.room(self.committed[rows]))
        self.text[rows[:, None], self.committed[rows][:, None] + self._places[:-1]] = tokens
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
        place = self.computed[rows] - self.committed[rows]
        in_chain = place >= 0  # otherwise the row is still catching up with committed text
        rows, place, count = rows[in_chain], place[in_chain], drawn.candidates.shape[1]
        self.candidates[rows, place, :count] = drawn.candidates[in_chain]
        self.candidates[rows, place, count:] = NO_TOKEN
        grows = (place >= self.depth[rows]) & (place < self.goal[rows])
        rows, place = rows[grows], place[grows]
        self.text[rows, self.committed[rows] + place] = drawn.tokens[in_chain][grows]
        self.q[rows, place] = 0 if drawn.q is None else drawn.q[in_chain][grows]
        self.depth[rows] = place + 1

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


def _committed_tokens(
    accepted: NDArray[np.int64], bonus: NDArray[np.int64], tokens: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[b, K + 1]: the tokens that an outcome commits; what follows the bonus token is meaningless."""
    new = np.concatenate([tokens, bonus[:, None]], axis=1)
    new[np.arange(len(new)), accepted] = bonus
    return new
