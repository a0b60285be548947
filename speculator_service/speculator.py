"""The speculator: follows the sequences of all verifiers, answers outcomes and prepares for the next ones.

One thread uses it, alternating `poll` (take what the verifiers posted: host work only, hits are answered at
once) and `advance` (one step of the draft model).  So an outcome is never late by more than one step, and a newer
outcome makes older work for its sequence void wherever it stands.

A sequence is served by a row of the draft engine, or waits for one; while it waits its outcomes are answered with
empty speculations.  Whatever a verifier sends costs at most the speculation of its own sequences.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from speculator_service.admission import Admission
from speculator_service.draft.base import DraftModel
from speculator_service.phase import Phase
from speculator_service.publisher import Publisher, reply_empty
from speculator_service.rows import Rows
from speculator_service.saguaro.fan_out import FanOut
from speculator_service.saguaro.outcomes import top_candidates
from speculator_service.sessions import NO_GENERATION, NO_ROW, Verifier, WaitingSequence
from speculator_service.statistics import OutcomeKind, Statistics, StepKind
from speculator_service.validation import are_tokens, are_valid, is_valid_open, later_of_each
from ssd_proto.errors import ChannelClosed, ProtocolError
from ssd_proto.records import NO_KEY, CloseSequence, Event, OpenSequence

logger = logging.getLogger(__name__)

_EVENTS_AT_ONCE = 64
"""Of one verifier, so that none can keep the others waiting."""


class Speculator:
    """Speculates for the sequences of attached verifiers with ``engine``.

    Args:
        engine: used by this object only.
        fan_out: its lookahead is the engine's, its outcomes are the engine's branches.
        prefill_chunk: prompt tokens computed at a time; outcomes are looked at in between.
        clock: seconds, for the step times in ``statistics``.
    """

    def __init__(
        self,
        engine: DraftModel,
        fan_out: FanOut,
        prefill_chunk: int = 256,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if fan_out.lookahead != engine.lookahead or fan_out.num_outcomes > engine.num_branches:
            raise ValueError("the draft engine was built for another lookahead or fan-out")
        self.engine, self.fan_out = engine, fan_out
        self.statistics = Statistics(fan_out.lookahead)
        self._chunk, self._clock = prefill_chunk, clock
        self._rows = Rows(engine.max_slots, engine.context_length, engine.vocab_size, fan_out)
        self._publisher = Publisher(self._rows)
        self._admission = Admission(engine, self._rows)
        self._prefilled_last = False

    # -- verifiers ---------------------------------------------------------------------------------

    @property
    def verifiers(self) -> list[Verifier]:
        """Attached verifiers."""
        return self._publisher.verifiers

    @property
    def num_served(self) -> int:
        """Engine rows in use."""
        return int((self._rows.phase != Phase.FREE).sum())

    @property
    def num_waiting(self) -> int:
        """Open sequences for which there is no room."""
        return self._admission.num_waiting

    def attach(self, verifier: Verifier) -> None:
        """Serve ``verifier`` from now on; its channel is closed by `detach`."""
        self._publisher.add(verifier)

    def detach(self, verifier: Verifier) -> None:
        """Forget ``verifier`` with all its sequences and close its channel. May be called twice."""
        if not verifier.attached:
            return
        verifier.attached = False
        self._admission.lose(verifier, np.arange(verifier.max_slots))
        verifier.generation[:] = NO_GENERATION
        self._publisher.remove(verifier)
        verifier.channel.close()

    # -- events ------------------------------------------------------------------------------------

    def pending(self) -> bool:
        """Whether `poll` would find something: events, or a channel that is of no further use."""
        try:
            return any(verifier.channel.pending() for verifier in self._publisher.verifiers)
        except (ProtocolError, ChannelClosed):
            return True  # `poll` meets the same error and gives that verifier up

    @torch.inference_mode()
    def poll(self) -> bool:
        """Take the events that were posted; returns whether there were any.

        A verifier that sends what cannot be understood, or is gone, is detached.
        """
        any_event = False
        for verifier in self._publisher.verifiers:
            try:
                for _ in range(_EVENTS_AT_ONCE):
                    event = verifier.channel.poll()
                    if event is None:
                        break
                    any_event = True
                    self._handle(verifier, event)
            except (ProtocolError, ChannelClosed) as error:
                logger.warning("giving up verifier %s: %s", verifier.name, error)
                self.statistics.channel_errors += 1
                self.detach(verifier)
        if any_event:
            self._publisher.flush()
        return any_event

    def _handle(self, verifier: Verifier, event: Event) -> None:
        if isinstance(event, OpenSequence):
            self._open(verifier, event)
        elif isinstance(event, CloseSequence):
            self._close(verifier, event)
        else:
            self._take_outcomes(verifier, event)

    def _open(self, verifier: Verifier, event: OpenSequence) -> None:
        slot, tokens = event.slot, np.asarray(event.tokens, np.int64)
        if not is_valid_open(event, verifier.max_slots):
            self.statistics.invalid += 1
            return
        self._admission.lose(verifier, np.array([slot]))
        verifier.generation[slot] = event.generation
        self.statistics.opened += 1
        if not are_tokens(tokens, self.engine.vocab_size):
            self.statistics.invalid += 1  # lost: answered with empty speculations
            return
        self._admission.enqueue(verifier, slot, WaitingSequence(event.generation, 0, tokens))

    def _close(self, verifier: Verifier, event: CloseSequence) -> None:
        slot = event.slot
        if not 0 <= slot < verifier.max_slots or verifier.generation[slot] != event.generation:
            self.statistics.stale += 1
            return
        self._admission.lose(verifier, np.array([slot]))
        verifier.generation[slot] = NO_GENERATION
        self.statistics.closed += 1

    # -- outcomes ----------------------------------------------------------------------------------

    def _take_outcomes(self, verifier: Verifier, outcomes: NDArray[np.void]) -> None:
        slots = outcomes["slot"].astype(np.int64)
        known = (slots >= 0) & (slots < verifier.max_slots)
        known[known] = verifier.generation[slots[known]] == outcomes["generation"][known]
        known &= outcomes["generation"] >= 0
        if not known.all():
            self.statistics.stale += int((~known).sum())
            outcomes, slots = outcomes[known], slots[known]
        while len(repeated := later_of_each(slots)):  # one sequence twice in a batch: in the order of the batch
            first = np.setdiff1d(np.arange(len(slots)), repeated)
            self._take_one_of_each(verifier, outcomes[first], slots[first])
            outcomes, slots = outcomes[repeated], slots[repeated]
        self._take_one_of_each(verifier, outcomes, slots)

    def _take_one_of_each(self, verifier: Verifier, outcomes: NDArray[np.void], slots: NDArray[np.int64]) -> None:
        valid = are_valid(outcomes, self.engine.vocab_size)
        rows = verifier.row[slots]
        served = rows != NO_ROW
        valid[served] &= self._rows.round[rows[served]] == outcomes["round"][served]
        self._serve(verifier, rows[valid & served], outcomes[valid & served])
        if not (valid & served).all():
            self._serve_without_row(verifier, outcomes[~(valid & served)], valid[~(valid & served)])

    def _serve_without_row(self, verifier: Verifier, outcomes: NDArray[np.void], valid: NDArray[np.bool_]) -> None:
        """Answer sequences that wait, are lost, or become lost because of this outcome."""
        for outcome, is_valid in zip(outcomes, valid.tolist(), strict=True):
            slot = int(outcome["slot"])
            is_open = slot in verifier.waiting or verifier.row[slot] != NO_ROW
            if is_open and not (is_valid and self._admission.follow(verifier, slot, outcome)):
                self.statistics.invalid += 1
                self._admission.lose(verifier, np.array([slot]))
        self.statistics.outcomes[OutcomeKind.UNSERVED] += len(outcomes)
        reply_empty(verifier, outcomes)

    def _serve(self, verifier: Verifier, rows: NDArray[np.int64], outcomes: NDArray[np.void]) -> None:
        """Apply valid outcomes to the rows of their sequences and answer those that need no model step."""
        if not len(rows):
            return
        state = self._rows
        accepted, bonus, tokens = (outcomes[name].astype(np.int64) for name in ("num_accepted", "bonus", "tokens"))
        in_prompt = state.phase[rows] == Phase.PREFILL
        ready = ~in_prompt
        if in_prompt.any():
            self._grow_prompts(rows[in_prompt], accepted[in_prompt], bonus[in_prompt], tokens[in_prompt])
        if ready.any():
            settled = state.settle(rows[ready], accepted[ready], bonus[ready], tokens[ready])
            hit = settled.adopted
            if hit.any():
                self.engine.adopt(rows[ready][hit], settled.branch[hit], settled.prefix[hit], settled.finished[hit])
            complete = state.phase[rows[ready]] == Phase.FORK
            self.statistics.count_outcomes(accepted[ready], settled, complete)
            self._publisher.reply(rows[ready][complete])
        ended = state.room(state.committed[rows]) == 0
        if ended.any():
            self._publisher.reply(rows[ended])
            self._admission.lose(verifier, state.slot[rows[ended]])
        for row in self._admission.reserve(rows[~ended]).tolist():
            self._publisher.reply(np.array([row]))
            self._admission.evict(verifier, row)

    def _grow_prompts(
        self, rows: NDArray[np.int64], accepted: NDArray[np.int64], bonus: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> None:
        """Outcomes of rows whose prompt is not computed yet: more prompt. Nobody waits for more than one chunk."""
        state = self._rows
        state.commit(rows, accepted, bonus, tokens)
        late = rows[state.committed[rows] - state.computed[rows] > self._chunk]
        self._publisher.reply(late)
        state.awaited[late] = NO_KEY
        self.statistics.outcomes[OutcomeKind.UNSERVED] += len(late)

    # -- model steps -------------------------------------------------------------------------------

    @torch.inference_mode()
    def advance(self) -> bool:
        """Make the most urgent model step and publish what it brought; False if there is nothing to do.

        First come speculations that verifiers wait for, then prompts and tables in turn.  A step
        synchronises with the device once: when the candidates are copied to the host.
        """
        self._admission.admit_waiting()
        state, began = self._rows, self._clock()
        drafting, prompt = state.in_phase(Phase.DRAFT), state.next_prompt()
        forks = state.in_phase(Phase.FORK)
        has_table = len(forks) > 0 or bool((state.phase == Phase.TABLE).any())
        tables_turn = has_table and self._prefilled_last and not (prompt is not None and state.awaited[prompt] >= 0)
        if len(drafting):
            self._draft(drafting)
            kind = StepKind.DRAFT
        elif prompt is not None and not tables_turn:
            self._prefill(prompt)
            kind = StepKind.PREFILL
        elif has_table:
            self._build_tables(forks)
            kind = StepKind.TABLE
        else:
            return False
        self._prefilled_last = kind == StepKind.PREFILL
        self._publisher.flush()
        self.statistics.count_step(kind, self._clock() - began)
        return True

    def _draft(self, rows: NDArray[np.int64]) -> None:
        """One token of each just-in-time speculation; those that are complete are sent."""
        positions, tokens = self._rows.next_inputs(rows)
        logits = self.engine.extend_one(rows, positions, tokens)
        complete = self._rows.extend_chains(rows, top_candidates(logits, self._rows.num_candidates))
        if len(complete):
            self._publisher.reply(complete)

    def _prefill(self, row: int) -> None:
        state = self._rows
        start = int(state.computed[row])
        stop = min(start + self._chunk, int(state.committed[row]))
        logits = self.engine.extend(row, start, state.text[row, start:stop])
        state.computed[row] = stop
        self.statistics.prefill_tokens += stop - start
        if stop < state.committed[row]:
            return
        count = max(self._rows.num_candidates, self.fan_out.num_outcomes)
        if state.finish_prompt(row, top_candidates(logits, count)):
            self._publisher.reply(np.array([row]))
        if state.phase[row] == Phase.TABLE:
            self._publisher.begin(np.array([row]))
            self.statistics.tables += 1

    def _build_tables(self, forks: NDArray[np.int64]) -> None:
        """One step of all tables that are not complete, after beginning those of ``forks``."""
        state = self._rows
        if len(forks):
            state.fork(forks)
            self._publisher.begin(forks)
            self.statistics.tables += len(forks)
        rows = state.in_phase(Phase.TABLE)
        if not len(rows):
            return
        step = state.next_step(rows)
        top = top_candidates(self.engine.step(step), state.num_candidates)
        glued, entries = state.take_step(step, top)
        if len(glued) and self.fan_out.counts[-1]:
            self._publisher.add_late_keys(glued)
        self._publisher.write(entries)
