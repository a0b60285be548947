"""Outcomes of verifications: what they do to the sequences, and their answers where no model step is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speculator_service import outcome_batch
from speculator_service.admission import Admission
from speculator_service.backup.suffixes import Suffixes
from speculator_service.draft.base import DraftModel
from speculator_service.outcome_batch import OutcomeBatch, judge
from speculator_service.phase import Phase
from speculator_service.planner import Planner
from speculator_service.publisher import Publisher, reply_empty
from speculator_service.round_times import RoundTimes
from speculator_service.rows import Rows, Settled
from speculator_service.saguaro.sources import Source
from speculator_service.sessions import NO_ROW, Verifier
from speculator_service.statistics import OutcomeKind, Statistics
from speculator_service.ways import Way
from ssd_proto.records import NO_KEY


class Outcomes:
    """Takes the outcomes of all verifiers; arguments as those of `Speculator`, whose parts it uses."""

    def __init__(
        self,
        engine: DraftModel,
        rows: Rows,
        planner: Planner,
        publisher: Publisher,
        admission: Admission,
        statistics: Statistics,
        prefill_chunk: int,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._rows, self._planner, self._publisher = engine, rows, planner, publisher
        self._admission, self._statistics, self._chunk, self._clock = admission, statistics, prefill_chunk, clock
        self._way, self._is_sampled = Way.AHEAD, False
        """Of the batch at hand: how far it is speculated for, and whether most of it is drawn with a temperature."""
        self._suffixes = Suffixes(rows)
        outcome_batch.prepare()

    def take(self, verifier: Verifier, outcomes: NDArray[np.void]) -> None:
        """Take a batch of ``outcomes`` (`outcome_dtype`) of ``verifier``."""
        batch = OutcomeBatch.of(outcomes)
        turn, is_valid = judge(batch, verifier.generation, self._engine.vocab_size)
        count, last_turn = _count(turn >= 0), int(turn.max(initial=0))
        self._statistics.stale += len(turn) - count
        now, hits = self._clock(), self._statistics.outcomes[OutcomeKind.HIT]
        if count:
            self._begin_round(verifier, batch if count == len(turn) else batch.pick(turn >= 0), now)
        verifier.taken_at, verifier.answered_at = now, None
        if count == len(turn) and last_turn == 0:
            self._take_one_of_each(verifier, batch, is_valid)
        else:
            for number in range(last_turn + 1):  # one sequence twice in a batch: in the order of the batch
                mine = turn == number
                self._take_one_of_each(verifier, batch.pick(mine), is_valid[mine])
        verifier.all_hit = self._statistics.outcomes[OutcomeKind.HIT] - hits == count
        self.note_answers()

    def _begin_round(self, verifier: Verifier, batch: OutcomeBatch, now: float) -> None:
        """Have the planner learn from the round that ended with a batch, and say how the next one goes on."""
        is_decoded = bool(batch.rounds.min() > 0)
        if verifier.answered_at is not None:
            verification = now - verifier.answered_at
            is_plain = is_decoded and int(batch.num_sent.max()) == 0
            self._planner.verification_took(len(batch.slots), verification, is_plain)
            if is_decoded:
                self._statistics.count_round(verifier.all_hit, verifier.answered_at - verifier.taken_at, verification)
                self._tell_duration(verifier, batch, now)
        if is_decoded:  # first tokens after prompts join a batch that is decided about with its own outcomes
            rows = verifier.row[batch.slots]
            is_sampled = 2 * _count(self._rows.temperature[rows[rows != NO_ROW]] > 0) > len(rows)
            verifier.decision = self._planner.decide(len(rows), is_sampled)
        if (decision := verifier.decision) is not None:
            self._way, self._is_sampled = decision.way, decision.is_sampled
        else:
            self._way, self._is_sampled = Way.AHEAD, False

    def _tell_duration(self, verifier: Verifier, batch: OutcomeBatch, now: float) -> None:
        """Tell the planner how long the round took, if it was the one that was decided about."""
        count, decision = len(batch.slots), verifier.decision
        if decision is not None and RoundTimes.bucket(decision.batch_size) == RoundTimes.bucket(count):
            rows = verifier.row[batch.slots]
            source = np.where(rows == NO_ROW, Source.EMPTY, self._rows.source[rows])
            self._planner.round_took(decision, source, batch.accepted, batch.num_sent, now - verifier.taken_at)

    def note_answers(self) -> None:
        """Note when a verifier has all its answers: its next verification begins about then."""
        waiting = [verifier for verifier in self._publisher.verifiers if verifier.answered_at is None]
        if waiting:
            owing = set(self._rows.owner[self._rows.awaited != NO_KEY].tolist())
            for verifier in waiting:
                if verifier.number not in owing:
                    verifier.answered_at = self._clock()

    def _take_one_of_each(self, verifier: Verifier, batch: OutcomeBatch, is_valid: NDArray[np.bool_]) -> None:
        """Take outcomes of different open sequences."""
        rows = verifier.row[batch.slots]
        has_row = rows != NO_ROW
        is_valid = is_valid & (~has_row | (self._rows.round[rows] == batch.rounds))
        is_served = is_valid & has_row
        if _count(is_served) == len(rows):
            self._serve(verifier, rows, batch)
            return
        self._serve(verifier, rows[is_served], batch.pick(is_served))
        self._serve_without_row(verifier, batch.records[~is_served], is_valid[~is_served])

    def _serve_without_row(self, verifier: Verifier, outcomes: NDArray[np.void], valid: NDArray[np.bool_]) -> None:
        """Answer sequences that wait, are lost, or become lost because of this outcome."""
        for outcome, is_valid in zip(outcomes, valid.tolist(), strict=True):
            slot = int(outcome["slot"])
            is_open = slot in verifier.waiting or verifier.row[slot] != NO_ROW
            if is_open and not (is_valid and self._admission.follow(verifier, slot, outcome)):
                self._statistics.invalid += 1
                self._admission.lose(verifier, np.array([slot]))
        self._statistics.outcomes[OutcomeKind.UNSERVED] += len(outcomes)
        reply_empty(verifier, outcomes)

    def _serve(self, verifier: Verifier, rows: NDArray[np.int64], batch: OutcomeBatch) -> None:
        """Apply valid outcomes to the rows of their sequences and answer those that need no model step."""
        if not len(rows):
            return
        state = self._rows
        in_prompt = (state.phase[rows] == Phase.PREFILL) | (state.phase[rows] == Phase.REST)
        if num_in_prompt := _count(in_prompt):
            self._grow_prompts(rows[in_prompt], batch.pick(in_prompt))
        if num_in_prompt == 0:
            self._settle(rows, batch)
        elif num_in_prompt < len(rows):
            self._settle(rows[~in_prompt], batch.pick(~in_prompt))
        has_ended = state.committed[rows] >= state.context_length
        if _count(has_ended):
            self._publisher.reply(rows[has_ended])
            self._admission.lose(verifier, state.slot[rows[has_ended]])
            rows = rows[~has_ended]
        for row in self._admission.reserve(rows).tolist():
            self._publisher.reply(np.array([row]))
            self._admission.evict(verifier, row)

    def _settle(self, rows: NDArray[np.int64], batch: OutcomeBatch) -> None:
        """Apply outcomes to rows whose prompt is computed, and answer those that need no model step."""
        state, planner = self._rows, self._planner
        accepted = batch.accepted
        had_table, has_table = state.has_table[rows], self._way is Way.AHEAD
        state.has_table[rows] = has_table
        jit_depth = planner.plan_for(has_table).jit_depth
        settled = state.settle(rows, accepted, batch.bonus, batch.tokens, batch.num_sent, jit_depth)
        hit, is_stopped = settled.adopted, settled.stopped
        if num_hits := _count(hit):
            adopted = rows, settled.branch, settled.prefix, settled.finished
            self._engine.adopt(*(adopted if num_hits == len(rows) else (array[hit] for array in adopted)))
        phase = state.phase[rows]
        self._statistics.count_outcomes(accepted, settled, phase == Phase.FORK)
        told = settled.verified & ~is_stopped
        self._tell_planner(rows, batch, settled, had_table, told)
        if num_hits < len(rows):
            missed = rows[~(hit | settled.kept | is_stopped)]
            if len(missed):
                self._fall_back(missed, planner.choose_backup(len(rows), len(missed), self._way))
                phase = state.phase[rows]
        if self._way is Way.REST:
            self._publisher.reply(rows)  # with what is prepared, as far as it is: nothing more is drafted
            state.rest(rows)
        else:
            self._publisher.reply(rows[phase != Phase.DRAFT])

    def _tell_planner(
        self,
        rows: NDArray[np.int64],
        batch: OutcomeBatch,
        settled: Settled,
        had_table: NDArray[np.bool_],
        told: NDArray[np.bool_],
    ) -> None:
        """Count the outcomes ``told`` [b], and have the planner learn from them."""
        state = self._rows
        downweight = np.where(state.is_sampled[rows], state.downweight[rows], np.nan)
        columns: list[NDArray[Any]] = [batch.rounds, settled.source, batch.accepted, settled.num_sent]
        columns += [settled.rank, settled.num_known, downweight, settled.adopted, had_table]
        if _count(told) < len(rows):
            columns = [column[told] for column in columns]
        rounds, source, accepted, *others = columns
        self._planner.observe(source, accepted, *others, is_sampled=self._is_sampled)
        decoded = rounds > 0
        self._statistics.count_verified(source[decoded], accepted[decoded])

    def _fall_back(self, rows: NDArray[np.int64], backup: int) -> None:
        """Let ``backup`` answer the missed ``rows``; without a model the answer is there at once."""
        self._statistics.backups[backup] += len(rows)
        if backup == Source.SUFFIX:
            self._rows.give(rows, backup, *self._suffixes.propose(rows))
        elif backup == Source.EMPTY:
            nothing = np.zeros((len(rows), self._rows.lookahead), np.int64)
            self._rows.give(rows, backup, nothing, np.zeros(len(rows), np.int64))

    def _grow_prompts(self, rows: NDArray[np.int64], batch: OutcomeBatch) -> None:
        """Outcomes of rows whose text is not computed yet: more of it. Nobody waits for more than one chunk.

        Nor after a rest, which as a rule ends for many rows at once.
        """
        state = self._rows
        state.commit(rows, batch.accepted, batch.bonus, batch.tokens)
        state.has_table[rows] = self._way is Way.AHEAD
        if self._way is Way.REST:
            self._publisher.reply(rows)
            state.rest(rows)
            self._statistics.outcomes[OutcomeKind.RESTED] += len(rows)
            return
        is_late = state.committed[rows] - state.computed[rows] > self._chunk
        late = rows[is_late | (state.phase[rows] == Phase.REST)]
        state.wake(rows)
        self._publisher.reply(late)
        self._statistics.outcomes[OutcomeKind.UNSERVED] += len(late)


def _count(flags: NDArray[np.bool_]) -> int:
    """How many are true: with numpy a fraction of the time of `any` or `all`."""
    return int(np.count_nonzero(flags))
