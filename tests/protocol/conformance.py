"""What every kind of data channel must do: one suite, bound to the kinds in `test_channels`."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from links import Link, eventually, make_link, outcome_batch, same_event
from numpy.typing import NDArray

from ssd_proto.errors import ChannelClosed, ChannelFull
from ssd_proto.records import NO_KEY, CloseSequence, Event, OpenSequence, ProposalKind, Proposals, outcome_keys
from ssd_proto.table import TableShape, empty_keys


def check_order(link: Link) -> None:
    """Opens, closes and outcomes arrive once each, in the order of posting."""
    expected: list[Event] = []
    for number in range(150):
        slot = number % link.shape.num_slots
        prompt = np.arange(1, 2 + number, dtype=np.int32)
        link.verifier.open_sequence(slot, number, prompt)
        outcomes = outcome_batch(link.shape, [slot], generation=number)
        link.verifier.post(outcomes)
        link.verifier.close_sequence(slot, number)
        expected += [OpenSequence(slot, number, prompt), outcomes, CloseSequence(slot, number)]
        if number % 50 == 49:
            _expect(link, expected)
            expected.clear()
    assert link.speculator.poll() is None
    assert not link.speculator.pending()


def check_batch_sizes(link: Link) -> None:
    """Batches of every size arrive whole, an empty one not at all, and the caller may reuse its array."""
    for size in range(link.shape.num_slots + 1):
        outcomes = outcome_batch(link.shape, list(range(size)), round_=size)
        expected = outcomes.copy()
        link.verifier.post(outcomes)
        outcomes["slot"] = -5
        if size:
            _expect(link, [expected])
    assert link.speculator.poll() is None
    strided = outcome_batch(link.shape, [0, 1, 2, 3])[::2]
    link.verifier.post(strided)
    _expect(link, [strided])
    with pytest.raises(ValueError, match="dtype"):
        link.verifier.post(outcome_batch(TableShape(6, 5, 3), [0]))


def check_big_prompt(link: Link) -> None:
    """A prompt of 200 000 tokens, of any integer type."""
    prompt = np.random.default_rng(0).integers(0, 200_000, 200_000)
    link.verifier.open_sequence(5, 1, prompt)
    _expect(link, [OpenSequence(5, 1, prompt)])


def check_many_records(kind: str) -> None:
    """Thousands of records of all sizes through a ring of 4 KiB: whatever wraps around arrives whole."""
    link = make_link(kind, ring_bytes=4096)
    rng = np.random.default_rng(1)
    try:
        for number in range(1500):
            expected: list[Event] = []
            for _ in range(int(rng.integers(1, 4))):
                if rng.random() < 0.5:
                    prompt = rng.integers(0, 1000, int(rng.integers(1, 250)))
                    link.verifier.open_sequence(number % 6, number, prompt)
                    expected.append(OpenSequence(number % 6, number, prompt))
                else:
                    outcomes = outcome_batch(link.shape, list(range(int(rng.integers(1, 6)))), round_=number)
                    link.verifier.post(outcomes)
                    expected.append(outcomes)
            _expect(link, expected)
    finally:
        link.close()


def check_back_pressure(link: Link) -> None:
    """A speculator that does not read: `ChannelFull`, at once. What was posted before arrives; then all is well."""
    prompt = np.arange(16_384)
    posted = _post_until_full(link, prompt)
    assert 10 < posted < 20_000
    for number in range(posted):
        event = link.next_event()
        assert isinstance(event, OpenSequence)
        assert event.generation == number
    assert link.speculator.poll() is None

    def recovered() -> bool | None:
        try:
            link.verifier.close_sequence(3, 7)
        except ChannelFull:
            return None
        return True

    eventually(recovered)
    _expect(link, [CloseSequence(3, 7)])


def check_table(link: Link) -> None:
    """What is published is read at its stamp and nowhere else: begin, late keys, entries, replies."""
    slots, rounds, generations = np.array([0, 5]), np.array([4, 7]), np.array([2, 3])
    keys = empty_keys(2, link.shape.num_outcomes)
    keys[:, :3] = outcome_keys(np.array([[0, 1, 2]] * 2), np.array([[10, 11, 12]] * 2))
    late = outcome_keys(np.full((2, 2), 4), np.array([[20, 21], [22, 23]]))
    tokens = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    columns = np.array([1, 4])
    entry_keys = np.array([keys[0, 1], late[1, 1]])
    link.speculator.begin(slots, rounds, keys)
    link.speculator.add_keys(slots, rounds, 3, late)
    link.speculator.write(slots, generations, rounds, columns, entry_keys, np.array([4, 2]), tokens)
    missed = outcome_keys(np.array([3, 3]), np.array([77, 78]))
    link.speculator.reply(slots, generations, rounds, missed, np.array([4, 0]), tokens + 100)
    table = link.verifier.table
    link.visible(lambda: bool((table.read_reply(slots, generations, rounds, missed)[0] >= 0).all()))
    depth, read = table.read(slots, generations, rounds, entry_keys)
    assert depth.tolist() == [4, 2]
    assert (read == tokens).all()
    depth, read = table.read_reply(slots, generations, rounds, missed)
    assert depth.tolist() == [4, 0]
    assert (read == tokens + 100).all()
    for change in ((1, 0, 0), (0, 1, 0), (0, 0, 2), (0, 0, 1), (0, -1, 0), (0, 0, -2)):
        other = (slots - change[0]) % 6, generations + change[1], rounds + change[2]
        assert (table.read(*other, entry_keys)[0] == -1).all()
        assert (table.read_reply(*other, missed)[0] == -1).all()
    assert (table.read(slots, generations, rounds, missed)[0] == -1).all()
    assert (table.read(slots, generations, rounds, np.full(2, NO_KEY))[0] == -1).all()
    begun_only = np.array([keys[0, 0], late[1, 0]])
    assert (table.read(slots, generations, rounds, begun_only)[0] == -1).all()


def check_other_incarnation(kind: str) -> None:
    """A table of an earlier connection is never read, even if its memory were seen again."""
    first, second = make_link(kind), make_link(kind)
    try:
        at = np.array([1]), np.array([1]), np.array([0])
        key = outcome_keys(np.array([0]), np.array([9]))
        first.speculator.begin(at[0], at[2], np.repeat(key[:, None], 5, axis=1))
        first.speculator.write(*at, np.array([0]), key, np.array([4]), np.ones((1, 4), int))
        first.visible(lambda: bool(first.verifier.table.read(*at, key)[0] == 4))
        second.verifier.table._keys[:] = first.verifier.table._keys
        second.verifier.table._entries[:] = first.verifier.table._entries
        assert second.verifier.table.read(*at, key)[0].tolist() == [-1]
    finally:
        first.close()
        second.close()


def check_lookup_and_wait(link: Link) -> None:
    """Hit without waiting; entry cut short finished in the table, in the reply; backup; empty; none at the deadline."""
    outcomes = outcome_batch(link.shape, [0, 1, 2, 3, 4, 5], round_=6)
    keys = outcome_keys(outcomes["num_accepted"], outcomes["bonus"])
    at = outcomes["slot"], outcomes["generation"], outcomes["round"]
    tokens = np.arange(24).reshape(6, 4) + 1000
    table_keys = empty_keys(6, 5)
    table_keys[:3, 2] = keys[:3]
    link.speculator.begin(at[0], at[2], table_keys)

    def write(row: int, depth: int) -> None:
        rows = slice(row, row + 1)
        stamp = tuple(array[rows] for array in at)
        link.speculator.write(*stamp, np.array([2]), keys[rows], np.array([depth]), tokens[rows])

    def reply(row: int, depth: int) -> None:
        rows = slice(row, row + 1)
        link.speculator.reply(*(array[rows] for array in at), keys[rows], np.array([depth]), tokens[rows])

    write(0, 4)
    write(1, 1)
    write(2, 2)
    link.visible(lambda: bool((link.verifier.table.read(*(array[:3] for array in at), keys[:3])[0] > 0).all()))
    found = link.verifier.lookup(outcomes)
    assert found.depth.tolist() == [4, -1, -1, -1, -1, -1]
    assert found.kind[0] == ProposalKind.HIT
    assert found.tokens[0].tolist() == tokens[0].tolist()

    with ThreadPoolExecutor(1) as pool:
        started = time.monotonic()
        waiting = pool.submit(link.verifier.wait, outcomes, found, 1.0)
        time.sleep(0.05)
        write(1, 4)
        reply(2, 3)
        reply(3, 4)
        link.speculator.flush()
        time.sleep(0.05)
        reply(4, 0)
        link.speculator.flush()
        answer = waiting.result(timeout=10)
    assert 0.95 < time.monotonic() - started < 5
    assert answer.depth.tolist() == [4, 4, 3, 4, 0, -1]
    kinds = [ProposalKind.HIT, ProposalKind.SHORT_HIT, ProposalKind.SHORT_HIT, ProposalKind.BACKUP]
    assert answer.kind.tolist() == [*kinds, ProposalKind.EMPTY, ProposalKind.EMPTY]
    for row, depth in enumerate([4, 4, 3, 4]):
        assert answer.tokens[row, :depth].tolist() == tokens[row, :depth].tolist()


def check_wait_ends(link: Link) -> None:
    """The deadline holds, none at all is no wait, and an answered batch returns at once."""
    outcomes = outcome_batch(link.shape, [0, 1])
    nothing = link.verifier.lookup(outcomes)
    for timeout in (0.0, 0.05):
        started = time.monotonic()
        assert link.verifier.wait(outcomes, nothing, timeout).depth.tolist() == [-1, -1]
        assert timeout <= time.monotonic() - started < timeout + 2
    answered = Proposals(np.full(2, 4, np.int32), np.ones((2, 4), np.int32), np.ones(2, np.int32))
    started = time.monotonic()
    assert link.verifier.wait(outcomes, answered, 5.0).depth.tolist() == [4, 4]
    assert time.monotonic() - started < 2


def check_beat(link: Link) -> None:
    """A sign of life reaches the verifier without anything published."""
    assert link.verifier.last_beat() == 0.0
    before = time.monotonic()
    link.speculator.beat()
    first = eventually(lambda: link.verifier.last_beat() or None)
    assert before - 0.001 <= first <= time.monotonic()

    def later() -> bool | None:
        link.speculator.beat()
        return link.verifier.last_beat() > first or None

    eventually(later)


def check_close(link: Link) -> None:
    """Closing twice is fine; a closed end says so, reads as empty and never crashes."""
    table_rows = np.array([0]), np.array([0]), np.array([0])
    key = np.array([5])
    link.speculator.set_sleeping(True)
    link.verifier.close()
    link.verifier.close()
    for use in (
        lambda: link.verifier.post(outcome_batch(link.shape, [0])),
        lambda: link.verifier.open_sequence(0, 0, np.array([1])),
        lambda: link.verifier.close_sequence(0, 0),
        lambda: link.verifier.refresh(),
        lambda: link.verifier.last_beat(),
        lambda: link.verifier.lookup(outcome_batch(link.shape, [0])),
    ):
        with pytest.raises(ChannelClosed):
            use()
    assert link.verifier.table.read(*table_rows, key)[0].tolist() == [-1]
    # The speculator does not know yet, and goes on.
    link.speculator.write(*table_rows, np.array([0]), key, np.array([1]), np.ones((1, 4), int))
    link.speculator.flush()
    assert link.speculator.poll() is None
    link.speculator.close()
    link.speculator.close()
    link.speculator.set_sleeping(False)
    with pytest.raises(ChannelClosed):
        link.speculator.poll()
    with pytest.raises(ChannelClosed):
        link.speculator.pending()


def _post_until_full(link: Link, prompt: NDArray[np.int64]) -> int:
    """Open generation after generation until there is no room; how many went through."""
    for number in range(20_000):
        try:
            link.verifier.open_sequence(0, number, prompt)
        except ChannelFull:
            return number
    return 20_000


def _expect(link: Link, expected: list[Event]) -> None:
    for event in expected:
        got = link.next_event()
        assert same_event(got, event), (got, event)
