"""What every kind of data channel must do: one suite, bound to the kinds in `test_channels`."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from links import Link, entries_for, eventually, make_link, outcome_batch, same_event
from numpy.typing import NDArray

from ssd_proto.errors import ChannelClosed, ChannelFull
from ssd_proto.records import (
    NO_KEY,
    CloseSequence,
    DraftProbs,
    Entries,
    Event,
    OpenSequence,
    ProposalKind,
    Proposals,
    Sampling,
    outcome_keys,
    pack_probs,
    unpack_probs,
)
from ssd_proto.table import TableShape, empty_keys


def check_order(link: Link) -> None:
    """Opens, closes and outcomes arrive once each, in the order of posting."""
    expected: list[Event] = []
    for number in range(150):
        slot = number % link.shape.num_slots
        prompt = np.arange(1, 2 + number, dtype=np.int32)
        sampling = Sampling(number / 7, number, 1 / (number + 1), 0.3, 2**60 + number, number % 2 == 1, (number,))
        link.verifier.open_sequence(slot, number, prompt, sampling)
        outcomes = outcome_batch(link.shape, [slot], generation=number)
        link.verifier.post(outcomes)
        link.verifier.close_sequence(slot, number)
        expected += [OpenSequence(slot, number, prompt, sampling), outcomes, CloseSequence(slot, number)]
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
    """What is published is read at its stamp and nowhere else: first and late keys, entries, replies."""
    slots, rounds, generations = np.array([0, 5]), np.array([4, 7]), np.array([2, 3])
    keys = empty_keys(2, link.shape.num_outcomes)
    keys[:, :3] = outcome_keys(np.array([[0, 1, 2]] * 2), np.array([[10, 11, 12]] * 2))
    link.speculator.begin(slots, rounds, keys)
    keys[:, 3:] = outcome_keys(np.full((2, 2), 4), np.array([[20, 21], [22, 23]]))
    link.speculator.begin(slots, rounds, keys)
    tokens = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    columns = np.array([1, 4])
    entry_keys = np.array([keys[0, 1], keys[1, 4]])
    is_final = np.array([True, False])
    stamp = slots, generations, rounds
    link.speculator.write(Entries(*stamp, columns, entry_keys, np.array([4, 2]), is_final, tokens))
    missed = outcome_keys(np.array([3, 3]), np.array([77, 78]))
    reply_columns = np.full(2, link.shape.num_outcomes)
    link.speculator.write(Entries(*stamp, reply_columns, missed, np.array([4, 0]), ~is_final, tokens + 100))
    table = link.verifier.table
    link.visible(lambda: bool((table.read_reply(*stamp, missed).depth >= 0).all()))
    found = table.read(*stamp, entry_keys)
    assert found.depth.tolist() == [4, 2]
    assert found.is_final.tolist() == [True, False]
    assert (found.tokens == tokens).all()
    reply = table.read_reply(*stamp, missed)
    assert reply.depth.tolist() == [4, 0]
    assert reply.is_final.tolist() == [False, True]
    assert (reply.tokens == tokens + 100).all()
    assert found.q is None
    assert reply.q is None
    for change in ((1, 0, 0), (0, 1, 0), (0, 0, 2), (0, 0, 1), (0, -1, 0), (0, 0, -2)):
        other = (slots - change[0]) % 6, generations + change[1], rounds + change[2]
        assert (table.read(*other, entry_keys).depth == -1).all()
        assert (table.read_reply(*other, missed).depth == -1).all()
    assert (table.read(*stamp, missed).depth == -1).all()
    assert (table.read(*stamp, np.full(2, NO_KEY)).depth == -1).all()
    begun_only = np.array([keys[0, 0], keys[1, 3]])
    assert (table.read(*stamp, begun_only).depth == -1).all()


def check_sampled_table(link: Link) -> None:
    """Each entry and reply is read with its own q, the greedy ones with none, also where a row goes to another slot."""
    outcomes = outcome_batch(link.shape, [0, 1, 2, 3])
    keys = outcome_keys(outcomes["num_accepted"], outcomes["bonus"])
    at = outcomes["slot"], outcomes["generation"], outcomes["round"]
    tokens = np.array([[2**31 - 1, 0, 7, 8]] * 4)
    ids = np.stack([tokens, tokens // 2, np.full((4, 4), 9)], axis=-1)
    probs = np.random.default_rng(2).dirichlet(np.ones(3), (4, 4)).astype(np.float32)
    probs[0, 0], probs[0, 1] = [1.0, 0.0, 0.0], [np.finfo(np.float32).smallest_subnormal, 0.5, 0.5]
    q = DraftProbs(np.array([6, 0, 3, 1]), pack_probs(ids, probs))
    table_keys = empty_keys(4, 5)
    table_keys[:, 1] = keys
    link.speculator.begin(at[0], at[2], table_keys)
    depths, is_final = np.array([4, 3, 2, 4]), np.array([True, True, False, True])
    sampled, greedy = slice(0, 3), slice(3, 4)

    def publish(column: int) -> None:
        for rows, kept in ((sampled, DraftProbs(q.rows[sampled], q.words[sampled])), (greedy, None)):
            arguments = (array[rows] for array in (depths, is_final, tokens))
            link.speculator.write(entries_for(outcomes[rows], column, *arguments, kept))

    publish(1)
    publish(link.shape.num_outcomes)
    table = link.verifier.table
    link.visible(lambda: bool((table.read_reply(*at, keys).depth >= 0).all()))
    for found in (table.read(*at, keys), table.read_reply(*at, keys)):
        assert found.depth.tolist() == depths.tolist()
        assert found.is_final.tolist() == is_final.tolist()
        assert found.q is not None
        got_ids, got_probs = unpack_probs(found.q)
        for row in range(3):
            depth = depths[row]
            assert (found.tokens[row, :depth] == tokens[row, :depth]).all()
            assert (got_ids[row, :depth] == ids[row, :depth]).all()
            assert (got_probs[row, :depth] == probs[row, :depth]).all()
            assert not found.q[row, depth:].any()
        assert not found.q[3].any()
    # Row 6 goes to slot 4, which publishes in the same column: slot 0's entry has lost its q, its reply has not.
    heir = outcome_batch(link.shape, [4])
    kept = DraftProbs(np.array([6]), q.words[1:2])
    link.speculator.write(entries_for(heir, 1, np.array([4]), np.array([True]), tokens[:1], kept))
    link.visible(lambda: bool(table.read(*at, keys).depth[0] == -1))
    assert table.read(*at, keys).depth.tolist() == [-1, 3, 2, 4]
    left = table.read(*at, keys).q
    assert left is not None
    assert not left[0].any()
    assert table.read_reply(*at, keys).depth.tolist() == [4, 3, 2, 4]


def check_other_incarnation(kind: str) -> None:
    """A table of an earlier connection is never read, even if its memory were seen again."""
    first, second = make_link(kind), make_link(kind)
    try:
        at = np.array([1]), np.array([1]), np.array([0])
        key = outcome_keys(np.array([0]), np.array([9]))
        first.speculator.begin(at[0], at[2], np.repeat(key[:, None], 5, axis=1))
        q = DraftProbs(np.array([2]), np.ones((1, 4, 3), np.int64))
        one = np.array([True])
        first.speculator.write(Entries(*at, np.array([0]), key, np.array([4]), one, np.ones((1, 4), int), q))
        first.visible(lambda: bool(first.verifier.table.read(*at, key).depth == 4))
        for part in ("_keys", "_entries", "_probs"):
            getattr(second.verifier.table, part)[:] = getattr(first.verifier.table, part)
        assert second.verifier.table.read(*at, key).depth.tolist() == [-1]
    finally:
        first.close()
        second.close()


class Rounds:
    """Publishes entries of a batch of outcomes one at a time: even rows sampled, odd ones greedy."""

    def __init__(self, link: Link, outcomes: NDArray[np.void], in_table: list[int]) -> None:
        self.link, self.outcomes = link, outcomes
        count = len(outcomes)
        self.tokens = np.arange(count * 4).reshape(count, 4) + 1000
        self.q = np.arange(count * 12).reshape(count, 4, 3) + (1 << 40)
        self.q[1::2] = 0
        self.keys = empty_keys(count, 5)
        self.keys[in_table, 2] = outcome_keys(outcomes["num_accepted"], outcomes["bonus"])[in_table]
        link.speculator.begin(outcomes["slot"], outcomes["round"], self.keys)

    def write(self, row: int, depth: int, is_final: bool, column: int = 2) -> None:
        rows = slice(row, row + 1)
        q = DraftProbs(np.array([row + 1]), self.q[rows]) if row % 2 == 0 else None
        form = np.array([depth]), np.array([is_final])
        self.link.speculator.write(entries_for(self.outcomes[rows], column, *form, self.tokens[rows], q))

    def reply(self, row: int, depth: int) -> None:
        self.write(row, depth, True, self.link.shape.num_outcomes)

    def visible(self, rows: list[int]) -> None:
        """Flush, and wait until the verifier has an entry for ``rows``."""
        asked = self.outcomes[rows]
        at = asked["slot"], asked["generation"], asked["round"]
        keys = outcome_keys(asked["num_accepted"], asked["bonus"])
        self.link.visible(lambda: bool((self.link.verifier.table.read(*at, keys).depth >= 0).all()))

    def check(self, proposals: Proposals, depths: list[int]) -> None:
        """Depths are these, with the right tokens and q up to there, and no q after."""
        assert proposals.depth.tolist() == depths
        assert [array.dtype for array in proposals[:3]] == [np.int32, np.int32, np.int32]
        q = np.zeros_like(self.q) if proposals.q is None else proposals.q
        assert (q.dtype, len(q)) == (np.int64, len(depths))
        for row, depth in enumerate(depths):
            used = max(depth, 0)
            assert (proposals.tokens[row, :used] == self.tokens[row, :used]).all()
            assert (q[row, :used] == self.q[row, :used]).all()
            assert not q[row, used:].any()


def check_lookup_and_wait(link: Link) -> None:
    """Hit without waiting; entry cut short finished in the table, in the reply; backup; empty; none at the deadline."""
    outcomes = outcome_batch(link.shape, [0, 1, 2, 3, 4, 5], round_=6)
    rounds = Rounds(link, outcomes, [0, 1, 2])
    rounds.write(0, 4, True)
    rounds.write(1, 1, False)
    rounds.write(2, 2, False)
    rounds.visible([0, 1, 2])
    found = link.verifier.lookup(outcomes)
    rounds.check(found, [4, -1, -1, -1, -1, -1])
    assert found.kind.tolist() == [ProposalKind.HIT] + [ProposalKind.EMPTY] * 5

    with ThreadPoolExecutor(1) as pool:
        started = time.monotonic()
        waiting = pool.submit(link.verifier.wait, outcomes, found, 1.0)
        time.sleep(0.05)
        rounds.write(1, 4, True)
        rounds.reply(2, 3)
        rounds.reply(3, 4)
        link.speculator.flush()
        time.sleep(0.05)
        rounds.reply(4, 0)
        link.speculator.flush()
        answer = waiting.result(timeout=10)
    assert 0.95 < time.monotonic() - started < 5
    rounds.check(answer, [4, 4, 3, 4, 0, -1])
    kinds = [ProposalKind.HIT, ProposalKind.SHORT_HIT, ProposalKind.SHORT_HIT, ProposalKind.BACKUP]
    assert answer.kind.tolist() == [*kinds, ProposalKind.EMPTY, ProposalKind.EMPTY]
    rounds.check(found, [4, -1, -1, -1, -1, -1])  # the argument is left as it was


def check_short_entries(link: Link) -> None:
    """What will not be continued is a hit at any depth; what will be is none at any depth, and is waited for."""
    outcomes = outcome_batch(link.shape, [0, 1, 2, 3, 4, 5], round_=7)
    rounds = Rounds(link, outcomes, [0, 1, 2, 3, 4])
    for row, (depth, is_final) in enumerate([(2, True), (1, True), (2, False), (4, False), (0, True)]):
        rounds.write(row, depth, is_final)
    rounds.visible([0, 1, 2, 3, 4])
    found = link.verifier.lookup(outcomes)
    rounds.check(found, [2, 1, -1, -1, 0, -1])
    hit, empty = ProposalKind.HIT, ProposalKind.EMPTY
    assert found.kind.tolist() == [hit, hit, empty, empty, empty, empty]
    unfinished = link.verifier.wait(outcomes, found, 0.0)
    rounds.check(unfinished, [2, 1, -1, -1, 0, -1])
    assert unfinished.kind.tolist() == found.kind.tolist()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(link.verifier.wait, outcomes, found, 10.0)
        time.sleep(0.02)
        rounds.write(2, 3, True)
        rounds.reply(3, 1)
        rounds.reply(5, 2)
        link.speculator.flush()
        answer = waiting.result(timeout=20)
    rounds.check(answer, [2, 1, 3, 1, 0, 2])
    short = ProposalKind.SHORT_HIT
    assert answer.kind.tolist() == [hit, hit, short, short, empty, ProposalKind.BACKUP]


def check_accepted_padding(link: Link) -> None:
    """An outcome behind accepted padding is not the table's, which went on from other tokens; a reply to it is."""
    outcomes = outcome_batch(link.shape, [0, 1])
    outcomes["num_accepted"], outcomes["num_sent"] = [2, 2], [2, 1]
    rounds = Rounds(link, outcomes, [0, 1])
    rounds.write(0, 4, True)
    rounds.write(1, 4, True)
    rounds.visible([0, 1])
    swapped = outcomes[::-1].copy()
    swapped["num_sent"] = [2, 1]  # the sampled one is behind padding
    for asked, depths in ((outcomes, [4, -1]), (swapped, [4, -1])):
        found = link.verifier.lookup(asked)
        assert found.depth.tolist() == depths
        assert found.q is None or not found.q[1].any()
    rounds.reply(1, 3)
    link.speculator.flush()
    answer = link.verifier.wait(outcomes, link.verifier.lookup(outcomes), 10.0)
    rounds.check(answer, [4, 3])
    assert answer.kind.tolist() == [ProposalKind.HIT, ProposalKind.BACKUP]


def check_wait_ends(link: Link) -> None:
    """The deadline holds, none at all is no wait, and an answered batch returns at once."""
    outcomes = outcome_batch(link.shape, [0, 1])
    nothing = link.verifier.lookup(outcomes)
    for timeout in (0.0, 0.05):
        started = time.monotonic()
        assert link.verifier.wait(outcomes, nothing, timeout).depth.tolist() == [-1, -1]
        assert timeout <= time.monotonic() - started < timeout + 2
    q = np.ones((2, 4, 3), np.int64)
    answered = Proposals(np.full(2, 4, np.int32), np.ones((2, 4), np.int32), np.ones(2, np.int32), q)
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
    assert link.verifier.table.read(*table_rows, key).depth.tolist() == [-1]
    # The speculator does not know yet, and goes on.
    q = DraftProbs(np.array([0]), np.ones((1, 4, 3), np.int64))
    form = np.array([1]), np.array([True]), np.ones((1, 4), int)
    link.speculator.write(Entries(*table_rows, np.array([0]), key, *form, q))
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
