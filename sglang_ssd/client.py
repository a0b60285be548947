"""The verifier's connection to the speculator service: connect, keep alive, notice the loss, reconnect.

A background thread does everything that may wait (handshake, heartbeat); the scheduler's thread takes
over finished connections and never waits for one.  A connection is lost when the service stops
answering the heartbeat or no longer knows this verifier; decoding goes on plain meanwhile.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ssd_proto import PROTOCOL_VERSION
from ssd_proto.channel import VerifierChannel
from ssd_proto.channels.shm import ShmVerifierChannel
from ssd_proto.channels.zmq import ZmqVerifierChannel
from ssd_proto.control import ControlClient
from ssd_proto.errors import ProtocolError, Refused, SSDError
from ssd_proto.host import host_identity, new_incarnation
from ssd_proto.messages import (
    Attached,
    Bye,
    Hello,
    Info,
    InfoRequest,
    ModelFingerprint,
    Ping,
    Pong,
    Refusal,
    ServiceMessage,
    Welcome,
)
from ssd_proto.sockets import reachable
from ssd_proto.table import TableShape

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_RETRY_AFTER_REFUSAL_S = 30.0
_PRESENCE_TIMEOUT_S = 1.0
_HANDSHAKE_TIMEOUT_S = 5.0
_GOODBYE_S = 0.5
_HEARTBEAT_S = 1.0
_MISSED_HEARTBEATS = 5  # a service whose cores are all busy may be a few seconds late


@dataclass(slots=True)
class Connection:
    """An attached service. ``lost`` is set when it is of no use any more, by either thread."""

    welcome: Welcome
    channel: VerifierChannel
    lost: bool = False


class SpeculatorClient:
    """Keeps one verifier connected to the service at ``endpoint``.

    Args:
        endpoint: Control endpoint of the service.
        hello: Makes the `Hello` of a new connection from its incarnation.
        on_change: Called from the background thread with whether a service is attached.
    """

    def __init__(
        self, endpoint: str, hello: Callable[[int], Hello], on_change: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._on_change = on_change
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._attempted = threading.Event()
        self._lock = threading.Lock()
        self._untaken: Connection | None = None
        self._complaint = ""
        self._thread = threading.Thread(target=self._run, name="ssd-client", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Start connecting and wait at most ``timeout_s`` for the first success (or a refusal)."""
        self._thread.start()
        self._attempted.wait(timeout_s)

    def take(self) -> Connection | None:
        """A connection made since the last call, or None. Its channel belongs to the caller from now on."""
        with self._lock:
            connection, self._untaken = self._untaken, None
        return connection

    def give_up(self, connection: Connection) -> None:
        """Treat a taken ``connection`` as lost and connect anew: the service then forgets its sequences."""
        connection.lost = True
        self._wake.set()

    def close(self) -> None:
        """Say goodbye and stop the thread; at most a few seconds."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_HANDSHAKE_TIMEOUT_S + 1.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            delay = _RETRY_S
            try:
                with ControlClient(self._endpoint) as control:
                    connection, incarnation = self._connect(control)
                    self._stay_connected(control, connection, incarnation)
            except Refused as error:
                self._complain(f"the speculator at {self._endpoint} refused this server: {error}")
                self._attempted.set()
                delay = _RETRY_AFTER_REFUSAL_S
            except SSDError as error:
                self._complain(f"no speculator at {self._endpoint} ({error}); decoding goes on without speculation")
            except Exception:  # the boundary of this thread: without it the server would never connect again
                logger.exception("the connection to the speculator at %s failed", self._endpoint)
            self._stop.wait(delay)

    def _connect(self, control: ControlClient) -> tuple[Connection, int]:
        # A service that is not there, or loads its weights, is noticed without a hello that it would answer late.
        _information(control.request(InfoRequest(PROTOCOL_VERSION), _PRESENCE_TIMEOUT_S))
        incarnation = new_incarnation()
        hello = self._hello(incarnation)
        answer = control.request(hello, _HANDSHAKE_TIMEOUT_S)
        if isinstance(answer, Refusal):
            raise Refused(answer.reason)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"expected a welcome, got {type(answer).__name__}")
        connection = Connection(answer, _attach(answer, hello, self._endpoint))
        try:
            control.send(Attached(incarnation))
        except SSDError:
            connection.channel.close()
            raise
        logger.info("attached to the speculator at %s through %s", self._endpoint, answer.channel.kind)
        self._complaint = ""
        return connection, incarnation

    def _stay_connected(self, control: ControlClient, connection: Connection, incarnation: int) -> None:
        self._wake.clear()
        with self._lock:
            self._untaken = connection
        self._on_change(True)
        self._attempted.set()
        try:
            if self._heartbeat(control, connection, incarnation):
                control.send(Bye(incarnation))
                control.close(linger_s=_GOODBYE_S)
        finally:
            connection.lost = True
            self._on_change(False)
            untaken = self.take()
            if untaken is not None:
                untaken.channel.close()

    def _heartbeat(self, control: ControlClient, connection: Connection, incarnation: int) -> bool:
        """Until the service is lost (False), or this end is given up or closed (True: say goodbye)."""
        interval = min(connection.welcome.heartbeat_s, _HEARTBEAT_S)
        last_heard = time.monotonic()
        while not self._wake.wait(interval):
            try:
                pong = control.request(Ping(incarnation), interval)
            except SSDError:
                if time.monotonic() - last_heard > _MISSED_HEARTBEATS * interval:
                    logger.warning("the speculator at %s is gone; decoding goes on without speculation", self._endpoint)
                    return False
                continue
            if not isinstance(pong, Pong) or not pong.known:
                logger.warning("the speculator at %s was restarted; connecting anew", self._endpoint)
                return False
            last_heard = time.monotonic()
        return True

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:  # once per cause, not once per attempt
            logger.warning(complaint)
            self._complaint = complaint


def say_hello(
    target: ModelFingerprint,
    lookahead: int,
    max_slots: int,
    context_length: int,
    num_kept: int,
    channels: Sequence[str],
) -> Callable[[int], Hello]:
    """Make the `Hello` of a verifier, given the incarnation of a connection."""
    host = host_identity()
    # Host and process are for people; the number is what no other verifier has, in containers either.
    name = f"{socket.gethostname()}:{os.getpid()}:{new_incarnation():x}"

    def hello(incarnation: int) -> Hello:
        return Hello(
            version=PROTOCOL_VERSION,
            incarnation=incarnation,
            name=name,
            host=host,
            target=target,
            lookahead=lookahead,
            max_slots=max_slots,
            context_length=context_length,
            num_kept=num_kept,
            channels=list(channels),
        )

    return hello


def request_info(endpoint: str, timeout_s: float) -> Info:
    """Ask a service what it serves. Raises `DeadlineExceeded` if nobody answers."""
    with ControlClient(endpoint) as control:
        return _information(control.request(InfoRequest(PROTOCOL_VERSION), timeout_s))


def _information(answer: ServiceMessage) -> Info:
    if isinstance(answer, Refusal):
        raise Refused(answer.reason)
    if not isinstance(answer, Info):
        raise ProtocolError(f"expected information, got {type(answer).__name__}")
    return answer


def _attach(welcome: Welcome, hello: Hello, endpoint: str) -> VerifierChannel:
    shape = TableShape(
        hello.max_slots, welcome.num_outcomes, welcome.lookahead, welcome.num_kept, num_rows=welcome.max_sequences
    )
    offer = welcome.channel
    if offer.kind == "shm":
        return ShmVerifierChannel.attach(offer.address, shape, hello.incarnation, offer.doorbell)
    if offer.kind == "zmq":
        return ZmqVerifierChannel(reachable(offer.address, endpoint), shape, hello.incarnation)
    raise ProtocolError(f"the service offered an unknown channel {offer.kind!r}")
