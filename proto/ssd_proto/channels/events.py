"""What a verifier posts, as bytes: the records that `shm` puts into its ring and `zmq` into messages.

Every record is a header and a payload, little endian:

| field | type | content |
|---|---|---|
| kind | u32 | 1 open, 2 close, 3 outcomes |
| size | u32 | bytes of the payload |
| sequence | u32 | number of the record in this channel, from 0 (modulo 2**32) |
| check | u32 | CRC-32 of the three fields above and the payload, started with the incarnation |
| payload of an open | 52 bytes | `_OPENING`: slot, generation, sampling, number of stop tokens n |
| | i32 | stop tokens[n], tokens[L] |
| payload of a close | i32 | slot, generation |
| payload of outcomes | rows | `outcome_dtype`, one row or more |
"""

from __future__ import annotations

import math
import struct
import zlib
from abc import abstractmethod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ssd_proto.channel import VerifierChannel
from ssd_proto.errors import ProtocolError
from ssd_proto.records import (
    GREEDY,
    MAX_STOP_TOKENS,
    CloseSequence,
    Event,
    OpenSequence,
    ProposalKind,
    Sampling,
    outcome_dtype,
)
from ssd_proto.table import TableShape

HEADER_BYTES: Final = 16
_OPEN, _CLOSE, _OUTCOMES = 1, 2, 3
_FIELDS: Final = struct.Struct("<III")
_HEADER: Final = struct.Struct("<IIII")
_SEQUENCE: Final = struct.Struct("<ii")
_OPENING: Final = struct.Struct("<iididdqii")
"""Slot, generation, temperature, top_k, top_p, min_p, seed, shared_noise, number of stop tokens."""
_MASK: Final = 0xFFFF_FFFF


class RecordingChannel(VerifierChannel):
    """A verifier's end that posts records; transports say how one record is sent."""

    def __init__(self, shape: TableShape, incarnation: int) -> None:
        self._dtype = outcome_dtype(shape.lookahead)
        self._seed = incarnation & _MASK
        self._sequence = 0

    def open_sequence(
        self, slot: int, generation: int, tokens: NDArray[np.integer], sampling: Sampling = GREEDY
    ) -> None:
        *params, stop_tokens = sampling
        opening = _OPENING.pack(slot, generation, *params, len(stop_tokens))
        stops = np.asarray(stop_tokens, "<i4").tobytes()
        self._post(_OPEN, b"".join((opening, stops, np.ascontiguousarray(tokens, "<i4").tobytes())))

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
        if len(record) % 4 or len(record) == HEADER_BYTES or kind not in (_OPEN, _CLOSE, _OUTCOMES):
            raise ProtocolError(f"record of kind {kind} with {len(record)} bytes means nothing")
        event = self._event(kind, record)
        self._sequence += 1
        return event

    def _event(self, kind: int, record: bytes | bytearray) -> Event:
        if kind == _OPEN:
            return self._opening(record)
        return self._closing(record) if kind == _CLOSE else self._outcomes(record)

    def _opening(self, record: bytes | bytearray) -> OpenSequence:
        if len(record) < HEADER_BYTES + _OPENING.size:
            raise ProtocolError("an open of too few bytes")
        fields = _OPENING.unpack_from(record, HEADER_BYTES)
        slot, generation, temperature, top_k, top_p, min_p, seed, shared_noise, num_stops = fields
        self._check_sequence(slot, generation)
        in_range = 0 <= temperature < math.inf and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1
        if not in_range or seed < 0 or shared_noise not in (0, 1) or not 0 <= num_stops <= MAX_STOP_TOKENS:
            raise ProtocolError("a sampling parameter out of range")
        words = np.frombuffer(record, "<i4", offset=HEADER_BYTES + _OPENING.size)
        if len(words) <= num_stops or int(words.min()) < 0:
            raise ProtocolError("a prompt without tokens, or a negative token")
        stop_tokens = tuple(words[:num_stops].tolist())
        sampling = Sampling(temperature, top_k, top_p, min_p, seed, bool(shared_noise), stop_tokens)
        return OpenSequence(slot, generation, words[num_stops:], sampling)

    def _closing(self, record: bytes | bytearray) -> CloseSequence:
        if len(record) != HEADER_BYTES + _SEQUENCE.size:
            raise ProtocolError("a close of another size than 8 bytes")
        slot, generation = _SEQUENCE.unpack_from(record, HEADER_BYTES)
        self._check_sequence(slot, generation)
        return CloseSequence(slot, generation)

    def _check_sequence(self, slot: int, generation: int) -> None:
        if not 0 <= slot < self._shape.num_slots or generation < 0:
            raise ProtocolError(f"slot {slot} or generation {generation} out of range")

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
