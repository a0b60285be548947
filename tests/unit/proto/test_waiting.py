"""`VerifierChannel.wait` on a table that changes between two looks, as the test scripts it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from single_entry import entry

from ssd_proto.channel import VerifierChannel
from ssd_proto.records import GREEDY, ProposalKind, Proposals, Sampling, outcome_dtype, outcome_keys
from ssd_proto.table import SpeculationTable, TableShape

SHAPE = TableShape(num_slots=2, num_outcomes=3, lookahead=2)
KEY = int(outcome_keys(np.array(1), np.array(9)))


class ScriptedChannel(VerifierChannel):
    """Does the next of ``changes`` at every refresh."""

    def __init__(self, table: SpeculationTable, changes: list[Callable[[], None]]) -> None:
        self.table, self.changes, self.num_refreshes = table, changes, 0

    def refresh(self) -> None:
        if self.num_refreshes < len(self.changes):
            self.changes[self.num_refreshes]()
        self.num_refreshes += 1

    def open_sequence(
        self, slot: int, generation: int, tokens: NDArray[np.integer], sampling: Sampling = GREEDY
    ) -> None:
        raise NotImplementedError

    def close_sequence(self, slot: int, generation: int) -> None:
        raise NotImplementedError

    def post(self, outcomes: NDArray[np.void]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def make_table() -> SpeculationTable:
    table = SpeculationTable(SHAPE, bytearray(SHAPE.nbytes), 1)
    keys = np.full((1, 3), -1)
    keys[0, 2] = KEY
    table.begin(np.array([1]), np.array([5]), keys)
    return table


def asked() -> NDArray[np.void]:
    outcomes = np.zeros(1, outcome_dtype(SHAPE.lookahead))
    for name, value in zip(("slot", "generation", "round", "num_accepted", "bonus"), (1, 4, 5, 1, 9), strict=True):
        outcomes[name] = value
    outcomes["num_sent"] = 2
    return outcomes


def nothing() -> None:
    pass


def wait(channel: ScriptedChannel, timeout: float) -> Proposals:
    missing = Proposals(np.full(1, -1, np.int32), np.zeros((1, 2), np.int32), np.zeros(1, np.int32), None)
    return channel.wait(asked(), missing, timeout)


def test_an_entry_that_becomes_visible_word_by_word_is_found() -> None:
    table, source = make_table(), make_table()
    source.write(entry((1, 4, 5, 2), KEY, 2, [7, 8], True))
    words, whole = table._entries[1, 1, 2], source._entries[1, 1, 2]

    def show(word: int) -> Callable[[], None]:
        return lambda: words.__setitem__(word, whole[word])

    # The check word is there first, the last token long after it.
    changes = [nothing, nothing, show(0), show(1), show(2), *[nothing] * 20, show(3)]
    channel = ScriptedChannel(table, changes)
    found = wait(channel, 10.0)
    assert (found.depth[0], found.tokens[0].tolist(), found.kind[0]) == (2, [7, 8], ProposalKind.SHORT_HIT)
    assert channel.num_refreshes >= len(changes)


def test_an_entry_that_is_finished_while_one_waits_is_a_short_hit() -> None:
    table = make_table()
    table.write(entry((1, 4, 5, 2), KEY, 1, [7, 0]))
    changes = [*[nothing] * 10, lambda: table.write(entry((1, 4, 5, 2), KEY, 2, [7, 8], True))]
    found = wait(ScriptedChannel(table, changes), 10.0)
    assert (found.depth[0], found.tokens[0].tolist(), found.kind[0]) == (2, [7, 8], ProposalKind.SHORT_HIT)


def test_an_unchanged_table_is_seldom_read() -> None:
    """To look is cheap, to read is not: the speculator may be on the other half of this core."""
    table, reads = make_table(), 0
    original = table.read

    def read(*arguments: NDArray[np.int64]) -> object:
        nonlocal reads
        reads += 1
        return original(*arguments)

    table.read = read  # type: ignore[method-assign,assignment]
    channel = ScriptedChannel(table, [])
    began = time.monotonic()
    assert wait(channel, 0.05).depth.tolist() == [-1]
    elapsed = time.monotonic() - began
    assert elapsed >= 0.05
    assert channel.num_refreshes > 50
    assert reads <= 3 + 1000 * elapsed


def test_marks_change_with_every_entry() -> None:
    table = make_table()
    at = np.array([1, 0]), np.array([5, 5])
    seen = [table.marks(*at)]
    for column, depth in ((2, 1), (2, 2), (3, 1)):  # 3: the reply
        table.write(entry((1, 4, 5, column), KEY, depth, [7, 8]))
        seen.append(table.marks(*at))
    table.write(entry((1, 4, 6, 0), KEY, 1, [7, 8]))  # the table of another round
    assert len(set(seen)) == len(seen)
    assert table.marks(*at) == seen[-1]
