"""Writes speculations of engine rows to the channels of the verifiers that own them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from speculator_service.rows import Rows, TableEntries
from speculator_service.sessions import Verifier
from ssd_proto.records import NO_KEY, outcome_keys


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
        """Start the tables of ``rows``."""
        state = self._rows
        for verifier, pick in self._by_verifier(rows):
            mine = rows[pick]
            verifier.channel.begin(state.slot[mine], state.round[mine], state.keys[mine])

    def add_late_keys(self, rows: NDArray[np.int64]) -> None:
        """Name the outcomes with k = K of ``rows``."""
        state, first = self._rows, self._rows.fan_out.first_late
        for verifier, pick in self._by_verifier(rows):
            mine = rows[pick]
            verifier.channel.add_keys(state.slot[mine], state.round[mine], first, state.keys[mine, first:])

    def write(self, entries: TableEntries) -> None:
        """Publish table cells that a step has finished."""
        state = self._rows
        for verifier, pick in self._by_verifier(entries.rows):
            mine, column = entries.rows[pick], entries.columns[pick]
            verifier.channel.write(
                state.slot[mine],
                state.generation[mine],
                state.round[mine],
                column,
                state.keys[mine, column],
                entries.depths[pick],
                state.branch_text[mine, column],
            )

    def reply(self, rows: NDArray[np.int64]) -> None:
        """Answer the outcomes that ``rows`` owe a reply for with their chains; rows that owe none are left alone."""
        state = self._rows
        # An answer without key would wipe out the one that was given already.
        rows = rows[state.awaited[rows] != NO_KEY]
        chains, depth = state.chains(rows), state.depth[rows]
        for verifier, pick in self._by_verifier(rows):
            mine = rows[pick]
            verifier.channel.reply(
                state.slot[mine],
                state.generation[mine],
                state.round[mine] - 1,
                state.awaited[mine],
                depth[pick],
                chains[pick],
            )

    def _by_verifier(self, rows: NDArray[np.int64]) -> Iterator[tuple[Verifier, NDArray[np.bool_]]]:
        owner = self._rows.owner[rows]
        for number in np.unique(owner):
            yield self._verifiers[int(number)], owner == number


def reply_empty(verifier: Verifier, outcomes: NDArray[np.void]) -> None:
    """Answer ``outcomes`` [n] of one verifier with empty speculations, so that it does not wait for a deadline."""
    tokens = np.zeros((len(outcomes), verifier.shape.lookahead), np.int64)
    verifier.channel.reply(
        outcomes["slot"],
        outcomes["generation"],
        outcomes["round"],
        outcome_keys(outcomes["num_accepted"], outcomes["bonus"]),
        np.zeros(len(outcomes), np.int64),
        tokens,
    )
