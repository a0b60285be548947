"""Posted events and publications as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ssd_proto.channels.events import HEADER_BYTES, EventDecoder, RecordingChannel, encode_record
from ssd_proto.channels.publication import apply, entries_frame, keys_frame
from ssd_proto.errors import ProtocolError
from ssd_proto.records import CloseSequence, OpenSequence, outcome_dtype
from ssd_proto.table import SpeculationTable, TableShape

pytestmark = pytest.mark.filterwarnings("error")
SHAPE = TableShape(num_slots=8, num_outcomes=3, lookahead=4)
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
events = st.one_of(
    st.tuples(st.just("open"), slots, int32, st.lists(int32, min_size=1, max_size=50)),
    st.tuples(st.just("close"), slots, int32),
    st.tuples(st.just("outcomes"), st.lists(rows, min_size=1, max_size=8)),
)


@given(st.lists(events, max_size=10))
def test_round_trip(posted: list[tuple[Any, ...]]) -> None:
    recorder, decoder = Recorder(), EventDecoder(SHAPE, INCARNATION)
    for event in posted:
        if event[0] == "open":
            recorder.open_sequence(event[1], event[2], np.array(event[3]))
        elif event[0] == "close":
            recorder.close_sequence(event[1], event[2])
        else:
            recorder.post(np.array(event[1], outcome_dtype(4)))
    assert len(recorder.records) == len(posted)
    for record, event in zip(recorder.records, posted, strict=True):
        got = decoder.decode(record)
        if isinstance(got, OpenSequence):
            assert (got.slot, got.generation, got.tokens.tolist()) == event[1:]
        elif isinstance(got, CloseSequence):
            assert (got.slot, got.generation) == event[1:]
        else:
            assert (got == np.array(event[1], outcome_dtype(4))).all()


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
        (1, bytes(11)),
        (1, np.array([8, 0, 1], "<i4").tobytes()),
        (1, np.array([-1, 0, 1], "<i4").tobytes()),
        (1, np.array([0, -1, 1], "<i4").tobytes()),
        (1, np.array([0, 0, 1, -2], "<i4").tobytes()),
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


@given(st.data())
def test_apply_equals_direct_calls(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    at = rng.permutation(8)[:count], rng.integers(0, 9, count), rng.integers(0, 9, count)
    width = data.draw(st.integers(0, 3))
    first = data.draw(st.integers(0, 3 - width))
    keys = rng.integers(-1, 2**40, (count, width))
    columns, depths, tokens = rng.integers(0, 4, count), rng.integers(0, 5, count), rng.integers(0, 2**31, (count, 4))
    entry_keys = rng.integers(0, 2**40, count)
    direct, mirrored = (SpeculationTable(SHAPE, bytearray(SHAPE.nbytes), INCARNATION) for _ in range(2))
    direct.add_keys(at[0], at[2], first, keys)
    direct.write(*at, columns, entry_keys, depths, tokens)
    apply(keys_frame(at[0], at[2], first, keys), mirrored)
    apply(entries_frame(*at, columns, entry_keys, depths, tokens), mirrored)
    assert (direct._keys == mirrored._keys).all()
    assert (direct._entries == mirrored._entries).all()


header_words = st.one_of(st.integers(-3, 9), st.sampled_from([-(2**31), 2**31 - 1, 1 << 29, 1 << 30]))


@given(st.integers(0, 3), header_words, header_words, header_words, st.lists(header_words, max_size=60))
def test_apply_nonsense(operation: int, rows: int, first: int, width: int, words: list[int]) -> None:
    """Whatever a frame says: an error or a write within the table."""
    table, guard = guarded_table()
    try:
        apply(np.array([operation, rows, first, width, *words], "<i4").tobytes(), table)
    except ProtocolError:
        assert not table._keys.any()
        assert not table._entries.any()
    assert (guard == -7).all()


@given(st.integers(0, 1000), st.integers(0, 40), header_words)
def test_apply_damaged(seed: int, position: int, value: int) -> None:
    """One word of a valid frame changed."""
    rng = np.random.default_rng(seed)
    table, guard = guarded_table()
    at = rng.integers(0, 8, 3), rng.integers(0, 5, 3), rng.integers(0, 5, 3)
    frame = entries_frame(
        *at, rng.integers(0, 4, 3), rng.integers(0, 99, 3), rng.integers(0, 5, 3), np.ones((3, 4), int)
    )
    words = np.frombuffer(frame, "<i4").copy()
    words[position % len(words)] = value
    try:
        apply(words.tobytes(), table)
    except ProtocolError:
        assert not table._entries.any()
    assert (guard == -7).all()
