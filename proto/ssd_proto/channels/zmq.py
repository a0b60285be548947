"""The `zmq` channel: the same records as messages, for a service on another host.

| direction | frames (the ROUTER adds and removes the routing id) |
|---|---|
| verifier to speculator | one record of `ssd_proto.channels.events` |
| speculator to verifier | any number of frames of `ssd_proto.channels.publication`; none (one empty frame): a beat |

The verifier's table is a mirror, written only by its own `refresh`.  Queues are bounded on both ways:
the verifier learns of it by `ChannelFull`; what cannot be delivered to a verifier is dropped and
counted, which costs it speculations and nothing else.  If ZeroMQ loses records of a verifier (a broken
connection), the gap in their numbers shows and the channel ends with `ProtocolError`.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from typing import Final

import numpy as np
import zmq
from numpy.typing import NDArray

from ssd_proto.channel import SpeculatorChannel
from ssd_proto.channels.events import EventDecoder, RecordingChannel
from ssd_proto.channels.publication import apply, entries_frame, keys_frame
from ssd_proto.doorbell import Doorbell
from ssd_proto.errors import ChannelClosed, ChannelFull, ProtocolError
from ssd_proto.records import Entries, Event
from ssd_proto.sockets import bind, configure, connect, readable
from ssd_proto.table import SpeculationTable, TableShape

_QUEUED_MESSAGES: Final = 256
"""ZeroMQ's own queue, in each direction and at each end."""
_QUEUED_BYTES: Final = 1 << 26
"""What one verifier may have waiting in the hub while others are polled."""
_MAX_MESSAGE_BYTES: Final = 1 << 26
_MESSAGES_AT_ONCE: Final = 64
"""Read in one go, so that no call takes long; a round has about as many as it has draft steps."""
_BEAT_INTERVAL_S: Final = 0.25


class ZmqHub:
    """One ROUTER for all verifiers; made, used and closed by the speculator's model thread."""

    def __init__(self, endpoint: str) -> None:
        """Listen on ``endpoint`` (``tcp://host:port``, port 0: any free one). `ConfigError` if that is not possible."""
        self.num_strange = 0
        """Messages of nobody that has a channel here, dropped."""
        self.num_undelivered = 0
        """Publications dropped because their verifier is gone or does not read."""
        self._channels: dict[bytes, ZmqSpeculatorChannel] = {}
        self._doorbell: Doorbell | None = None
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            configure(self._socket, _QUEUED_MESSAGES, _MAX_MESSAGE_BYTES)
            # A verifier whose connection broke comes back before the old one is known to be dead.
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            bind(self._socket, endpoint)
            self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            """For `ChannelOffer.address`; the verifier passes it through `ssd_proto.sockets.reachable`."""
            self._poller = self._make_poller(None)
        except BaseException:
            self.close()
            raise

    def channel(self, shape: TableShape, incarnation: int) -> ZmqSpeculatorChannel:
        """The end for the verifier ``incarnation``; `ProtocolError` if that one has a channel already."""
        identity = _routing_id(incarnation)
        if identity in self._channels:
            raise ProtocolError(f"incarnation {incarnation} has a channel already")
        self._channels[identity] = channel = ZmqSpeculatorChannel(self, shape, incarnation)
        return channel

    def wait(self, timeout_s: float, doorbell: Doorbell | None = None) -> bool:
        """Sleep until a verifier sends something or somebody rings ``doorbell`` (which is drained).

        False if neither happens within ``timeout_s`` seconds, which are rounded up to milliseconds.
        """
        if any(channel.has_queued for channel in self._channels.values()):
            return True
        if doorbell is not self._doorbell:
            self._poller, self._doorbell = self._make_poller(doorbell), doorbell
        woken = bool(self._poller.poll(max(0, int(timeout_s * 1000 + 0.999))))
        if doorbell is not None:
            doorbell.drain()
        return woken

    def receive(self) -> None:
        """Hand the messages that have arrived to their channels. Never waits."""
        self._require_open()
        for _ in range(_MESSAGES_AT_ONCE):
            if not readable(self._socket):
                return
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            channel = self._channels.get(frames[0])
            if channel is None or len(frames) != 2:
                self.num_strange += 1
            else:
                channel.enqueue(frames[1])

    def send(self, incarnation: int, frames: list[bytes]) -> None:
        """Send ``frames`` to a verifier, or drop them if that cannot be done at once."""
        self._require_open()
        try:
            self._socket.send_multipart([_routing_id(incarnation), *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            self.num_undelivered += 1

    def forget(self, incarnation: int) -> None:
        """No more messages for this verifier's channel."""
        self._channels.pop(_routing_id(incarnation), None)

    def close(self) -> None:
        """Stop listening; the channels are of no further use. May be called twice."""
        self._socket.close(linger=0)
        self._context.term()

    def _require_open(self) -> None:
        if self._socket.closed:
            raise ChannelClosed("the hub was closed")

    def _make_poller(self, doorbell: Doorbell | None) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if doorbell is not None:
            poller.register(doorbell.fileno(), zmq.POLLIN)
        return poller


class ZmqSpeculatorChannel(SpeculatorChannel):
    """The speculator's end; made by `ZmqHub.channel`. Has no ``table``: what is published is sent by `flush`."""

    def __init__(self, hub: ZmqHub, shape: TableShape, incarnation: int) -> None:
        """Use `ZmqHub.channel`."""
        self._hub: ZmqHub | None = hub
        self._shape = shape
        self._incarnation = incarnation
        self._decoder = EventDecoder(shape, incarnation)
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._frames: list[bytes] = []
        self._last_sent = 0.0

    @property
    def has_queued(self) -> bool:
        """Whether the hub has handed over something that was not polled yet."""
        return bool(self._queue)

    def enqueue(self, record: bytes) -> None:
        """For the hub: ``record`` has arrived."""
        self._queue.append(record)
        self._queued_bytes += len(record)

    def poll(self) -> Event | None:
        if not self.pending():
            return None
        if self._queued_bytes > _QUEUED_BYTES:
            raise ProtocolError("the verifier sends more than can be read")
        event = self._decoder.decode(self._queue[0])
        self._queued_bytes -= len(self._queue.popleft())
        return event

    def pending(self) -> bool:
        if not self._queue:
            self._open_hub().receive()
        return bool(self._queue)

    def begin(self, slots: NDArray[np.integer], rounds: NDArray[np.integer], keys: NDArray[np.int64]) -> None:
        self._frames.append(keys_frame(slots, rounds, keys))

    def write(self, entries: Entries) -> None:
        self._frames.append(entries_frame(entries))

    def flush(self) -> None:
        if self._frames:
            self._open_hub().send(self._incarnation, self._frames)
            self._frames = []
            self._last_sent = time.monotonic()

    def beat(self) -> None:
        if time.monotonic() - self._last_sent > _BEAT_INTERVAL_S:
            self._open_hub().send(self._incarnation, [b""])
            self._last_sent = time.monotonic()

    def close(self) -> None:
        """Give up the place in the hub, and with it what is queued either way."""
        if self._hub is not None:
            self._hub.forget(self._incarnation)
            self._hub = None
            self._queue.clear()
            self._frames.clear()

    def _open_hub(self) -> ZmqHub:
        if self._hub is None:
            raise ChannelClosed("this end of the channel was closed")
        return self._hub


class ZmqVerifierChannel(RecordingChannel):
    """The verifier's end; its ``table`` is a mirror."""

    def __init__(self, address: str, shape: TableShape, incarnation: int, connect_timeout_s: float = 5.0) -> None:
        """Connect to the hub at ``address`` (as seen from here: `ssd_proto.sockets.reachable`).

        Raises `ChannelClosed` if it is not reached within ``connect_timeout_s`` seconds and
        `ConfigError` if ``address`` is not an endpoint.
        """
        super().__init__(shape, incarnation)
        self.table = SpeculationTable(shape, bytearray(shape.nbytes), incarnation)
        self._last_beat = 0.0
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        try:
            # A write of all entries of a table is a single frame, and less than the table.
            configure(self._socket, _QUEUED_MESSAGES, max(_MAX_MESSAGE_BYTES, 2 * shape.nbytes))
            self._socket.setsockopt(zmq.ROUTING_ID, _routing_id(incarnation))
            connect(self._socket, address)
            if not self._socket.poll(int(connect_timeout_s * 1000), zmq.POLLOUT):
                raise ChannelClosed(f"the speculator is not reached at {address} within {connect_timeout_s:g} s")
        except BaseException:
            self.close()
            raise

    def refresh(self) -> None:
        """Apply what has arrived to `table`. Never waits. `ProtocolError` on what the protocol does not allow."""
        self._require_open()
        for _ in range(_MESSAGES_AT_ONCE):
            if not readable(self._socket):
                return
            self._last_beat = time.monotonic()
            for frame in self._socket.recv_multipart(zmq.NOBLOCK):
                if frame:
                    apply(frame, self.table)

    def last_beat(self) -> float:
        self.refresh()
        return self._last_beat

    def close(self) -> None:
        """Disconnect. Posts that have not left yet are lost."""
        self._socket.close(linger=0)
        self._context.term()

    def _send(self, record: bytes) -> None:
        self._require_open()
        try:
            self._socket.send(record, zmq.NOBLOCK)
        except zmq.Again as error:
            raise ChannelFull("the speculator does not read, or is gone") from error

    def _require_open(self) -> None:
        if self._socket.closed:
            raise ChannelClosed("this end of the channel was closed")


def _routing_id(incarnation: int) -> bytes:
    """ZeroMQ keeps ids that begin with a zero byte for itself."""
    return b"v" + incarnation.to_bytes(8, "little")
