"""The verifier's connection to the speculator service: connect, keep alive, notice the loss, reconnect.

A background thread does everything that may wait (handshake, heartbeat); the scheduler's thread takes
over finished connections and never waits for one.  A connection is lost when the service stops
answering the heartbeat or no longer knows this verifier; decoding goes on plain meanwhile.
"""

from __future__ import annotations

import itertools
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
from ssd_proto.fingerprint import fingerprint
from ssd_proto.host import host_identity, new_incarnation
from ssd_proto.messages import Attached, Bye, Hello, Info, InfoRequest, Ping, Pong, Refusal, Welcome
from ssd_proto.sockets import reachable
from ssd_proto.table import TableShape

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_RETRY_AFTER_REFUSAL_S = 30.0
_HANDSHAKE_TIMEOUT_S = 2.0
_GOODBYE_S = 0.5
_MISSED_HEARTBEATS = 3
_client_numbers = itertools.count()


@dataclass(slots=True)
class Connection:
    """An attached service. ``lost`` is set by the background thread; the channel is the scheduler's."""

    welcome: Welcome
    channel: VerifierChannel
    lost: bool = False


class SpeculatorClient:
    """Keeps one verifier connected to the service at ``endpoint``.

    Args:
        endpoint: Control endpoint of the service.
        hello: Makes the `Hello` of a new connection from its incarnation.
    """

    def __init__(self, endpoint: str, hello: Callable[[int], Hello]) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._stop = threading.Event()
        self._attempted = threading.Event()
        self._latest: Connection | None = None
        self._complaint = ""
        self._thread = threading.Thread(target=self._run, name="ssd-client", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Start connecting and wait at most ``timeout_s`` for the first success (or a refusal)."""
        self._thread.start()
        self._attempted.wait(timeout_s)

    @property
    def connection(self) -> Connection | None:
        """The newest connection, or None if there has been none yet. It may be lost already."""
        return self._latest

    def close(self) -> None:
        """Say goodbye and stop the thread; at most a few seconds."""
        self._stop.set()
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
            self._stop.wait(delay)

    def _connect(self, control: ControlClient) -> tuple[Connection, int]:
        incarnation = new_incarnation()
        hello = self._hello(incarnation)
        answer = control.request(hello, _HANDSHAKE_TIMEOUT_S)
        if isinstance(answer, Refusal):
            raise Refused(answer.reason)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"expected a welcome, got {type(answer).__name__}")
        connection = Connection(answer, _attach(answer, hello, self._endpoint))
        control.send(Attached(incarnation))
        logger.info("attached to the speculator at %s through %s", self._endpoint, answer.channel.kind)
        self._complaint = ""
        self._latest = connection
        self._attempted.set()
        return connection, incarnation

    def _stay_connected(self, control: ControlClient, connection: Connection, incarnation: int) -> None:
        interval = connection.welcome.heartbeat_s
        last_heard = time.monotonic()
        try:
            while not self._stop.wait(interval):
                try:
                    pong = control.request(Ping(incarnation), interval)
                except SSDError:
                    if time.monotonic() - last_heard > _MISSED_HEARTBEATS * interval:
                        logger.warning(
                            "the speculator at %s is gone; decoding goes on without speculation", self._endpoint
                        )
                        return
                    continue
                if not isinstance(pong, Pong) or not pong.known:
                    logger.warning("the speculator at %s was restarted; connecting anew", self._endpoint)
                    return
                last_heard = time.monotonic()
            control.send(Bye(incarnation))
            control.close(linger_s=_GOODBYE_S)
        finally:
            connection.lost = True

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:  # once per cause, not once per attempt
            logger.warning(complaint)
            self._complaint = complaint


def say_hello(
    model_path: str, lookahead: int, max_slots: int, context_length: int, channels: Sequence[str]
) -> Callable[[int], Hello]:
    """Make the `Hello` of a verifier, given the incarnation of a connection."""
    target = fingerprint(model_path)
    host = host_identity()
    name = f"{socket.gethostname()}:{os.getpid()}:{next(_client_numbers)}"

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
            channels=list(channels),
        )

    return hello


def request_info(endpoint: str, timeout_s: float) -> Info:
    """Ask a service what it serves. Raises `DeadlineExceeded` if nobody answers."""
    with ControlClient(endpoint) as control:
        answer = control.request(InfoRequest(PROTOCOL_VERSION), timeout_s)
    if isinstance(answer, Refusal):
        raise Refused(answer.reason)
    if not isinstance(answer, Info):
        raise ProtocolError(f"expected information, got {type(answer).__name__}")
    return answer


def _attach(welcome: Welcome, hello: Hello, endpoint: str) -> VerifierChannel:
    shape = TableShape(hello.max_slots, welcome.num_outcomes, welcome.lookahead)
    offer = welcome.channel
    if offer.kind == "shm":
        return ShmVerifierChannel.attach(offer.address, shape, hello.incarnation, offer.doorbell)
    if offer.kind == "zmq":
        return ZmqVerifierChannel(reachable(offer.address, endpoint), shape, hello.incarnation)
    raise ProtocolError(f"the service offered an unknown channel {offer.kind!r}")
