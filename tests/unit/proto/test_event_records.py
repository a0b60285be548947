"""Posted events and publications as bytes."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from single_entry import entry, one

from ssd_proto.channels.events import HEADER_BYTES, EventDecoder, RecordingChannel, encode_record
from ssd_proto.channels.publication import apply, entries_frame, keys_frame
from ssd_proto.errors import ProtocolError
from ssd_proto.records import (
    GREEDY,
    MAX_STOP_TOKENS,
    CloseSequence,
    DraftProbs,
    Entries,
    OpenSequence,
    Sampling,
    outcome_dtype,
)
from ssd_proto.table import SpeculationTable, TableShape

pytestmark = pytest.mark.filterwarnings("error")
SHAPE = TableShape(num_slots=8, num_outcomes=3, lookahead=4, num_kept=2, num_rows=5)
INCARNATION = 0x0123_4567_89AB_CDEF
SEED = INCARNATION & 0xFFFF_FFFF


class Recorder(RecordingChannel):
    """Keeps what is posted."""

    def __init__(self) -> None:
        super().__init__(SHAPE, INCARNATION)
        self.records: list[bytes] = []

    def _send(self, record: bytes) -> None:
        self.records.append(record)

    def refresh(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


slots = st.integers(0, SHAPE.num_slots - 1)
int32 = st.integers(0, 2**31 - 1)
rows = st.tuples(
    slots, int32, int32, st.integers(0, 4), int32, st.integers(0, 3), st.integers(0, 4), st.tuples(*[int32] * 4)
)
samplings = st.builds(
    Sampling,
    st.floats(0, allow_infinity=False),
    int32,
    st.floats(0, 1, exclude_min=True),
    st.floats(0, 1),
    st.integers(0, 2**63 - 1),
    st.booleans(),
    st.lists(int32, max_size=MAX_STOP_TOKENS).map(tuple),
)
EXTREME = Sampling(1e300, 2**31 - 1, 5e-324, 1.0, 2**63 - 1, True, (2**31 - 1,) * MAX_STOP_TOKENS)
events = st.one_of(
    st.tuples(st.just("open"), slots, int32, st.lists(int32, min_size=1, max_size=50), samplings),
    st.tuples(st.just("close"), slots, int32),
    st.tuples(st.just("outcomes"), st.lists(rows, min_size=1, max_size=8)),
)


@given(st.lists(events, max_size=10))
@example([("open", 7, 3, [4], EXTREME), ("open", 0, 0, [0], GREEDY)])
def test_round_trip(posted: list[tuple[Any, ...]]) -> None:
    recorder, decoder = Recorder(), EventDecoder(SHAPE, INCARNATION)
    for event in posted:
        if event[0] == "open":
            recorder.open_sequence(event[1], event[2], np.array(event[3]), event[4])
        elif event[0] == "close":
            recorder.close_sequence(event[1], event[2])
        else:
            recorder.post(np.array(event[1], outcome_dtype(4)))
    assert len(recorder.records) == len(posted)
    for record, event in zip(recorder.records, posted, strict=True):
        got = decoder.decode(record)
        if isinstance(got, OpenSequence):
            assert (got.slot, got.generation, got.tokens.tolist(), got.sampling) == event[1:]
            assert type(got.sampling.shared_noise) is bool
        elif isinstance(got, CloseSequence):
            assert (got.slot, got.generation) == event[1:]
        else:
            assert (got == np.array(event[1], outcome_dtype(4))).all()


def test_drafts_are_greedy_unless_told() -> None:
    recorder = Recorder()
    recorder.open_sequence(1, 2, np.array([3, 4]))
    event = EventDecoder(SHAPE, INCARNATION).decode(recorder.records[0])
    assert isinstance(event, OpenSequence)
    assert event.sampling == GREEDY
    assert event.tokens.tolist() == [3, 4]


@given(st.data())
def test_damage(data: st.DataObject) -> None:
    """Any changed bit, any cut, a wrong number and a wrong incarnation are noticed; the decoder stays where it is."""
    recorder = Recorder()
    recorder.open_sequence(0, 0, np.arange(data.draw(st.integers(1, 40))))
    [record] = recorder.records
    decoder = EventDecoder(SHAPE, INCARNATION)
    flipped = bytearray(record)
    flipped[data.draw(st.integers(0, len(record) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = record[: data.draw(st.integers(0, len(record) - 1))]
    later = encode_record(2, bytes(8), 1, SEED)
    for bad in (bytes(flipped), cut, record + b"\0", later):
        with pytest.raises(ProtocolError):
            decoder.decode(bad)
    with pytest.raises(ProtocolError):
        EventDecoder(SHAPE, INCARNATION + 1).decode(record)
    decoder.decode(record)
    with pytest.raises(ProtocolError):
        decoder.decode(record)
    assert decoder.decode(later) == CloseSequence(0, 0)


def opening(words: tuple[int, ...] = (1,), **changes: float) -> bytes:
    """Payload of an open; ``words`` are its stop tokens and tokens."""
    fields = {"slot": 7, "generation": 3, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 11}
    fields |= {"shared_noise": 0, "num_stops": 0, **changes}
    return struct.pack("<iididdqii", *fields.values()) + np.array(words, "<i4").tobytes()


def test_opening_of_these_tests_is_valid() -> None:
    """So that what is refused below is refused for the one thing that is changed."""
    record = encode_record(1, opening((9, 8, 1, 2), num_stops=2, shared_noise=1), 0, SEED)
    event = EventDecoder(SHAPE, INCARNATION).decode(record)
    assert isinstance(event, OpenSequence)
    assert (event.slot, event.generation, event.tokens.tolist()) == (7, 3, [1, 2])
    assert event.sampling == Sampling(0.5, 5, 0.9, 0.1, 11, True, (9, 8))
    longest = encode_record(1, opening((9,) * 17, num_stops=16), 0, SEED)
    event = EventDecoder(SHAPE, INCARNATION).decode(longest)
    assert isinstance(event, OpenSequence)
    assert (len(event.sampling.stop_tokens), event.tokens.tolist()) == (16, [9])


def outcome_words(**changes: int) -> bytes:
    outcome = np.zeros(2, outcome_dtype(4))
    for name, value in changes.items():
        outcome[name][-1:] = value
    return outcome.tobytes()


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (0, bytes(8)),
        (4, bytes(8)),
        (1, b""),
        (1, bytes(8)),
        (1, bytes(48)),
        (1, opening()[:-2]),
        (1, opening() + b"\0"),
        (1, opening(())),
        (1, opening((1, -2))),
        (1, opening(slot=8)),
        (1, opening(slot=-1)),
        (1, opening(generation=-1)),
        (1, opening(temperature=-0.5)),
        (1, opening(temperature=math.nan)),
        (1, opening(temperature=math.inf)),
        (1, opening(top_k=-1)),
        (1, opening(top_p=0.0)),
        (1, opening(top_p=-0.5)),
        (1, opening(top_p=1.001)),
        (1, opening(top_p=math.nan)),
        (1, opening(min_p=-0.1)),
        (1, opening(min_p=1.1)),
        (1, opening(min_p=math.nan)),
        (1, opening(seed=-1)),
        (1, opening(seed=-(2**63))),
        (1, opening(shared_noise=2)),
        (1, opening(shared_noise=-1)),
        (1, opening(num_stops=-1)),
        (1, opening((1, 2), num_stops=2)),
        (1, opening((1, 2), num_stops=3)),
        (1, opening((1,) * 18, num_stops=17)),
        (1, opening((1,), num_stops=2**31 - 1)),
        (1, opening((-1, 2), num_stops=1)),
        (2, bytes(4)),
        (2, bytes(12)),
        (2, np.array([8, 0], "<i4").tobytes()),
        (3, b""),
        (3, bytes(40)),
        (3, outcome_words()[:-2]),
        (3, outcome_words(slot=8)),
        (3, outcome_words(slot=-1)),
        (3, outcome_words(generation=-1)),
        (3, outcome_words(round=-1)),
        (3, outcome_words(num_accepted=5)),
        (3, outcome_words(num_accepted=-1)),
        (3, outcome_words(bonus=-1)),
        (3, outcome_words(proposal=4)),
        (3, outcome_words(num_sent=5)),
        (3, outcome_words(tokens=-1)),
    ],
)
def test_out_of_range(kind: int, payload: bytes) -> None:
    """Intact records of a verifier that is wrong: every index is checked before the speculator sees it."""
    decoder = EventDecoder(SHAPE, INCARNATION)
    record = encode_record(kind, payload, 0, SEED)
    assert len(record) == HEADER_BYTES + len(payload)
    assert decoder.is_intact(record)
    with pytest.raises(ProtocolError):
        decoder.decode(record)


def test_sequence_numbers_wrap() -> None:
    decoder = EventDecoder(SHAPE, INCARNATION)
    decoder._sequence = 2**32 - 1
    for number in (2**32 - 1, 2**32, 2**32 + 1):
        assert decoder.decode(encode_record(2, bytes(8), number, SEED)) == CloseSequence(0, 0)


def guarded_table() -> tuple[SpeculationTable, NDArray[np.int64]]:
    """A table and the words around it, which nobody may write."""
    words = SHAPE.nbytes // 8
    memory = np.full(words + 256, -7, np.int64)
    memory[128 : 128 + words] = 0
    table = SpeculationTable(SHAPE, memory[128 : 128 + words].data.cast("B"), INCARNATION)
    return table, np.concatenate([memory[:128], memory[128 + words :]])


def parts(table: SpeculationTable) -> tuple[NDArray[np.int64], ...]:
    return table._keys, table._entries, table._probs


def is_untouched(table: SpeculationTable) -> bool:
    return not any(part.any() for part in parts(table))


def some_entries(rng: np.random.Generator, count: int, is_sampled: bool) -> Entries:
    """Any ``count`` <= 5 entries of different slots and rows."""
    q = DraftProbs(rng.permutation(5)[:count], rng.integers(0, 2**62, (count, 4, 2))) if is_sampled else None
    return Entries(
        rng.permutation(8)[:count],
        rng.integers(0, 9, count),
        rng.integers(0, 9, count),
        rng.integers(0, 4, count),
        rng.integers(0, 2**40, count),
        rng.integers(0, 5, count),
        rng.integers(0, 2, count).astype(bool),
        rng.integers(0, 2**31, (count, 4)),
        q,
    )


@given(st.integers(0, 5), st.integers(0, 1000))
def test_apply_equals_direct_calls(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    direct, mirrored = (SpeculationTable(SHAPE, bytearray(SHAPE.nbytes), INCARNATION) for _ in range(2))
    slots, rounds, keys = rng.permutation(8)[:count], rng.integers(0, 9, count), rng.integers(-1, 2**40, (count, 3))
    direct.begin(slots, rounds, keys)
    apply(keys_frame(slots, rounds, keys), mirrored)
    for is_sampled in (False, True):
        entries = some_entries(rng, count, is_sampled)
        direct.write(entries)
        apply(entries_frame(entries), mirrored)
        for one_part, other_part in zip(parts(direct), parts(mirrored), strict=True):
            assert (one_part == other_part).all()


@pytest.mark.parametrize("is_sampled", [False, True])
def test_frames_are_copies(is_sampled: bool) -> None:
    """Of arrays that do not lie in one piece, too, which may change as soon as the call returns."""
    entries = some_entries(np.random.default_rng(0), 5, is_sampled)
    table, other = (SpeculationTable(SHAPE, bytearray(SHAPE.nbytes), INCARNATION) for _ in range(2))
    table.write(entries)
    strided = [np.repeat(array, 2, axis=0)[::2] for array in entries[:-1]]
    q = entries.q and DraftProbs(*(np.repeat(array, 2, axis=0)[::2] for array in entries.q))
    frame = entries_frame(Entries(*strided, q))
    for array in (*strided, *(q or ())):
        array[:] = 0
    apply(frame, other)
    assert (table._entries == other._entries).all()
    assert (table._probs == other._probs).all()


header_words = st.one_of(st.integers(-3, 9), st.sampled_from([-(2**31), 2**31 - 1, 1 << 29, 1 << 30]))


@given(st.integers(0, 4), header_words, header_words, st.lists(header_words, max_size=80))
def test_apply_nonsense(operation: int, rows: int, width: int, words: list[int]) -> None:
    """Whatever a frame says: an error or a write within the table."""
    table, guard = guarded_table()
    try:
        apply(np.array([operation, rows, width, *words], "<i4").tobytes(), table)
    except ProtocolError:
        assert is_untouched(table)
    assert (guard == -7).all()


@pytest.mark.parametrize("is_sampled", [False, True])
@given(seed=st.integers(0, 1000), position=st.integers(0, 95), value=header_words)
def test_apply_damaged(is_sampled: bool, seed: int, position: int, value: int) -> None:
    """One word of a valid frame changed."""
    table, guard = guarded_table()
    frame = entries_frame(some_entries(np.random.default_rng(seed), 3, is_sampled))
    words = np.frombuffer(frame, "<i4").copy()
    words[position % len(words)] = value
    try:
        apply(words.tobytes(), table)
    except ProtocolError:
        assert is_untouched(table)
    assert (guard == -7).all()


@pytest.mark.parametrize("row", [-(2**31), -1, 5, 2**31 - 1])
def test_row_of_q_out_of_range(row: int) -> None:
    table, guard = guarded_table()
    good = entry((0, 1, 0, 0), 5, 4, [1, 2, 3, 4], True, (4, np.ones((4, 2), np.int64)))
    bad = good._replace(slots=one(1)[0], q=DraftProbs(one(row)[0], np.ones((1, 4, 2), np.int64)))
    both = Entries(*(np.concatenate(pair) for pair in zip(good[:-1], bad[:-1], strict=True)))
    rows, words = np.array([4, row]), np.ones((2, 4, 2), np.int64)
    for entries in (bad, both._replace(q=DraftProbs(rows, words))):
        with pytest.raises(ProtocolError):
            apply(entries_frame(entries), table)
        assert is_untouched(table)
    assert (guard == -7).all()
    apply(entries_frame(good), table)
    assert not is_untouched(table)


@pytest.mark.parametrize("size", [(4, 1), (4, 3), (3, 2), (5, 2), (4, 0), (2, 4)])
def test_q_of_another_size(size: tuple[int, int]) -> None:
    """Other m, other K; the last has as many words."""
    table, _ = guarded_table()
    entries = entry((0, 1, 0, 0), 5, 2, [1] * size[0], True, (0, np.ones(size, np.int64)))
    with pytest.raises(ProtocolError):
        apply(entries_frame(entries), table)
    assert is_untouched(table)


def test_q_cut_lengthened_or_not_announced() -> None:
    table, _ = guarded_table()
    frame = entries_frame(entry((0, 1, 0, 0), 5, 2, [1] * 4, True, (0, np.ones((4, 2), np.int64))))
    plain = entries_frame(entry((0, 1, 0, 0), 5, 2, [1] * 4, True))
    other = (frame[:-1], frame[:-8], frame + bytes(8), plain[:1] + frame[1:], frame[:1] + plain[1:])
    for damaged in other:
        with pytest.raises(ProtocolError):
            apply(damaged, table)
        assert is_untouched(table)
    for shape in (TableShape(8, 3, 4), TableShape(8, 3, 4, 2, 0), TableShape(8, 3, 4, 3, 5)):
        other_table = SpeculationTable(shape, bytearray(shape.nbytes), INCARNATION)
        with pytest.raises(ProtocolError):
            apply(frame, other_table)
        assert is_untouched(other_table)
    apply(frame, table)
    assert not is_untouched(table)
