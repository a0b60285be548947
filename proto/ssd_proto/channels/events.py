"""What a verifier posts, as bytes: the records that `shm` puts into its ring and `zmq` into messages.

Every record is a header and a payload, little endian:

| field | type | content |
|---|---|---|
| kind | u32 | 1 open, 2 close, 3 outcomes |
| size | u32 | bytes of the payload |
| sequence | u32 | number of the record in this channel, from 0 (modulo 2**32) |
| check | u32 | CRC-32 of the three fields above and the payload, started with the incarnation |
| payload of an open | i32 | slot, generation, tokens[L] |
| payload of a close | i32 | slot, generation |
| payload of outcomes | rows | `outcome_dtype`, one row or more |
"""

from __future__ import annotations

import struct
import zlib
from abc import abstractmethod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ssd_proto.channel import VerifierChannel
from ssd_proto.errors import ProtocolError
from ssd_proto.records import CloseSequence, Event, OpenSequence, ProposalKind, outcome_dtype
from ssd_proto.table import TableShape

HEADER_BYTES: Final = 16
_OPEN, _CLOSE, _OUTCOMES = 1, 2, 3
_FIELDS: Final = struct.Struct("<III")
_HEADER: Final = struct.Struct("<IIII")
_SEQUENCE: Final = struct.Struct("<ii")
_MASK: Final = 0xFFFF_FFFF


class RecordingChannel(VerifierChannel):
    """A verifier's end that posts records; transports say how one record is sent."""

    def __init__(self, shape: TableShape, incarnation: int) -> None:
        self._dtype = outcome_dtype(shape.lookahead)
        self._seed = incarnation & _MASK
        self._sequence = 0

    def open_sequence(self, slot: int, generation: int, tokens: NDArray[np.integer]) -> None:
        self._post(_OPEN, _SEQUENCE.pack(slot, generation) + np.ascontiguousarray(tokens, "<i4").tobytes())

    def close_sequence(self, slot: int, generation: int) -> None:
        self._post(_CLOSE, _SEQUENCE.pack(slot, generation))

    def post(self, outcomes: NDArray[np.void]) -> None:
        if outcomes.dtype != self._dtype:
            raise ValueError(f"outcomes must have the dtype {self._dtype}, not {outcomes.dtype}")
        if len(outcomes):
            self._post(_OUTCOMES, outcomes.tobytes())

    @abstractmethod
    def _send(self, record: bytes) -> None:
        """Send one record or raise `ChannelFull`. Never waits."""

    def _post(self, kind: int, payload: bytes) -> None:
        self._send(encode_record(kind, payload, self._sequence, self._seed))
        self._sequence += 1  # only now: a record that was not sent leaves no gap


def encode_record(kind: int, payload: bytes, sequence: int, seed: int) -> bytes:
    """Header and payload. ``seed``: low 32 bits of the incarnation."""
    fields = _FIELDS.pack(kind, len(payload), sequence & _MASK)
    check = zlib.crc32(payload, zlib.crc32(fields, seed))
    return b"".join((fields, check.to_bytes(4, "little"), payload))


def payload_size(header: bytes | bytearray) -> int:
    """Bytes that follow ``header`` (16 bytes)."""
    return int.from_bytes(header[4:8], "little")


class EventDecoder:
    """Turns the records of one channel into events; everything it yields is within the agreed ranges."""

    def __init__(self, shape: TableShape, incarnation: int) -> None:
        self._shape = shape
        self._dtype = outcome_dtype(shape.lookahead)
        self._seed = incarnation & _MASK
        self._sequence = 0

    def is_intact(self, record: bytes | bytearray) -> bool:
        """Whether ``record`` is the next one of the channel, complete and unchanged."""
        if len(record) < HEADER_BYTES:
            return False
        _, size, sequence, check = _HEADER.unpack_from(record)
        view = memoryview(record)
        expected = zlib.crc32(view[HEADER_BYTES:], zlib.crc32(view[: _FIELDS.size], self._seed))
        return (size, sequence, check) == (len(record) - HEADER_BYTES, self._sequence & _MASK, expected)

    def decode(self, record: bytes | bytearray) -> Event:
        """The next event. `ProtocolError` (and nothing changed) if ``record`` is not a valid one."""
        if not self.is_intact(record):
            raise ProtocolError(f"record {self._sequence} of the verifier is damaged, or one before it was lost")
        kind = int.from_bytes(record[:4], "little")
        words = np.frombuffer(record, "<i4", offset=HEADER_BYTES) if len(record) % 4 == 0 else None
        if words is None or len(words) < 2 or kind not in (_OPEN, _CLOSE, _OUTCOMES):
            raise ProtocolError(f"record of kind {kind} with {len(record)} bytes means nothing")
        event = self._outcomes(record) if kind == _OUTCOMES else self._sequence_event(kind, words)
        self._sequence += 1
        return event

    def _sequence_event(self, kind: int, words: NDArray[np.int32]) -> Event:
        slot, generation, tokens = int(words[0]), int(words[1]), words[2:]
        if not 0 <= slot < self._shape.num_slots or generation < 0:
            raise ProtocolError(f"slot {slot} or generation {generation} out of range")
        if kind == _CLOSE:
            if len(tokens):
                raise ProtocolError("a close of more than 8 bytes")
            return CloseSequence(slot, generation)
        if not len(tokens) or int(tokens.min()) < 0:
            raise ProtocolError("a prompt without tokens, or with a negative one")
        return OpenSequence(slot, generation, tokens)

    def _outcomes(self, record: bytes | bytearray) -> NDArray[np.void]:
        if (len(record) - HEADER_BYTES) % self._dtype.itemsize:
            raise ProtocolError("a batch of outcomes with a fraction of a row")
        rows = np.frombuffer(record, "<i4", offset=HEADER_BYTES).reshape(-1, self._dtype.itemsize // 4)
        lookahead = self._shape.lookahead
        limits = (self._shape.num_slots - 1, lookahead, max(ProposalKind), lookahead)
        if int(rows.min()) < 0 or (rows[:, _LIMITED].max(axis=0) > limits).any():
            raise ProtocolError("an outcome with a field out of range")
        return rows.view(self._dtype)[:, 0]


_LIMITED: Final = [0, 3, 5, 6]
"""Those words of `outcome_dtype` that have an upper limit: slot, num_accepted, proposal, num_sent."""
