from __future__ import annotations

import numpy as np

from speculator_service.backup import suffixes
from speculator_service.backup.suffixes import Suffixes
from speculator_service.rows import Rows, RowShape

LOOKAHEAD = 3


def rows_with(*texts: list[int]) -> Rows:
    rows = Rows(RowShape(4, 4096, LOOKAHEAD, 2, 4, 0))
    for row, text in enumerate(texts):
        rows.occupy(row, 0, row, 1, 0, np.array(text))
    return rows


def test_rows_are_continued_each_from_its_own_text() -> None:
    rows = rows_with([5, 6, 7, 8, 5, 6], [1, 2, 3], [9, 4, 9])
    tokens, depth = Suffixes(rows).propose(np.array([0, 1, 2]))
    assert depth.tolist() == [3, 0, 3]
    assert tokens[0].tolist() == [7, 8, 5]
    assert tokens[2].tolist() == [4, 9, 4]


def test_committed_text_is_taken_in_and_a_new_sequence_begins_anew() -> None:
    rows = rows_with([5, 6, 7])
    suffixes_of = Suffixes(rows)
    zero = np.zeros(1, np.int64)
    assert suffixes_of.propose(zero)[1].tolist() == [0]
    rows.commit(zero, zero, np.array([5]), np.zeros((1, LOOKAHEAD), np.int64))
    assert suffixes_of.propose(zero)[0][0].tolist() == [6, 7, 5]
    rows.vacate(zero)
    rows.occupy(0, 0, 0, 2, 0, np.array([8, 5]))
    assert suffixes_of.propose(zero)[1].tolist() == [0]


def test_automata_of_ended_sequences_are_dropped() -> None:
    rows = rows_with([1, 1], [2, 2])
    suffixes_of = Suffixes(rows)
    suffixes_of.propose(np.array([0, 1]))
    rows.vacate(np.array([0]))
    suffixes_of.propose(np.array([1]))
    assert list(suffixes_of._backups) == [1]


def test_a_long_text_is_taken_in_bit_by_bit() -> None:
    text = list(range(1, suffixes._TOKENS_AT_ONCE + 100))
    rows = rows_with([*text, 1, 2])
    suffixes_of, zero = Suffixes(rows), np.zeros(1, np.int64)
    assert suffixes_of.propose(zero)[1].tolist() == [0]
    assert suffixes_of.propose(zero)[0][0].tolist() == [3, 4, 5]
