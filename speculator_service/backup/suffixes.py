"""Suffix backups of the rows of the draft engine, brought up to date when they are asked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from speculator_service.backup.suffix import SuffixBackup
from speculator_service.phase import Phase
from speculator_service.rows import Rows

_TOKENS_AT_ONCE = 1024
"""Taken in per question (some ms), so that a long prompt does not hold up the other sequences."""


class Suffixes:
    """One automaton for each row that was asked about; it goes with the row's sequence."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._backups: dict[int, tuple[tuple[int, int, int], SuffixBackup]] = {}

    def propose(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Continuations of the committed texts of ``rows`` [b].

        Returns:
            Tokens [b, K] and how many of them there are [b]: 0 where the end of the text has not occurred before,
            or a long text is not taken in yet.
        """
        for row in [row for row in self._backups if self._rows.phase[row] == Phase.FREE]:
            del self._backups[row]
        lookahead = self._rows.lookahead
        tokens, depth = np.zeros((len(rows), lookahead), np.int64), np.zeros(len(rows), np.int64)
        for place, row in enumerate(rows.tolist()):
            found = self._proposal(row, lookahead)
            depth[place] = len(found)
            tokens[place, : len(found)] = found
        return tokens, depth

    def _proposal(self, row: int, count: int) -> NDArray[np.int32]:
        state = self._rows
        sequence = int(state.owner[row]), int(state.slot[row]), int(state.generation[row])
        known, backup = self._backups.get(row, (None, None))
        if backup is None or known != sequence:
            backup = SuffixBackup()
            self._backups[row] = sequence, backup
        committed = int(state.committed[row])
        backup.append(state.text[row, len(backup) : min(committed, len(backup) + _TOKENS_AT_ONCE)].tolist())
        return backup.propose(count) if len(backup) == committed else np.empty(0, np.int32)
