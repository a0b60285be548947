"""The control plane between a real ROUTER and real DEALERs: round trips, refusals, strangers, lateness."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from ssd_proto import PROTOCOL_VERSION
from ssd_proto.codec import encode
from ssd_proto.control import ControlClient, ControlServer
from ssd_proto.errors import ChannelClosed, ConfigError, DeadlineExceeded, ProtocolError
from ssd_proto.messages import Bye, Hello, InfoRequest, ModelFingerprint, Ping, Pong, Refusal
from ssd_proto.sockets import reachable

pytestmark = pytest.mark.filterwarnings("error")
MODEL = ModelFingerprint("model", "LlamaForCausalLM", 2048, "digest")


def hello(version: int = PROTOCOL_VERSION) -> Hello:
    return Hello(version, 5, "test", "host", MODEL, 4, 8, 1024, 32, ["shm", "zmq"])


@pytest.fixture(params=["tcp", "ipc"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ControlServer]:
    endpoint = "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/control"
    with ControlServer(endpoint) as server:
        yield server
    server.close()


@pytest.fixture
def tcp_server() -> Iterator[ControlServer]:
    with ControlServer("tcp://127.0.0.1:0") as server:
        yield server


@pytest.fixture
def stranger(tcp_server: ControlServer) -> Iterator[zmq.Socket[bytes]]:
    """A socket that sends what it likes to ``tcp_server``."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(tcp_server.endpoint)
        yield dealer


def run_with(client: Callable[[], object], server: Callable[[], object]) -> object:
    """What ``client`` returns, run in a thread of its own while ``server`` runs in this one."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client)
        server()
        return future.result(timeout=10)


def test_round_trip(server: ControlServer) -> None:
    def answer() -> None:
        received = server.receive(5.0)
        assert received is not None
        address, message = received
        assert message == hello()
        server.send(address, Pong(17, known=True))

    def ask() -> object:
        with ControlClient(server.endpoint) as client:
            return client.request(hello(), 5.0)

    assert run_with(ask, answer) == Pong(17, known=True)


def test_answers_go_to_the_right_verifier(server: ControlServer) -> None:
    """Several clients ask at once and are answered in reverse order."""

    def answer() -> None:
        received = [server.receive(5.0) for _ in range(4)]
        for item in reversed(received):
            assert item is not None
            address, message = item
            assert isinstance(message, Ping)
            server.send(address, Pong(message.incarnation, known=True))

    def ask(incarnation: int) -> object:
        with ControlClient(server.endpoint) as client:
            return client.request(Ping(incarnation), 5.0)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(ask, incarnation) for incarnation in range(4)]
        answer()
        assert [future.result(timeout=10) for future in futures] == [Pong(number, known=True) for number in range(4)]


def test_late_answer_is_not_mistaken(server: ControlServer) -> None:
    """A request that ran into its deadline does not spoil the next one."""
    with ControlClient(server.endpoint) as client:
        # The connection is made in the background: the first request may end before it stands.
        run_with(lambda: client.request(Ping(0), 5.0), lambda: _pong(server))
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.request(Ping(1), 0.1)
        assert 0.1 <= time.monotonic() - started < 2
        _pong(server)
        client.send(Ping(2))
        _pong(server)
        assert run_with(lambda: client.request(Ping(3), 5.0), lambda: _pong(server)) == Pong(3, known=True)


def test_send_and_linger(server: ControlServer) -> None:
    """A farewell leaves before the socket does."""
    client = ControlClient(server.endpoint)
    run_with(lambda: client.request(Ping(0), 5.0), lambda: _pong(server))
    client.send(Bye(4))
    client.close(linger_s=2.0)
    client.close()
    received = server.receive(5.0)
    assert received is not None
    assert received[1] == Bye(4)
    server.send(received[0], Pong(4, known=False))  # to nobody


def test_nothing_comes(server: ControlServer) -> None:
    for timeout in (0.0, 0.05):
        started = time.monotonic()
        assert server.receive(timeout) is None
        assert timeout <= time.monotonic() - started < timeout + 2


def test_other_version_is_refused(tcp_server: ControlServer, stranger: zmq.Socket[bytes]) -> None:
    """Also if its messages have other fields: the sentence says what to do, the service does not see it."""
    fields = {"type": "hello", "version": PROTOCOL_VERSION + 1, "something": "new"}
    for message in (hello(PROTOCOL_VERSION + 1), InfoRequest(PROTOCOL_VERSION + 1)):
        with ControlClient(tcp_server.endpoint) as client:
            refusal = run_with(lambda c=client, m=message: c.request(m, 5.0), lambda: tcp_server.receive(0.5))
        assert isinstance(refusal, Refusal)
        assert refusal.version == PROTOCOL_VERSION
        assert "install the same release" in refusal.reason
    stranger.send_multipart([b"12345678", msgspec.msgpack.encode(fields)])
    assert tcp_server.receive(0.5) is None
    assert stranger.poll(5000)
    assert stranger.recv_multipart()[0] == b"12345678"
    assert tcp_server.num_refused == 3
    assert tcp_server.num_malformed == 0


def test_service_of_another_version() -> None:
    """Whose answer we cannot read: the error names the version."""
    answer = msgspec.msgpack.encode({"type": "welcome", "version": 99, "what": "ever"})
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def reply() -> None:
            identity, request_id, _ = router.recv_multipart()
            router.send_multipart([identity, request_id, answer])

        with (
            ControlClient(f"tcp://127.0.0.1:{port}") as client,
            pytest.raises(ProtocolError, match=r"version 99 .* install the same release"),
        ):
            run_with(lambda: client.request(hello(), 5.0), reply)


def test_strangers_do_no_harm(tcp_server: ControlServer, stranger: zmq.Socket[bytes]) -> None:
    """Wrong frames, wrong bytes, wrong types, deep nesting, other protocols: dropped, counted, and service goes on."""
    nonsense = [
        [b""],
        [b"12345678"],
        [b"1234567", encode(Ping(1))],
        [b"12345678", encode(Ping(1)), b""],
        [b"12345678", b""],
        [b"12345678", b"\xc1"],
        [b"12345678", encode(Ping(1)) + b"\0"],
        [b"12345678", encode(Ping(1))[:-1]],
        [b"12345678", b"\x91" * 60_000],
        [b"12345678", msgspec.msgpack.encode({"type": "nothing"})],
        [b"12345678", msgspec.msgpack.encode({"type": "ping", "incarnation": "1"})],
        [b"12345678", msgspec.msgpack.encode({"type": "pong", "incarnation": 1, "known": True})],
        [b"12345678", msgspec.msgpack.encode({"type": "hello", "version": PROTOCOL_VERSION})],
    ]
    for frames in nonsense:
        stranger.send_multipart(frames)
    deadline = time.monotonic() + 5
    while tcp_server.num_malformed < len(nonsense) and time.monotonic() < deadline:
        assert tcp_server.receive(0.05) is None
    assert tcp_server.num_malformed == len(nonsense)
    stranger.send_multipart([b"12345678", bytes(1 << 20)])  # longer than any message: ZeroMQ hangs up
    port = int(tcp_server.endpoint.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as http:
        http.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert tcp_server.receive(0.1) is None
    with ControlClient(tcp_server.endpoint) as client:
        assert run_with(lambda: client.request(Ping(7), 5.0), lambda: _pong(tcp_server)) == Pong(7, known=True)


def test_flood_of_nonsense_does_not_prolong_the_wait(tcp_server: ControlServer, stranger: zmq.Socket[bytes]) -> None:
    for _ in range(500):
        stranger.send(b"x")
    time.sleep(0.1)
    assert tcp_server.receive(0.0) is None
    assert tcp_server.num_malformed < 50


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "abstract"])
def test_taken_endpoint(scheme: str, tmp_path: Path) -> None:
    """Says so, also for ipc, where ZeroMQ would take the path over; the one that listens goes on."""
    endpoint = {"tcp": "tcp://127.0.0.1:0", "ipc": f"ipc://{tmp_path}/x", "abstract": f"ipc://@{tmp_path}"}[scheme]
    with ControlServer(endpoint) as server:
        with pytest.raises(ConfigError, match=r"cannot listen on .*: address already in use; give another --endpoint"):
            ControlServer(server.endpoint)
        with ControlClient(server.endpoint) as client:
            assert run_with(lambda: client.request(Ping(7), 5.0), lambda: _pong(server)) == Pong(7, known=True)
    with ControlServer(server.endpoint):
        pass


def test_ipc_path_left_by_a_dead_service(tmp_path: Path) -> None:
    """Is no obstacle."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(f"{tmp_path}/x")
    with ControlServer(f"ipc://{tmp_path}/x") as server, ControlClient(server.endpoint) as client:
        assert run_with(lambda: client.request(Ping(7), 5.0), lambda: _pong(server)) == Pong(7, known=True)


@pytest.mark.parametrize(
    "endpoint", ["", "5000", "tcp://", "tcp://127.0.0.1", "tcp://192.0.2.1:0", "http://x:1", "ipc:///no/such/place/x"]
)
def test_impossible_endpoint(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="give another --endpoint"):
        ControlServer(endpoint)


@pytest.mark.parametrize("endpoint", ["", "5000", "http://x:1"])
def test_not_an_endpoint(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="give tcp://host:port or ipc://path"):
        ControlClient(endpoint)


def test_nobody_listens(tmp_path: Path) -> None:
    """The deadline holds; nothing is queued for a service that comes later."""
    with ControlClient(f"ipc://{tmp_path}/x") as client:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="no connection"):
            client.request(hello(), 0.1)
        assert 0.1 <= time.monotonic() - started < 2
        with pytest.raises(ChannelClosed):
            client.send(Ping(1))
        with ControlServer(f"ipc://{tmp_path}/x") as server:
            assert run_with(lambda: client.request(Ping(2), 5.0), lambda: _pong(server)) == Pong(2, known=True)


def test_reachable() -> None:
    """A wildcard is replaced by the name under which the service was reached."""
    control = "tcp://gpu7.example:5000"
    assert reachable("tcp://0.0.0.0:6000", control) == "tcp://gpu7.example:6000"
    assert reachable("tcp://[::]:6000", "tcp://[fe80::1]:5000") == "tcp://[fe80::1]:6000"
    assert reachable("tcp://10.0.0.1:6000", control) == "tcp://10.0.0.1:6000"
    assert reachable("ipc:///run/x", control) == "ipc:///run/x"
    assert reachable("tcp://0.0.0.0:6000", "ipc:///run/x") == "tcp://0.0.0.0:6000"


def _pong(server: ControlServer) -> None:
    received = server.receive(5.0)
    assert received is not None
    address, message = received
    assert isinstance(message, Ping)
    server.send(address, Pong(message.incarnation, known=True))
