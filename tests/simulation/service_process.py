"""Start a speculator service as a process, and connect to it as a verifier does."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ssd_proto import PROTOCOL_VERSION
from ssd_proto.channel import VerifierChannel
from ssd_proto.channels.shm import ShmVerifierChannel
from ssd_proto.channels.zmq import ZmqVerifierChannel
from ssd_proto.control import ControlClient
from ssd_proto.errors import ChannelClosed
from ssd_proto.fingerprint import fingerprint
from ssd_proto.host import host_identity, new_incarnation
from ssd_proto.messages import Attached, Bye, Hello, Refusal, ServiceMessage, Welcome
from ssd_proto.sockets import reachable
from ssd_proto.table import TableShape

HERE = Path(__file__).parent
MODELS = HERE.parent / "models"
TABULAR = [str(HERE / "tabular_service.py")]
REAL = ["-m", "speculator_service"]
MAX_SLOTS = 8


class ServiceProcess:
    def __init__(self, program: Sequence[str], *flags: str) -> None:
        command = [sys.executable, *program, "--model-path", str(MODELS / "tiny-draft"), "--announce", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        self.endpoint, self.http = "", ""

    def wait_ready(self, timeout_s: float) -> None:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else ""
        if not line.startswith("ready "):
            self.process.kill()
            raise AssertionError(f"not ready: {line!r}\n{self.process.communicate()[1][-3000:]}")
        _, self.endpoint, self.http = line.split()

    def end(self, timeout_s: float = 20.0) -> tuple[int, str, str]:
        """Wait for the end: exit code, the rest of stdout, stderr."""
        output, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output, errors


@contextlib.contextmanager
def running(program: Sequence[str], *flags: str, timeout_s: float = 60.0) -> Iterator[ServiceProcess]:
    service = ServiceProcess(program, "--endpoint", "tcp://127.0.0.1:0", "--http-port", "0", *flags)
    try:
        service.wait_ready(timeout_s)
        yield service
    finally:
        if service.process.poll() is None:
            service.process.kill()
        service.process.communicate()


def hello(incarnation: int, kind: str = "shm", **changes: object) -> Hello:
    values: dict[str, object] = {
        "version": PROTOCOL_VERSION,
        "incarnation": incarnation,
        "name": "test",
        "host": host_identity(),
        "target": fingerprint(str(MODELS / "tiny-target")),
        "lookahead": 4,
        "max_slots": MAX_SLOTS,
        "context_length": 1024,
        "num_kept": 32,
        "channels": [kind],
    }
    return Hello(**{**values, **changes})  # type: ignore[arg-type]


class Connection:
    """A verifier's connection: handshake in the constructor."""

    def __init__(self, endpoint: str, kind: str) -> None:
        self.incarnation = new_incarnation()
        self.control = ControlClient(endpoint)
        answer = self.control.request(hello(self.incarnation, kind), 10.0)
        assert isinstance(answer, Welcome), answer
        self.welcome, offer = answer, answer.channel
        assert offer.kind == kind
        shape = TableShape(MAX_SLOTS, answer.num_outcomes, answer.lookahead, answer.num_kept, answer.max_sequences)
        self.channel: VerifierChannel
        if kind == "shm":
            self.channel = ShmVerifierChannel.attach(offer.address, shape, self.incarnation, offer.doorbell)
        else:
            self.channel = ZmqVerifierChannel(reachable(offer.address, endpoint), shape, self.incarnation)
        self.control.send(Attached(self.incarnation))

    def close(self) -> None:
        with contextlib.suppress(ChannelClosed):  # a service that was killed
            self.control.send(Bye(self.incarnation))
        self.channel.close()
        self.control.close(linger_s=1.0)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refusal(endpoint: str, **changes: object) -> str:
    with ControlClient(endpoint) as control:
        answer: ServiceMessage = control.request(hello(new_incarnation(), **changes), 10.0)  # type: ignore[arg-type]
    assert isinstance(answer, Refusal), answer
    return answer.reason


def eventually(condition: object, timeout_s: float = 5.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.02)
