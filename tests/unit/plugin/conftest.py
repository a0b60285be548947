"""A verifier's `Speculation` over a real shared memory channel whose speculator end the test holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from sglang_ssd.client import Connection
from sglang_ssd.handoff import HandedOver
from sglang_ssd.metrics import VerifierMetrics
from sglang_ssd.request_sampling import RequestSampling
from sglang_ssd.sessions import Sessions
from sglang_ssd.speculation import Speculation
from ssd_proto.channels.shm import ShmSpeculatorChannel, ShmVerifierChannel
from ssd_proto.doorbell import Doorbell
from ssd_proto.records import Event
from ssd_proto.table import TableShape

SHAPE = TableShape(num_slots=8, num_outcomes=4, lookahead=3, num_kept=2, num_rows=5)
VOCAB_SIZE = 100


def params(**changes: Any) -> SimpleNamespace:
    """Sampling parameters as SGLang has normalised them; greedy unless changed."""
    values = {
        "temperature": 1.0,
        "top_k": 1,
        "top_p": 1.0,
        "min_p": 0.0,
        "sampling_seed": None,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "ignore_eos": False,
        "stop_token_ids": None,
    }
    return SimpleNamespace(**values | changes)


@dataclass(eq=False)  # as SGLang's: compared and hashed by identity
class FakeRequest:
    rid: str
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    sampling_params: SimpleNamespace = field(default_factory=params)
    eos_token_ids: set[int] | None = None
    tokenizer: SimpleNamespace | None = None


@dataclass
class FakeClient:
    """Hands over connections that the test makes."""

    untaken: Connection | None = None
    given_up: list[Connection] = field(default_factory=list)

    def take(self) -> Connection | None:
        connection, self.untaken = self.untaken, None
        return connection

    def give_up(self, connection: Connection) -> None:
        connection.lost = True
        self.given_up.append(connection)


class Pair:
    """Both ends of a channel, and the `Speculation` that uses one of them."""

    def __init__(self, deadline_s: float = 0.05, shares_noise: bool = False, is_narrow: bool = False) -> None:
        self.registry = CollectorRegistry()
        self.client = FakeClient()
        self.sessions = Sessions(SHAPE.num_slots, SHAPE.lookahead)
        self.metrics = VerifierMetrics(self.registry)
        self.speculation = Speculation(
            self.client,  # type: ignore[arg-type]
            self.sessions,
            self.metrics,
            RequestSampling(shares_noise, SHAPE.num_kept, knows_law=True),
            deadline_s,
            VOCAB_SIZE,
            is_narrow,
        )
        self.doorbell = Doorbell()
        self.speculators: list[ShmSpeculatorChannel] = []
        self.connections: list[Connection] = []

    def connect(self, ring_bytes: int = 1 << 16) -> ShmSpeculatorChannel:
        incarnation = 100 + len(self.speculators)
        speculator = ShmSpeculatorChannel.create(SHAPE, incarnation, self.doorbell.address, ring_bytes)
        verifier = ShmVerifierChannel.attach(speculator.address, SHAPE, incarnation, self.doorbell.address)
        speculator.unlink()
        self.speculators.append(speculator)
        self.connections.append(Connection(welcome=None, channel=verifier))  # type: ignore[arg-type]
        self.client.untaken = self.connections[-1]
        return speculator

    def value(self, name: str, **labels: str) -> float:
        self.metrics.show()
        return self.registry.get_sample_value(name, labels) or 0.0

    def close(self) -> None:
        for connection in self.connections:
            connection.channel.close()
        for speculator in self.speculators:
            speculator.close()
        self.doorbell.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def drain(speculator: ShmSpeculatorChannel) -> list[Event]:
    events = []
    while (event := speculator.poll()) is not None:
        events.append(event)
    return events


def slots(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def prefilled(slot: int, length: int, bonus: int) -> HandedOver:
    return HandedOver(slots(slot), slots(0), slots(bonus), slots(length))


def verified(slot: int, num_accepted: int, bonus: int) -> HandedOver:
    return HandedOver(slots(slot), slots(num_accepted), slots(bonus), None)
