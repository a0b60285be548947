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
from speculator_service.publisher import Publisher
from speculator_service.rows import Rows
from speculator_service.saguaro.sources import Source
from speculator_service.statistics import Statistics, StepKind
from ssd_proto.trace import Trace


class StepMade(NamedTuple):
    """A model step."""

    kind: StepKind
    batch_size: int
    """Sequences it was for; 0 if the tables needed no model after all."""


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
    ) -> None:
        self._engine, self._rows, self._planner, self._drafter = engine, rows, planner, drafter
        self._publisher, self._statistics, self._chunk = publisher, statistics, prefill_chunk
        self._branches, self._trace = Branches(rows), trace
        self._prefilled_last = False

    def make_next(self) -> StepMade | None:
        """Make the most urgent step; None if there is none.

        First come speculations that verifiers wait for, then prompts and tables in turn.  A step synchronises with
        the device once: when what was drawn is copied to the host.
        """
        state = self._rows
        drafting, prompt = state.in_phase(Phase.DRAFT), state.next_prompt()
        forks = state.in_phase(Phase.FORK)
        has_table = len(forks) > 0 or bool((state.phase == Phase.TABLE).any())
        tables_turn = has_table and self._prefilled_last and not (prompt is not None and state.awaited[prompt] >= 0)
        self._prefilled_last = False
        if len(drafting):
            with self._trace.span("draft step", batch=len(drafting)):
                return StepMade(StepKind.DRAFT, self._draft(drafting))
        if prompt is not None and not tables_turn:
            with self._trace.span("prefill"):
                self._prefill(prompt)
            self._prefilled_last = True
            return StepMade(StepKind.PREFILL, 1)
        if has_table:
            with self._trace.span("table step"):
                return StepMade(StepKind.TABLE, self._build_tables(forks))
        return None

    def _draft(self, rows: NDArray[np.int64]) -> int:
        """One token of each just-in-time speculation; those that are complete are sent."""
        positions, tokens = self._rows.next_inputs(rows)
        with self._trace.span("model"):
            logits = self._engine.extend_one(rows, positions, tokens)
        place = positions + 1 - self._rows.committed[rows]
        num_candidates = self._planner.plan.num_candidates
        self._rows.extend(rows, self._draw(logits, rows, positions + 1, place, num_candidates))
        complete = self._rows.finish_chains(rows)
        if len(complete):
            self._publisher.reply(complete)
        return len(rows)

    def _prefill(self, row: int) -> None:
        state = self._rows
        start = int(state.computed[row])
        stop = min(start + self._chunk, int(state.committed[row]))
        with self._trace.span("model", tokens=stop - start):
            logits = self._engine.extend(row, start, state.text[row, start:stop])
        state.computed[row] = stop
        self._statistics.prefill_tokens += stop - start
        if stop < state.committed[row]:
            return
        rows = np.array([row])
        drawn = self._draw(logits[None], rows, np.array([stop]), np.zeros(1, np.int64), state.shape.max_candidates)
        state.finish_prompt(row, drawn, self._planner.plan.jit_depth)
        if state.phase[row] == Phase.FORK:
            self._publisher.reply(rows)

    def _build_tables(self, forks: NDArray[np.int64]) -> int:
        """One step of all tables that are not complete, after beginning those of ``forks``."""
        state = self._rows
        if len(forks):
            with self._trace.span("fork", tables=len(forks)):
                self._branches.fork(forks, self._planner.plan)
                self._publisher.begin(forks)
            self._statistics.tables += len(forks)
        rows = state.in_phase(Phase.TABLE)
        if not len(rows):
            return 0
        step = self._branches.next_step(rows)
        with self._trace.span("model", batch=len(rows), branches=int(step.live[:, 1:].sum())):
            logits = self._engine.step(step)
        with self._trace.span("draw"):
            drawn = self._drawn_in(step, logits)
        with self._trace.span("publish"):
            named, cells = self._branches.take_step(step, *drawn)
            if len(named):
                self._publisher.begin(named)
            self._publisher.write(cells)
        return len(rows)

    def _drawn_in(self, step: BranchStep, logits: torch.Tensor) -> tuple[Drawn, Drawn]:
        """What the live rows of a step draw, from ``logits`` [b, G, V]: trunks, and branches in the order of the step.

        The outcomes of a chain that the draft model did not make may all be at one position: those trunks keep more
        candidates.
        """
        state, (_, width) = self._rows, step.live.shape
        rows, flat = np.repeat(step.slots, width), logits.flatten(0, 1)
        positions = (step.prefix + step.depth + 1).ravel()
        place = step.depth.copy()
        place[:, 0] = step.prefix[:, 0] + 1 - state.committed[step.slots]
        place = place.ravel()
        drawn = self._draw(flat, rows, positions, place, self._planner.plan.num_candidates)
        live, is_trunk = step.live.ravel(), np.arange(len(rows)) % width == 0
        trunk = np.flatnonzero(live & is_trunk)
        trunks, wide = drawn.pick(trunk), state.source[rows[trunk]] >= Source.SUFFIX
        if wide.any():
            at = trunk[wide]
            index = torch.from_numpy(at).to(logits.device)
            more = self._draw(flat[index], rows[at], positions[at], place[at], state.shape.max_candidates)
            trunks = trunks.with_candidates(np.flatnonzero(wide), more.candidates)
        return trunks, drawn.pick(np.flatnonzero(live & ~is_trunk))

    def _draw(
        self,
        logits: torch.Tensor,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        place: NDArray[np.int64],
        num_candidates: int,
    ) -> Drawn:
        """Draw a token at ``positions`` [n] of ``rows`` [n], which are places ``place`` of a speculation."""
        lookahead = self._rows.lookahead
        fan_out = self._planner.plan.counts[Source.HIT, lookahead, np.clip(place, 0, lookahead - 1)]
        return self._drafter.draw(logits, rows, positions, fan_out, num_candidates)
