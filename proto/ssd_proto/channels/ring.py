"""A ring of bytes between one writer and one reader in shared memory.

``words`` (int64) holds two counters of bytes since the beginning: ``tail`` (written, owned by the
writer) and ``head`` (taken, owned by the reader).  A record may wrap around the end of ``data``.
Nothing is assumed about the order in which stores of the writer become visible: the reader checks each
record itself (its checksum) before it takes it.
"""

from __future__ import annotations

from ssd_proto.errors import ChannelFull, ProtocolError


class Ring:
    """One end of a ring: the writer calls `write`; the reader `available`, `peek` and `take`."""

    def __init__(self, words: memoryview, tail: int, head: int, data: memoryview) -> None:
        """``words``: int64 view with the counters at the indices ``tail`` and ``head``; ``data``: bytes."""
        self._words = words
        self._tail_index, self._head_index = tail, head
        self._data = data
        self._capacity = len(data)
        self._tail: int = words[tail]
        self._head: int = words[head]

    def write(self, record: bytes) -> None:
        """Append ``record``; `ChannelFull` (and nothing written) if there is no room for it."""
        used = self._tail - self._words[self._head_index]
        if not 0 <= used <= self._capacity:
            raise ProtocolError("the counters of the ring are damaged")
        if len(record) > self._capacity - used:
            raise ChannelFull(f"no room for {len(record)} bytes: {used} of {self._capacity} bytes wait to be read")
        start = self._tail % self._capacity
        first = min(len(record), self._capacity - start)
        self._data[start : start + first] = record[:first]
        if first < len(record):
            self._data[: len(record) - first] = record[first:]
        self._tail += len(record)
        self._words[self._tail_index] = self._tail

    def available(self) -> int:
        """Bytes that can be read; `ProtocolError` if the writer claims more than the ring holds."""
        count: int = self._words[self._tail_index] - self._head
        if not 0 <= count <= self._capacity:
            raise ProtocolError("the counters of the ring are damaged")
        return count

    def peek(self, count: int) -> bytearray:
        """A copy of the next ``count`` bytes (at most `available`)."""
        start = self._head % self._capacity
        first = min(count, self._capacity - start)
        copy = bytearray(count)
        copy[:first] = self._data[start : start + first]
        if first < count:
            copy[first:] = self._data[: count - first]
        return copy

    def take(self, count: int) -> None:
        """Free the next ``count`` bytes for the writer."""
        self._head += count
        self._words[self._head_index] = self._head

    def release(self) -> None:
        """Drop the views of the memory; the ring is of no use afterwards."""
        self._words.release()
        self._data.release()
