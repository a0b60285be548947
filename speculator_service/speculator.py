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
from speculator_service.backup.suffixes import Suffixes
from speculator_service.draft.base import DraftModel
from speculator_service.drafting import Drafter
from speculator_service.phase import Phase
from speculator_service.planner import Planner
from speculator_service.publisher import Publisher, reply_empty
from speculator_service.rows import Rows, RowShape
from speculator_service.saguaro.sources import Source
from speculator_service.sessions import NO_GENERATION, NO_ROW, Verifier, WaitingSequence
from speculator_service.statistics import OutcomeKind, Statistics
from speculator_service.steps import ModelSteps
from speculator_service.validation import are_tokens, are_valid, is_valid_open, later_of_each
from ssd_proto.errors import ChannelClosed, ProtocolError
from ssd_proto.records import NO_KEY, CloseSequence, Event, OpenSequence
from ssd_proto.trace import NO_TRACE, Trace

logger = logging.getLogger(__name__)

_EVENTS_AT_ONCE = 64
"""Of one verifier, so that none can keep the others waiting."""
_STEPS_WITHOUT_LEISURE = 50
"""Model steps after which planning does not wait any longer for a moment without any."""


class Speculator:
    """Speculates for the sequences of attached verifiers with ``engine``.

    Args:
        engine: used by this object only.
        planner: says what to prepare for, and which backup answers a miss; its lookahead is the engine's, its
            outcomes are the engine's branches.
        num_kept: m, probabilities sent of a sampled token's distribution; 0: nothing is sampled.
        temperature_factor: the draft's temperature over the request's.
        prefill_chunk: prompt tokens computed at a time; outcomes are looked at in between.
        clock: seconds, for the times that are measured.
    """

    def __init__(
        self,
        engine: DraftModel,
        planner: Planner,
        *,
        num_kept: int = 0,
        temperature_factor: float = 1.0,
        prefill_chunk: int = 256,
        trace: Trace = NO_TRACE,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        lookahead, num_outcomes = engine.lookahead, planner.num_outcomes
        if planner.plan.counts.shape[-1] != lookahead + 1 or num_outcomes > engine.num_branches:
            raise ValueError("the draft engine was built for another lookahead or fan-out")
        self.engine, self.planner, self.num_kept = engine, planner, num_kept
        self.statistics = Statistics(lookahead)
        self._chunk, self._clock, self._trace = prefill_chunk, clock, trace
        candidates = min(planner.max_candidates, engine.vocab_size)
        shape = RowShape(engine.max_slots, engine.context_length, lookahead, num_outcomes, candidates, num_kept)
        self._rows = Rows(shape)
        self._suffixes = Suffixes(self._rows)
        self._publisher = Publisher(self._rows)
        self._admission = Admission(engine, self._rows)
        drafter = Drafter(self._rows, num_kept, temperature_factor)
        self._steps = ModelSteps(
            engine, self._rows, planner, drafter, self._publisher, self.statistics, prefill_chunk, trace
        )
        self._steps_since_due = 0

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
            with self._trace.span("outcomes", batch=len(event)):
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
        downweight = self.planner.new_sequence()
        self._admission.enqueue(
            verifier, slot, WaitingSequence(event.generation, 0, tokens, event.sampling, downweight)
        )

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
        if verifier.answered_at is not None and len(slots):
            self.planner.verification_took(len(slots), self._clock() - verifier.answered_at)
        verifier.answered_at = None
        while len(repeated := later_of_each(slots)):  # one sequence twice in a batch: in the order of the batch
            first = np.setdiff1d(np.arange(len(slots)), repeated)
            self._take_one_of_each(verifier, outcomes[first], slots[first])
            outcomes, slots = outcomes[repeated], slots[repeated]
        self._take_one_of_each(verifier, outcomes, slots)
        self._note_answers()

    def _note_answers(self) -> None:
        """Note when a verifier has all its answers: its next verification begins about then."""
        owing = self._rows.owner[self._rows.awaited != NO_KEY]
        for verifier in self._publisher.verifiers:
            if verifier.answered_at is None and verifier.number not in owing:
                verifier.answered_at = self._clock()

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
            self._settle(rows[ready], outcomes[ready])
        ended = state.room(state.committed[rows]) == 0
        if ended.any():
            self._publisher.reply(rows[ended])
            self._admission.lose(verifier, state.slot[rows[ended]])
        for row in self._admission.reserve(rows[~ended]).tolist():
            self._publisher.reply(np.array([row]))
            self._admission.evict(verifier, row)

    def _settle(self, rows: NDArray[np.int64], outcomes: NDArray[np.void]) -> None:
        """Apply outcomes to rows whose prompt is computed, and answer those that need no model step."""
        state, planner = self._rows, self.planner
        fields = ("num_accepted", "bonus", "tokens", "num_sent")
        accepted, bonus, tokens, num_sent = (outcomes[name].astype(np.int64) for name in fields)
        settled = state.settle(rows, accepted, bonus, tokens, num_sent, planner.plan.jit_depth)
        hit = settled.adopted
        if hit.any():
            self.engine.adopt(rows[hit], settled.branch[hit], settled.prefix[hit], settled.finished[hit])
        self.statistics.count_outcomes(accepted, settled, state.phase[rows] == Phase.FORK)
        told = settled.verified & ~settled.stopped
        downweight = np.where(state.is_sampled[rows], state.downweight[rows], np.nan)
        planner.observe(
            settled.source[told],
            accepted[told],
            settled.num_sent[told],
            settled.rank[told],
            settled.num_known[told],
            downweight[told],
            hit[told],
        )
        missed = rows[~hit & ~settled.kept & ~settled.stopped]
        if len(missed):
            self._fall_back(missed, planner.choose_backup(len(rows), len(missed)))
        self._publisher.reply(rows[state.phase[rows] != Phase.DRAFT])

    def _fall_back(self, rows: NDArray[np.int64], backup: int) -> None:
        """Let ``backup`` answer the missed ``rows``; without a model the answer is there at once."""
        self.statistics.backups[backup] += len(rows)
        if backup == Source.SUFFIX:
            self._rows.give(rows, backup, *self._suffixes.propose(rows))
        elif backup == Source.EMPTY:
            nothing = np.zeros((len(rows), self._rows.lookahead), np.int64)
            self._rows.give(rows, backup, nothing, np.zeros(len(rows), np.int64))

    def _grow_prompts(
        self, rows: NDArray[np.int64], accepted: NDArray[np.int64], bonus: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> None:
        """Outcomes of rows whose prompt is not computed yet: more prompt. Nobody waits for more than one chunk."""
        state = self._rows
        state.commit(rows, accepted, bonus, tokens)
        late = rows[state.committed[rows] - state.computed[rows] > self._chunk]
        self._publisher.reply(late)
        self.statistics.outcomes[OutcomeKind.UNSERVED] += len(late)

    # -- model steps -------------------------------------------------------------------------------

    @torch.inference_mode()
    def advance(self) -> bool:
        """Make the most urgent model step and publish what it brought; False if there is nothing to do."""
        self._admission.admit_waiting()
        began = self._clock()
        made = self._steps.make_next()
        if made is None:
            self._plan_at_leisure()
            return False
        self._publisher.flush()
        seconds = self._clock() - began
        self.statistics.count_step(made.kind, seconds)
        self.planner.step_took(made.kind, made.batch_size, seconds)
        self._note_answers()
        self._plan_if_overdue()
        return True

    # -- planning ----------------------------------------------------------------------------------

    def _plan_at_leisure(self) -> None:
        """Plan anew if that is due; the model has nothing to do."""
        if self.planner.is_due():
            self.planner.replan()
            self._steps_since_due = 0

    def _plan_if_overdue(self) -> None:
        """Plan anew if that has been due for long without a moment of leisure."""
        if self.planner.is_due():
            self._steps_since_due += 1
            if self._steps_since_due > _STEPS_WITHOUT_LEISURE:
                self._plan_at_leisure()
