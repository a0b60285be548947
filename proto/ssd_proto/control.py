"""The control plane over ZeroMQ: the service's ROUTER and the verifiers' DEALERs.

Frames of both directions (the ROUTER adds and removes the peer's routing id):

| frame | bytes | content |
|---|---|---|
| request id | 8 | chosen by the client, repeated in the answer; all zero: no answer is expected |
| message | any | msgpack, see `ssd_proto.codec` |

Threads: an object is used by one thread, which also closes it.  Each object owns its ZeroMQ context.
"""

from __future__ import annotations

import itertools
import time
from types import TracebackType
from typing import Final

import zmq

from ssd_proto import PROTOCOL_VERSION
from ssd_proto.codec import decode_service_message, decode_verifier_message, encode, peek_version, version_refusal
from ssd_proto.errors import ChannelClosed, DeadlineExceeded, ProtocolError
from ssd_proto.messages import ServiceMessage, VerifierMessage
from ssd_proto.sockets import bind, configure, connect

_ID_BYTES: Final = 8
_MAX_MESSAGE_BYTES: Final = 1 << 16
_QUEUED_MESSAGES: Final = 1000


class ControlServer:
    """The service's end: receives requests of all verifiers and answers them.

    Nothing that a stranger sends can harm it: what is no message is dropped and counted in
    ``num_malformed``.  A message that states another protocol version is answered with `Refusal`
    here (counted in ``num_refused``) and not handed out.
    """

    def __init__(self, endpoint: str) -> None:
        """Listen on ``endpoint`` (``tcp://host:port``, port 0: any free one; ``ipc://path``).

        Raises `ConfigError` if that is not possible.
        """
        self.num_malformed = 0
        self.num_refused = 0
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            configure(self._socket, _QUEUED_MESSAGES, _MAX_MESSAGE_BYTES)
            bind(self._socket, endpoint)
            self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except BaseException:
            self.close()
            raise

    def receive(self, timeout_s: float) -> tuple[bytes, VerifierMessage] | None:
        """The next message and where to `send` the answer to it; None if none comes in ``timeout_s`` seconds.

        The address is that of this one request: who a verifier is, its messages say (incarnation).
        """
        deadline = time.monotonic() + timeout_s
        while True:
            frames = _next_message(self._socket, deadline)
            received = self._take(frames) if frames is not None else None
            # Whoever floods us with nonsense does not prolong the wait.
            if received is not None or frames is None or time.monotonic() > deadline:
                return received

    def send(self, address: bytes, message: ServiceMessage) -> None:
        """Answer the request that came from ``address``. Never blocks; dropped if the peer is gone."""
        request_id, identity = address[:_ID_BYTES], address[_ID_BYTES:]
        self._socket.send_multipart([identity, request_id, encode(message)], zmq.NOBLOCK)

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self._socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _take(self, frames: list[bytes]) -> tuple[bytes, VerifierMessage] | None:
        if len(frames) != 3 or len(frames[1]) != _ID_BYTES:
            self.num_malformed += 1
            return None
        identity, request_id, content = frames
        address = request_id + identity
        version = peek_version(content)
        if version is not None and version != PROTOCOL_VERSION:
            self.num_refused += 1
            self.send(address, version_refusal(version))
            return None
        try:
            return address, decode_verifier_message(content)
        except ProtocolError:
            self.num_malformed += 1
            return None


class ControlClient:
    """A verifier's end. Connects (and reconnects) in the background; a service that is not there is no error yet."""

    def __init__(self, endpoint: str) -> None:
        """``endpoint`` of a `ControlServer`. Raises `ConfigError` if it is not a ZeroMQ endpoint."""
        self._ids = itertools.count(1)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        try:
            configure(self._socket, _QUEUED_MESSAGES, _MAX_MESSAGE_BYTES)
            connect(self._socket, endpoint)
        except BaseException:
            self.close()
            raise

    def request(self, message: VerifierMessage, timeout_s: float) -> ServiceMessage:
        """Send ``message`` and return the answer to it.

        Raises `DeadlineExceeded` if there is none within ``timeout_s`` seconds (an answer that comes
        later is dropped, never taken for that of another request), `ProtocolError` if the answer is
        not a message of a service.
        """
        deadline = time.monotonic() + timeout_s
        request_id = next(self._ids).to_bytes(_ID_BYTES, "little")
        if not self._socket.poll(_milliseconds(deadline), zmq.POLLOUT):
            raise DeadlineExceeded(f"no connection to the speculator service within {timeout_s:g} s")
        self._socket.send_multipart([request_id, encode(message)], zmq.NOBLOCK)
        while frames := _next_message(self._socket, deadline):
            if len(frames) == 2 and frames[0] == request_id:
                return decode_service_message(frames[1])
            if time.monotonic() > deadline:
                break
        raise DeadlineExceeded(f"no answer of the speculator service within {timeout_s:g} s")

    def send(self, message: VerifierMessage) -> None:
        """Send ``message``, ignoring what is answered. Never blocks; `ChannelClosed` without a connection."""
        try:
            self._socket.send_multipart([bytes(_ID_BYTES), encode(message)], zmq.NOBLOCK)
        except zmq.Again as error:
            raise ChannelClosed("no connection to the speculator service") from error

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect, giving what was sent last at most ``linger_s`` seconds to leave. May be called twice."""
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _next_message(endpoint: zmq.Socket[bytes], deadline: float) -> list[bytes] | None:
    """The next message; None if none comes until ``deadline``."""
    if not endpoint.poll(_milliseconds(deadline), zmq.POLLIN):
        return None
    return endpoint.recv_multipart(zmq.NOBLOCK)


def _milliseconds(deadline: float) -> int:
    """Time until ``deadline`` (`time.monotonic`), rounded up so that a wait is not a busy one."""
    return max(0, int((deadline - time.monotonic()) * 1000 + 0.999))
