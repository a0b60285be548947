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

from speculator_service.admission import Admission
from speculator_service.draft.base import DraftModel
from speculator_service.drafting import Drafter
from speculator_service.outcomes import Outcomes
from speculator_service.phase import Phase
from speculator_service.planner import Planner
from speculator_service.prefixes import PrefixCache
from speculator_service.publisher import Publisher
from speculator_service.rows import Rows, RowShape
from speculator_service.sessions import NO_GENERATION, Verifier, WaitingSequence
from speculator_service.statistics import Statistics
from speculator_service.steps import ModelSteps
from speculator_service.validation import are_tokens, is_valid_open
from ssd_proto.errors import ChannelClosed, ProtocolError
from ssd_proto.records import CloseSequence, Event, OpenSequence
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
        self._clock, self._trace = clock, trace
        candidates = min(planner.max_candidates, engine.vocab_size)
        shape = RowShape(engine.max_slots, engine.context_length, lookahead, num_outcomes, candidates, num_kept)
        self._rows = Rows(shape)
        self._publisher = Publisher(self._rows)
        self._prefixes = PrefixCache(engine, self._rows)
        self._admission = Admission(engine, self._rows, self._prefixes, self.statistics)
        self._outcomes = Outcomes(
            engine, self._rows, planner, self._publisher, self._admission, self.statistics, prefill_chunk, clock
        )
        drafter = Drafter(self._rows, num_kept, temperature_factor, engine.token_map)
        self._steps = ModelSteps(
            engine, self._rows, planner, drafter, self._publisher, self.statistics, prefill_chunk, trace, self._prefixes
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
    def num_free_cells(self) -> int:
        """KV cells that no open sequence holds."""
        return self.engine.free_tokens + self._prefixes.num_kept

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
                self._outcomes.take(verifier, event)

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
        self.planner.step_took(made.kind, made.batch_size, seconds, made.num_rows)
        self._outcomes.note_answers()
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
