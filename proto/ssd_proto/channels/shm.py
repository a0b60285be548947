"""The `shm` channel: two processes of one host map the same memory.

The service creates it, the verifier maps it, and as soon as it is mapped its name is removed.

| part | bytes | written by | content |
|---|---|---|---|
| identity | 128 | creator | int64: magic, version, incarnation, slots, outcomes, K, m, rows, ring bytes, total bytes |
| tail | 64 | verifier | int64: bytes written to the ring |
| head | 64 | speculator | int64: bytes taken from the ring |
| sleeping | 64 | speculator | int64: 1 if the doorbell must be rung after a post |
| beat | 64 | speculator | int64: `time.monotonic_ns` of its last sign of life |
| padding | 128 | | |
| ring | ring bytes | verifier | records of `ssd_proto.channels.events` |
| table | `TableShape.nbytes` | speculator | `ssd_proto.table` |

The sleeping flag and the posts race with each other: a ring may be missed, which costs one bounded sleep.
"""

from __future__ import annotations

import time
from dataclasses import astuple
from typing import Final

import numpy as np

from ssd_proto import PROTOCOL_VERSION
from ssd_proto.channel import SpeculatorChannel
from ssd_proto.channels.events import HEADER_BYTES, EventDecoder, RecordingChannel, payload_size
from ssd_proto.channels.memory import Segment, remove_stale_segments
from ssd_proto.channels.ring import Ring
from ssd_proto.doorbell import Bell
from ssd_proto.errors import ChannelClosed, ProtocolError
from ssd_proto.records import Event
from ssd_proto.table import SpeculationTable, TableShape

__all__ = ["RING_BYTES", "ShmSpeculatorChannel", "ShmVerifierChannel", "remove_stale_segments"]

RING_BYTES: Final = 1 << 22
"""Room for posts that wait: a million prompt tokens."""

_MAGIC: Final = int.from_bytes(b"SGL-SSD\0", "little")
_RING_BYTES, _TAIL, _HEAD, _SLEEPING, _BEAT = 8, 16, 24, 32, 40
_HEADER_NBYTES: Final = 512
_TORN_GRACE_S: Final = 0.005
"""How long a record may take to become visible after the counter that announces it (weakly ordered memory)."""


class ShmSpeculatorChannel(SpeculatorChannel):
    """The speculator's end; owns the memory."""

    def __init__(self, segment: Segment, shape: TableShape, incarnation: int, doorbell_address: str) -> None:
        """Use `create`. ``segment``: memory whose identity is filled in."""
        self.address = segment.name
        """Name of the memory, for `ChannelOffer.address`."""
        self.doorbell_address = doorbell_address
        """For `ChannelOffer.doorbell`."""
        self._shape = shape
        self._segment: Segment | None = segment
        self._words, self._ring, self.table = _map(segment, shape, incarnation)
        self._decoder = EventDecoder(shape, incarnation)

    @classmethod
    def create(
        cls, shape: TableShape, incarnation: int, doorbell_address: str, ring_bytes: int = RING_BYTES
    ) -> ShmSpeculatorChannel:
        """Make the memory for the verifier ``incarnation``. `ConfigError` if the system has not enough.

        ``ring_bytes`` (a multiple of 64) limits what can wait to be polled, and the longest prompt: 4
        bytes a token. ``doorbell_address``: `Doorbell.address`, or "" if nobody sleeps.
        """
        if ring_bytes <= 0 or ring_bytes % 64:
            raise ValueError(f"ring_bytes must be a positive multiple of 64, not {ring_bytes}")
        identity = _identity(shape, incarnation, ring_bytes)
        segment = Segment.create(identity[-1])
        with segment.buffer as buffer, buffer.cast("q") as words:
            for index, word in enumerate(identity):
                words[index] = word
        return cls(segment, shape, incarnation, doorbell_address)

    def unlink(self) -> None:
        """Remove the name, once the verifier has said Attached. May be called twice."""
        if self._segment is not None:
            self._segment.unlink()

    def poll(self) -> Event | None:
        if not self.pending():
            return None
        record = self._next_record()
        event = self._decoder.decode(record)
        self._ring.take(len(record))
        return event

    def pending(self) -> bool:
        if self._segment is None:
            raise ChannelClosed("this end of the channel was closed")
        return self._ring.available() > 0

    def set_sleeping(self, sleeping: bool) -> None:
        if self._segment is not None:
            self._words[_SLEEPING] = sleeping

    def beat(self) -> None:
        if self._segment is not None:
            self._words[_BEAT] = time.monotonic_ns()

    def close(self) -> None:
        """Release everything, the name included; from now on nothing that is published goes anywhere."""
        if self._segment is None:
            return
        self._segment.unlink()
        self.table = _detached(self._shape)
        self._ring.release()
        self._words.release()
        self._segment.close()
        self._segment = None

    def _next_record(self) -> bytearray:
        """The next record, given a moment to become visible if it is not yet; damaged if it does not."""
        deadline = time.monotonic() + _TORN_GRACE_S
        while True:
            available = self._ring.available()
            size = HEADER_BYTES + payload_size(self._ring.peek(HEADER_BYTES))
            record = self._ring.peek(min(size, available))
            if self._decoder.is_intact(record) or time.monotonic() > deadline:
                return record


class ShmVerifierChannel(RecordingChannel):
    """The verifier's end."""

    def __init__(self, segment: Segment, shape: TableShape, incarnation: int, doorbell_address: str) -> None:
        """Use `attach`. ``segment``: memory whose identity was checked."""
        super().__init__(shape, incarnation)
        self._shape = shape
        self._segment: Segment | None = segment
        self._words, self._ring, self.table = _map(segment, shape, incarnation)
        self._bell = Bell(doorbell_address)

    @classmethod
    def attach(cls, address: str, shape: TableShape, incarnation: int, doorbell_address: str) -> ShmVerifierChannel:
        """Map the memory that the service offered.

        Raises `ChannelClosed` if its name is gone and `ProtocolError` if it is not what was agreed.
        """
        segment = Segment.attach(address)
        try:
            _check_identity(segment, shape, incarnation)
        except ProtocolError:
            segment.close()
            raise
        return cls(segment, shape, incarnation, doorbell_address)

    def refresh(self) -> None:
        """Nothing to do: what the speculator writes is in `table` at once."""
        if self._segment is None:
            raise ChannelClosed("this end of the channel was closed")

    def last_beat(self) -> float:
        self.refresh()
        nanoseconds: int = self._words[_BEAT]
        return nanoseconds * 1e-9

    def close(self) -> None:
        """Release everything; from now on the table reads as empty."""
        if self._segment is None:
            return
        self.table = _detached(self._shape)
        self._ring.release()
        self._words.release()
        self._segment.close()
        self._segment = None
        self._bell.close()

    def _send(self, record: bytes) -> None:
        self.refresh()
        self._ring.write(record)
        if self._words[_SLEEPING]:
            self._bell.ring()


def _identity(shape: TableShape, incarnation: int, ring_bytes: int) -> tuple[int, ...]:
    total = _HEADER_NBYTES + ring_bytes + shape.nbytes
    return (_MAGIC, PROTOCOL_VERSION, incarnation, *astuple(shape), ring_bytes, total)


def _check_identity(segment: Segment, shape: TableShape, incarnation: int) -> None:
    with segment.buffer as buffer:
        if len(buffer) < _HEADER_NBYTES:
            raise ProtocolError(f"the shared memory {segment.name} is too small to be a channel")
        with buffer[:_HEADER_NBYTES].cast("q") as words:
            found = tuple(words[: _RING_BYTES + 2])
        size = len(buffer)
    expected = _identity(shape, incarnation, found[_RING_BYTES])
    if found != expected or size != expected[-1]:
        raise ProtocolError(f"the shared memory {segment.name} is not the channel that was agreed on")


def _map(segment: Segment, shape: TableShape, incarnation: int) -> tuple[memoryview, Ring, SpeculationTable]:
    """Views of the header, the ring and the table."""
    with segment.buffer as buffer:
        words = buffer[:_HEADER_NBYTES].cast("q")
        ring_end = _HEADER_NBYTES + words[_RING_BYTES]
        ring = Ring(words, _TAIL, _HEAD, buffer[_HEADER_NBYTES:ring_end])
        return words, ring, SpeculationTable(shape, buffer[ring_end:], incarnation)


def _detached(shape: TableShape) -> SpeculationTable:
    """What a closed end has for a table: nothing in it, and written to by nobody else."""
    return SpeculationTable(shape, np.zeros(shape.nbytes, np.uint8).data, 0)
