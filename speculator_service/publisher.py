"""Writes speculations of engine rows to the channels of the verifiers that own them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from speculator_service.branches import Cells
from speculator_service.rows import Rows
from speculator_service.sessions import Verifier
from ssd_proto.records import NO_KEY, DraftProbs, Entries, outcome_keys


class Publisher:
    """All methods take rows of any verifiers; each verifier costs one call whatever its number of rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._verifiers: dict[int, Verifier] = {}

    @property
    def verifiers(self) -> list[Verifier]:
        """Attached verifiers."""
        return list(self._verifiers.values())

    def add(self, verifier: Verifier) -> None:
        """Publish to ``verifier`` from now on."""
        self._verifiers[verifier.number] = verifier

    def remove(self, verifier: Verifier) -> None:
        """Publish no more to ``verifier``; its rows must be free already."""
        self._verifiers.pop(verifier.number, None)

    def flush(self) -> None:
        """Send what was published (channels without shared memory)."""
        for verifier in self._verifiers.values():
            verifier.channel.flush()

    def begin(self, rows: NDArray[np.int64]) -> None:
        """Name the outcomes of the tables of ``rows``, as far as they are known."""
        state = self._rows
        for verifier, pick in self._by_verifier(rows):
            mine = rows if pick is None else rows[pick]
            verifier.channel.begin(state.slot[mine], state.round[mine], state.keys.take(mine, 0))

    def write(self, cells: Cells) -> None:
        """Publish table cells that a step has finished."""
        state = self._rows
        rows, columns, depths, keys, is_final, tokens = cells
        if not len(rows):
            return
        stamp = state.slot[rows], state.generation[rows], state.round[rows]
        entries = Entries(*stamp, columns, keys, depths, is_final, tokens)
        self._write(rows, entries, state.branch_q, (rows, columns))

    def reply(self, rows: NDArray[np.int64]) -> None:
        """Answer the outcomes that ``rows`` owe a reply for with their chains; rows that owe none are left alone."""
        state = self._rows
        rows = rows[state.awaited[rows] != NO_KEY]
        if not len(rows):
            return
        entries = Entries(
            state.slot[rows],
            state.generation[rows],
            state.round[rows] - 1,
            np.full(len(rows), state.shape.num_outcomes),
            state.awaited[rows],
            state.depth[rows],
            np.ones(len(rows), bool),
            state.chains(rows),
        )
        self._write(rows, entries, state.q, (rows,))
        state.awaited[rows] = NO_KEY

    def _write(
        self,
        rows: NDArray[np.int64],
        entries: Entries,
        q: NDArray[np.int64],
        at: tuple[NDArray[np.int64], ...],
    ) -> None:
        """Publish ``entries`` [n] of ``rows`` [n]; those of sampled rows with ``q[at]`` [n, K, m]."""
        for verifier, pick in self._by_verifier(rows):
            if not self._rows.any_sampled:
                verifier.channel.write(entries if pick is None else entries.pick(pick))
                continue
            is_sampled = self._rows.is_sampled[rows] > 0
            mine = np.ones(len(rows), bool) if pick is None else pick
            plain, sampled = mine & ~is_sampled, mine & is_sampled
            if plain.any():
                verifier.channel.write(entries.pick(plain))
            if sampled.any():
                probs = DraftProbs(rows[sampled], q[tuple(index[sampled] for index in at)])
                verifier.channel.write(entries.pick(sampled)._replace(q=probs))

    def _by_verifier(self, rows: NDArray[np.int64]) -> Iterator[tuple[Verifier, NDArray[np.bool_] | None]]:
        """Verifiers that own ``rows`` [n], and which they own; None: all of them."""
        owner = self._rows.owner[rows]
        numbers = set(owner.tolist())
        for number in numbers:
            yield self._verifiers[number], owner == number if len(numbers) > 1 else None


def reply_empty(verifier: Verifier, outcomes: NDArray[np.void]) -> None:
    """Answer ``outcomes`` [n] of one verifier with empty speculations, so that it does not wait for a deadline."""
    count = len(outcomes)
    verifier.channel.write(
        Entries(
            outcomes["slot"],
            outcomes["generation"],
            outcomes["round"],
            np.full(count, verifier.shape.num_outcomes),
            outcome_keys(outcomes["num_accepted"], outcomes["bonus"]),
            np.zeros(count, np.int64),
            np.ones(count, bool),
            np.zeros((count, verifier.shape.lookahead), np.int64),
        )
    )
