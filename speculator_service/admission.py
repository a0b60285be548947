"""Who gets a row of the draft engine, and room for its KV."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from speculator_service.draft.base import DraftModel
from speculator_service.prefixes import PrefixCache
from speculator_service.rows import Rows
from speculator_service.sessions import NO_ROW, Verifier, WaitingSequence
from speculator_service.statistics import Statistics
from ssd_proto.records import Sampling

_RESERVE_AHEAD = 128
"""Trunk positions asked for at a time, so that most rounds ask for none."""


class Admission:
    """Gives rows to sequences, first come, first served; one that does not fit does not hold up the others."""

    def __init__(self, engine: DraftModel, rows: Rows, prefixes: PrefixCache, statistics: Statistics) -> None:
        self._engine, self._rows, self._prefixes, self._statistics = engine, rows, prefixes, statistics
        self._queue: dict[tuple[int, int], Verifier] = {}  # (verifier number, slot) in order of arrival
        self._room_changed = False
        self._sampling: dict[int, Sampling] = {}  # by row, as it was asked for

    @property
    def num_waiting(self) -> int:
        """Sequences without row."""
        return len(self._queue)

    def enqueue(self, verifier: Verifier, slot: int, sequence: WaitingSequence) -> None:
        """Serve a sequence as soon as there is room, at once if possible. One too long for the draft is lost."""
        if len(sequence.tokens) >= self._rows.context_length or self._admit(verifier, slot, sequence):
            return
        verifier.waiting[slot] = sequence
        self._queue[verifier.number, slot] = verifier

    def admit_waiting(self) -> None:
        """Give room that has become free since the last call to those who wait."""
        if not self._room_changed:
            return
        self._room_changed = False
        for (number, slot), verifier in list(self._queue.items()):
            if self._admit(verifier, slot, verifier.waiting[slot]):
                del verifier.waiting[slot], self._queue[number, slot]

    def follow(self, verifier: Verifier, slot: int, outcome: np.void) -> bool:
        """Take the tokens of a valid outcome of a waiting sequence; False if it is none, or not in its next round."""
        sequence = verifier.waiting.get(slot)
        if sequence is None or sequence.round != outcome["round"]:
            return False
        new = np.append(outcome["tokens"][: outcome["num_accepted"]], outcome["bonus"])
        sequence.tokens = np.concatenate([sequence.tokens, new.astype(np.int64)])
        sequence.round += 1
        if len(sequence.tokens) >= self._rows.context_length:
            self.lose(verifier, np.array([slot]))
        return True

    def lose(self, verifier: Verifier, slots: NDArray[np.int64]) -> None:
        """Give back what sequences hold and serve them no more. They stay open."""
        rows = verifier.row[slots]
        rows = rows[rows != NO_ROW]
        self._room_changed |= len(rows) > 0
        self._rows.vacate(rows)
        self._prefixes.keep(rows)
        verifier.row[slots] = NO_ROW
        for slot in verifier.waiting.keys() & set(slots.tolist()):
            del verifier.waiting[slot], self._queue[verifier.number, slot]

    def reserve(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Make room for the next round of ``rows``; returns those for which there is none."""
        state = self._rows
        span = state.span(state.committed[rows])
        short = span > state.reserved[rows]
        failed = [
            row
            for row, need in zip(rows[short].tolist(), span[short].tolist(), strict=True)
            if not self._grow(row, need)
        ]
        return np.array(failed, np.int64)

    def evict(self, verifier: Verifier, row: int) -> None:
        """Take its row from a sequence, which waits for another one. There was no room: nothing is kept."""
        state, slot = self._rows, int(self._rows.slot[row])
        text = state.text[row, : state.committed[row]].copy()
        generation, round_ = int(state.generation[row]), int(state.round[row])
        sampling, downweight = self._sampling[row], float(state.downweight[row])
        sequence = WaitingSequence(generation, round_, text, sampling, downweight)
        self.lose(verifier, np.array([slot]))
        self._prefixes.forget(row)
        verifier.waiting[slot] = sequence
        self._queue[verifier.number, slot] = verifier

    def _admit(self, verifier: Verifier, slot: int, sequence: WaitingSequence) -> bool:
        found = self._prefixes.take_row(sequence.tokens)
        if found is None:
            return False
        row, num_computed = found
        span = int(self._rows.span(len(sequence.tokens)))
        if not self._reserve(row, span):
            self._prefixes.forget(row)
            return False
        self._rows.occupy(row, verifier.number, slot, sequence.generation, sequence.round, sequence.tokens)
        self._rows.computed[row] = num_computed
        self._statistics.prefill_tokens_shared += num_computed
        self._rows.sample_like(row, sequence.sampling, sequence.downweight)
        self._rows.reserved[row] = span
        self._sampling[row] = sequence.sampling
        verifier.row[slot] = row
        return True

    def _grow(self, row: int, need: int) -> bool:
        ahead = min(need + _RESERVE_AHEAD, self._rows.context_length)
        for length, reserve in ((ahead, self._engine.reserve), (need, self._reserve)):
            if reserve(row, length):
                self._rows.reserved[row] = length
                return True
        return False

    def _reserve(self, row: int, length: int) -> bool:
        """As the engine's, if need be at the cost of what ended sequences keep, but not in vain."""
        engine = self._engine
        if engine.reserve(row, length):
            return True
        wanted = length + engine.num_branches * engine.lookahead - engine.held_tokens(row)
        if wanted > engine.free_tokens + self._prefixes.num_kept:
            return False
        while self._prefixes.reclaim():
            if engine.reserve(row, length):
                return True
        return False
