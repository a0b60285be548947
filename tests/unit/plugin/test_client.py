"""The connection to the service: handshake, refusal, loss, reconnection, against a scripted control server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from sglang_ssd import client as client_module
from sglang_ssd.client import Connection, SpeculatorClient, request_info
from ssd_proto import PROTOCOL_VERSION
from ssd_proto.channels.shm import ShmSpeculatorChannel
from ssd_proto.control import ControlServer
from ssd_proto.errors import DeadlineExceeded
from ssd_proto.host import new_incarnation
from ssd_proto.messages import (
    Attached,
    Bye,
    ChannelOffer,
    Hello,
    Info,
    InfoRequest,
    ModelFingerprint,
    Ping,
    Pong,
    Refusal,
    ServiceMessage,
    VerifierMessage,
    Welcome,
)
from ssd_proto.table import TableShape

MODEL = ModelFingerprint("model", "LlamaForCausalLM", 64, "digest")


def hello(incarnation: int) -> Hello:
    return Hello(PROTOCOL_VERSION, incarnation, "host:1:0", "boot", MODEL, 3, 4, 128, 5, ["shm"])


class ScriptedService:
    """A control server whose answers the test chooses; it keeps what it was told."""

    def __init__(self, endpoint: str) -> None:
        self.server = ControlServer(endpoint)
        self.endpoint = self.server.endpoint
        self.received: list[VerifierMessage] = []
        self.channels: list[ShmSpeculatorChannel] = []
        self.refuses: str | None = None
        self.knows = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for channel in self.channels:
            channel.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            received = self.server.receive(0.02)
            if received is not None:
                address, message = received
                self.received.append(message)
                answer = self._answer(message)
                if answer is not None:
                    self.server.send(address, answer)
        self.server.close()

    def _answer(self, message: VerifierMessage) -> ServiceMessage | None:
        if isinstance(message, Hello):
            if self.refuses is not None:
                return Refusal(PROTOCOL_VERSION, self.refuses)
            shape = TableShape(message.max_slots, 6, message.lookahead, message.num_kept, num_rows=2)
            channel = ShmSpeculatorChannel.create(shape, message.incarnation, "")
            self.channels.append(channel)
            offer = ChannelOffer("shm", channel.address, "")
            return Welcome(PROTOCOL_VERSION, 1, MODEL, 3, 6, 5, 2, 128, offer, heartbeat_s=0.05, expiry_s=1.0)
        if isinstance(message, Ping):
            return Pong(message.incarnation, self.knows)
        if isinstance(message, InfoRequest):
            return Info(PROTOCOL_VERSION, 1, MODEL, 3, [2, 2, 1, 1], 5, 2, 128, "cpu", ["shm"], 0)
        return None


@pytest.fixture
def endpoint() -> str:
    return f"ipc://@ssd-test-client-{new_incarnation():x}"


@pytest.fixture
def service(endpoint: str) -> Iterator[ScriptedService]:
    service = ScriptedService(endpoint)
    yield service
    service.close()


@pytest.fixture
def client(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpeculatorClient]:
    monkeypatch.setattr(client_module, "_RETRY_S", 0.05)
    monkeypatch.setattr(client_module, "_HANDSHAKE_TIMEOUT_S", 0.3)
    client = SpeculatorClient(endpoint, hello)
    yield client
    client.close()


def taken(client: SpeculatorClient) -> Connection:
    """The next connection, as the scheduler takes it; the caller closes its channel."""
    connection = None

    def try_again() -> bool:
        nonlocal connection
        connection = client.take()
        return connection is not None

    assert eventually(try_again)
    assert connection is not None
    return connection


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_attaches_keeps_alive_and_says_goodbye(service: ScriptedService, client: SpeculatorClient) -> None:
    client.start(5.0)
    connection = client.take()
    assert connection is not None
    shape = connection.channel.table.shape
    assert (shape.num_slots, shape.num_outcomes, shape.lookahead, shape.num_kept, shape.num_rows) == (4, 6, 3, 5, 2)
    assert client.take() is None
    assert not connection.lost
    assert eventually(lambda: sum(isinstance(m, Ping) for m in service.received) > 2)
    client.close()
    assert eventually(lambda: isinstance(service.received[-1], Bye))
    kinds = [type(message) for message in service.received]
    assert kinds[:3] == [InfoRequest, Hello, Attached]
    assert connection.lost
    connection.channel.close()


def test_a_connection_that_nobody_takes_is_closed(service: ScriptedService, client: SpeculatorClient) -> None:
    client.start(5.0)
    client.close()
    assert client.take() is None


def test_a_connection_that_is_given_up_is_followed_by_another(
    service: ScriptedService, client: SpeculatorClient
) -> None:
    client.start(5.0)
    first = taken(client)
    client.give_up(first)
    second = taken(client)
    assert first.lost
    assert not second.lost
    assert eventually(lambda: any(isinstance(m, Bye) for m in service.received))
    for connection in (first, second):
        connection.channel.close()


def test_start_does_not_wait_for_longer_than_asked(client: SpeculatorClient) -> None:
    began = time.monotonic()
    client.start(0.2)
    assert time.monotonic() - began < 2.0
    assert client.take() is None


def test_connects_to_a_service_that_comes_later(endpoint: str, client: SpeculatorClient) -> None:
    client.start(0.0)
    service = ScriptedService(endpoint)
    try:
        taken(client).channel.close()
    finally:
        client.close()
        service.close()


def test_a_refusal_is_logged_with_its_reason(
    service: ScriptedService, client: SpeculatorClient, caplog: pytest.LogCaptureFixture
) -> None:
    service.refuses = "the verifier speculates 3 tokens and the service 4"
    client.start(5.0)
    assert client.take() is None
    assert "the verifier speculates 3 tokens and the service 4" in caplog.text


def test_a_service_that_does_not_know_the_verifier_any_more_is_joined_anew(
    service: ScriptedService, client: SpeculatorClient
) -> None:
    client.start(5.0)
    first = taken(client)
    service.knows = False
    assert eventually(lambda: first.lost)
    service.knows = True
    second = taken(client)
    for connection in (first, second):
        connection.channel.close()


def test_a_dead_service_is_noticed_and_its_successor_joined(
    endpoint: str, client: SpeculatorClient, caplog: pytest.LogCaptureFixture
) -> None:
    service = ScriptedService(endpoint)
    client.start(5.0)
    first = taken(client)
    service.close()
    assert eventually(lambda: first.lost)
    assert "gone" in caplog.text
    successor = ScriptedService(endpoint)
    try:
        taken(client).channel.close()
    finally:
        client.close()
        successor.close()
        first.channel.close()


def test_info(service: ScriptedService) -> None:
    assert request_info(service.endpoint, 5.0).lookahead == 3


def test_info_of_nobody_has_a_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        request_info("ipc://@ssd-test-nobody", 0.2)
    assert time.monotonic() - began < 2.0
