from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from speculator_service.http import HttpServer
from speculator_service.sessions import Verifier, VerifierRegistry
from ssd_proto.channel import SpeculatorChannel
from ssd_proto.errors import ConfigError
from ssd_proto.records import Event
from ssd_proto.table import TableShape


class NoChannel(SpeculatorChannel):
    def poll(self) -> Event | None:
        return None

    def pending(self) -> bool:
        return False

    def close(self) -> None:
        pass


def verifier(incarnation: int) -> Verifier:
    return Verifier(incarnation, incarnation, "v", TableShape(4, 3, 2), NoChannel())


def test_silent_verifiers_expire_and_others_do_not() -> None:
    registry = VerifierRegistry(expiry_s=10.0)
    silent, alive, given_up = verifier(1), verifier(2), verifier(3)
    for one in (silent, alive, given_up):
        registry.add(one, now=0.0)
    assert registry.heard(2, now=8.0)
    given_up.attached = False
    assert registry.take_expired(now=5.0) == [given_up]
    assert registry.oldest_silence(now=9.0) == 9.0
    assert registry.take_expired(now=10.5) == [silent]
    assert not registry.heard(1, now=11.0)
    assert registry.remove(2) is alive
    assert registry.remove(2) is None
    assert len(registry) == 0
    assert registry.oldest_silence(now=99.0) == 0.0


def test_time_in_which_the_service_was_stopped_does_not_count() -> None:
    registry = VerifierRegistry(expiry_s=10.0)
    registry.add(verifier(1), now=0.0)
    registry.forgive(600.0)
    assert registry.take_expired(now=609.0) == []
    assert len(registry.take_expired(now=611.0)) == 1


class Status:
    healthy = True

    def is_healthy(self) -> bool:
        return self.healthy

    def info(self) -> dict[str, Any]:
        return {"answer": 42}


def test_pages() -> None:
    status = Status()
    server = HttpServer("127.0.0.1", 0, status, CollectorRegistry())
    server.start()
    try:
        with urllib.request.urlopen(server.address + "/health?x=1", timeout=5) as answer:
            assert answer.status == 200
        with urllib.request.urlopen(server.address + "/info", timeout=5) as answer:
            assert json.load(answer) == {"answer": 42}
        status.healthy = False
        with pytest.raises(urllib.error.HTTPError) as unhealthy:
            urllib.request.urlopen(server.address + "/health", timeout=5)
        assert unhealthy.value.code == 503
        unhealthy.value.close()
    finally:
        server.close()
        server.close()


def test_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--http-port"):
            HttpServer("127.0.0.1", taken.getsockname()[1], Status(), CollectorRegistry())
