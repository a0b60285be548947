"""Model steps: which one is next, and what becomes of its logits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from speculator_service.branches import Branches
from speculator_service.draft.base import BranchStep, DraftModel
from speculator_service.drafting import Drafter
from speculator_service.drawn import Drawn
from speculator_service.phase import Phase
from speculator_service.planner import Planner
from speculator_service.prefixes import PrefixCache
from speculator_service.publisher import Publisher
from speculator_service.rows import Rows
from speculator_service.saguaro.sources import Source
from speculator_service.statistics import Statistics, StepKind
from ssd_proto.trace import Trace


class StepMade(NamedTuple):
    """A model step."""

    kind: StepKind
    batch_size: int
    """Sequences it was for; without those whose tables are empty, and which need no more than their last token."""
    num_rows: int = 0
    """Of a table step, dead ones included."""


class ModelSteps:
    """Makes the steps of ``engine`` for ``rows`` and publishes what they bring.

    Args:
        prefill_chunk: prompt tokens computed at a time.
    """

    def __init__(
        self,
        engine: DraftModel,
        rows: Rows,
        planner: Planner,
        drafter: Drafter,
        publisher: Publisher,
        statistics: Statistics,
        prefill_chunk: int,
        trace: Trace,
        prefixes: PrefixCache,
    ) -> None:
        self._engine, self._rows, self._planner, self._drafter = engine, rows, planner, drafter
        self._publisher, self._statistics, self._chunk = publisher, statistics, prefill_chunk
        self._branches, self._trace, self._prefixes = Branches(rows), trace, prefixes
        self._prefilled_last = False

    def make_next(self) -> StepMade | None:
        """Make the most urgent step; None if there is none.

        First come speculations that verifiers wait for, then prompts and tables in turn.  A step synchronises with
        the device once: when what was drawn is copied to the host.
        """
        state = self._rows
        phases = state.phases()
        prompt = state.next_prompt() if Phase.PREFILL in phases else None
        has_table = Phase.FORK in phases or Phase.TABLE in phases
        tables_turn = has_table and self._prefilled_last and not (prompt is not None and state.awaited[prompt] >= 0)
        self._prefilled_last = False
        if Phase.DRAFT in phases:
            drafting = state.in_phase(Phase.DRAFT)
            with self._trace.span("draft step", batch=len(drafting)):
                self._draft(drafting)
                return StepMade(StepKind.DRAFT, len(drafting))
        if prompt is not None and not tables_turn:
            with self._trace.span("prefill"):
                self._prefill(prompt)
            self._prefilled_last = True
            return StepMade(StepKind.PREFILL, 1)
        if Phase.FORK in phases:
            forks = state.in_phase(Phase.FORK)
            lagging = forks[state.lag(forks) > 1]
            if len(lagging):
                with self._trace.span("glue", batch=len(lagging)):
                    self._catch_up(lagging)
                    return StepMade(StepKind.GLUE, len(lagging))
        if has_table:
            with self._trace.span("table step"):
                return StepMade(StepKind.TABLE, *self._build_tables(Phase.FORK in phases))
        return None

    def _draft(self, rows: NDArray[np.int64]) -> None:
        """One token of each just-in-time speculation; those that are complete are sent."""
        positions, tokens = self._rows.next_inputs(rows)
        with self._trace.span("model"):
            logits = self._engine.extend_one(rows, positions, tokens)
        place = positions + 1 - self._rows.committed[rows]
        num_candidates = self._planner.plan.num_candidates
        self._rows.extend(rows, self._draw(logits, None, rows, positions + 1, place, num_candidates))
        complete = self._rows.finish_chains(rows)
        if len(complete):
            self._publisher.reply(complete)

    def _prefill(self, row: int) -> None:
        state = self._rows
        self._statistics.prefill_tokens_shared += self._prefixes.borrow(row)
        start = int(state.computed[row])
        stop = min(start + self._chunk, int(state.committed[row]))
        with self._trace.span("model", tokens=stop - start):
            logits = self._engine.extend(row, start, state.text[row, start:stop])
        state.computed[row] = stop
        self._statistics.prefill_tokens += stop - start
        if stop < state.committed[row]:
            return
        rows = np.array([row])
        drawn = self._draw(
            logits[None], None, rows, np.array([stop]), np.zeros(1, np.int64), state.shape.max_candidates
        )
        state.finish_prompt(row, drawn, self._planner.plan_for(bool(state.has_table[row])).jit_depth)
        if state.phase[row] == Phase.FORK:
            self._publisher.reply(rows)

    def _catch_up(self, rows: NDArray[np.int64]) -> None:
        """Compute what the trunks of ``rows`` lack of their chains at once, so that their tables know every outcome.

        Not for rows that lack one token, the last of a chain that the draft model made: that is left to the first step
        of their table. After outcomes that came faster than this a trunk lacks more than a chain: the rest comes next.
        """
        state = self._rows
        counts = np.minimum(state.lag(rows), 2 * state.lookahead + 1)
        places = np.arange(int(counts.max()))
        is_live, starts = places < counts[:, None], state.computed[rows]
        positions = np.where(is_live, starts[:, None] + places, 0)
        with self._trace.span("model", batch=len(rows), live=int(counts.sum())):
            logits = self._engine.extend_each(rows, starts, state.text[rows[:, None], positions], counts)
        with self._trace.span("draw"):
            line, after = np.repeat(rows, counts), positions[is_live] + 1
            place = after - state.committed[line]
            live = np.flatnonzero(is_live)
            drawn = self._draw(logits.flatten(0, 1), live, line, after, place, state.shape.max_candidates)
        state.record_runs(rows, counts, drawn)

    def _build_tables(self, has_forks: bool) -> tuple[int, int]:
        """One step of all tables that are not complete, after beginning those of rows in `Phase.FORK`.

        Returns the number of tables and of rows.
        """
        state = self._rows
        if has_forks:
            forks = state.in_phase(Phase.FORK)
            with self._trace.span("fork", tables=len(forks)):
                has_table = state.has_table[forks]
                for which in set(has_table.tolist()):
                    self._branches.fork(forks[has_table == which], self._planner.plan_for(which))
                self._publisher.begin(forks)
            self._statistics.tables += int(np.count_nonzero(has_table))
        rows = state.in_phase(Phase.TABLE)
        if not len(rows):
            return 0, 0
        step, live = self._branches.next_step(rows)
        with self._trace.span("model", batch=len(rows), live=len(live)):
            logits = self._engine.step(step)
        with self._trace.span("draw"):
            drawn = self._drawn_in(step, live, logits)
        with self._trace.span("publish"):
            named, cells = self._branches.take_step(step, live, drawn)
            if len(named):
                self._publisher.begin(named)
            self._publisher.write(cells)
        return int(np.count_nonzero(state.has_table[rows])), step.live.size

    def _drawn_in(self, step: BranchStep, live: NDArray[np.int64], logits: torch.Tensor) -> Drawn:
        """What the ``live`` rows [n] of a step draw, from ``logits`` [b, G, V].

        The outcomes of a chain that the draft model did not make may all be at one position: those trunks keep more
        candidates.
        """
        state, flat, plan = self._rows, logits.flatten(0, 1), self._planner.plan
        any_wide = np.count_nonzero(state.source[step.slots] >= Source.SUFFIX) > 0
        if not state.any_drawn and not any_wide:
            return self._drafter.take_likeliest(flat, live, plan.num_candidates)
        # Where most rows are live it is cheaper to draw for all of them than to copy the logits of the live ones.
        draws_all = 2 * len(live) > step.live.size
        lines = np.arange(step.live.size) if draws_all else live
        line, branch = np.divmod(lines, step.live.shape[1])
        rows, depth, positions = step.slots[line], step.depth.ravel()[lines], step.prefix.ravel()[lines] + 1
        place = np.where(branch == 0, positions - state.committed[rows], depth)
        positions += depth
        drawn = self._draw(flat, lines, rows, positions, place, plan.num_candidates)
        if any_wide:
            wide = np.flatnonzero((branch == 0) & step.live.ravel()[lines] & (state.source[rows] >= Source.SUFFIX))
            if len(wide):
                some = lines[wide], rows[wide], positions[wide], place[wide]
                drawn = drawn.with_candidates(wide, self._draw(flat, *some, state.shape.max_candidates).candidates)
        return drawn.pick(live) if draws_all else drawn

    def _draw(
        self,
        logits: torch.Tensor,
        lines: NDArray[np.int64] | None,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        place: NDArray[np.int64],
        num_candidates: int,
    ) -> Drawn:
        """Draw a token at ``positions`` [n] of ``rows`` [n], which are places ``place`` of a speculation."""
        by_place = self._planner.plan.counts[Source.HIT, self._rows.lookahead, :-1]
        return self._drafter.draw(logits, lines, rows, positions, place, by_place, num_candidates)
