"""Both ends of a data channel, of any kind, for the conformance suite."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ssd_proto.channel import SpeculatorChannel, VerifierChannel
from ssd_proto.channels.shm import RING_BYTES, ShmSpeculatorChannel, ShmVerifierChannel
from ssd_proto.channels.zmq import ZmqHub, ZmqVerifierChannel
from ssd_proto.doorbell import Doorbell
from ssd_proto.host import new_incarnation
from ssd_proto.records import DraftProbs, Entries, Event, OpenSequence, outcome_dtype, outcome_keys
from ssd_proto.table import TableShape

SHAPE = TableShape(num_slots=6, num_outcomes=5, lookahead=4, num_kept=3, num_rows=7)
T = TypeVar("T")

PATIENCE_S = 10.0
"""For what must happen; far more than it takes."""


@dataclass
class Link:
    """A connected channel. ``close`` releases whatever is left of it."""

    kind: str
    shape: TableShape
    speculator: SpeculatorChannel
    verifier: VerifierChannel
    doorbell: Doorbell
    hub: ZmqHub | None = None

    def close(self) -> None:
        self.verifier.close()
        self.speculator.close()
        self.doorbell.close()
        if self.hub is not None:
            self.hub.close()

    def next_event(self) -> Event:
        return eventually(self.speculator.poll)

    def visible(self, seen: Callable[[], bool]) -> None:
        """Flush what was published and wait until the verifier has it."""
        self.speculator.flush()

        def refreshed() -> bool | None:
            self.verifier.refresh()
            return seen() or None

        eventually(refreshed)


def make_link(kind: str, shape: TableShape = SHAPE, ring_bytes: int = RING_BYTES) -> Link:
    incarnation = new_incarnation()
    doorbell = Doorbell()
    if kind == "shm":
        speculator = ShmSpeculatorChannel.create(shape, incarnation, doorbell.address, ring_bytes)
        verifier = ShmVerifierChannel.attach(speculator.address, shape, incarnation, doorbell.address)
        speculator.unlink()
        return Link(kind, shape, speculator, verifier, doorbell)
    hub = ZmqHub("tcp://127.0.0.1:0")
    channel = hub.channel(shape, incarnation)
    link = Link(kind, shape, channel, ZmqVerifierChannel(hub.endpoint, shape, incarnation), doorbell, hub)
    # The first post shows the hub the way to the verifier; in life nothing is published before one.
    link.verifier.close_sequence(0, 0)
    link.next_event()
    return link


def eventually(attempt: Callable[[], T | None]) -> T:
    """What ``attempt`` returns when that is no longer None."""
    deadline = time.monotonic() + PATIENCE_S
    while (result := attempt()) is None:
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.0005)
    return result


def outcome_batch(shape: TableShape, slots: list[int], generation: int = 1, round_: int = 0) -> NDArray[np.void]:
    """One outcome for each slot, every field of which tells its row."""
    outcomes = np.zeros(len(slots), outcome_dtype(shape.lookahead))
    outcomes["slot"] = slots
    outcomes["generation"] = generation
    outcomes["round"] = round_
    outcomes["num_accepted"] = np.arange(len(slots)) % (shape.lookahead + 1)
    outcomes["bonus"] = 100 + np.asarray(slots)
    outcomes["proposal"] = np.arange(len(slots)) % 4
    outcomes["num_sent"] = np.arange(len(slots)) % (shape.lookahead + 1)
    outcomes["tokens"] = np.arange(len(slots) * shape.lookahead).reshape(len(slots), shape.lookahead)
    return outcomes


def entries_for(
    outcomes: NDArray[np.void],
    columns: int | NDArray[np.integer],
    depths: NDArray[np.integer],
    is_final: NDArray[np.bool_],
    tokens: NDArray[np.integer],
    q: DraftProbs | None = None,
) -> Entries:
    """Entries of these outcomes; ``columns`` may be one for all."""
    keys = outcome_keys(outcomes["num_accepted"], outcomes["bonus"])
    places = np.broadcast_to(columns, len(outcomes))
    at = outcomes["slot"], outcomes["generation"], outcomes["round"]
    return Entries(*at, places, keys, depths, is_final, tokens, q)


def same_event(got: Event, expected: Event) -> bool:
    if isinstance(expected, np.ndarray):
        return isinstance(got, np.ndarray) and got.dtype == expected.dtype and bool((got == expected).all())
    if isinstance(expected, OpenSequence):
        return isinstance(got, OpenSequence) and (
            (got.slot, got.generation, got.sampling) == (expected.slot, expected.generation, expected.sampling)
            and np.array_equal(got.tokens, expected.tokens)
        )
    return type(got) is type(expected) and got == expected


def channel_names(creator: int | None = None) -> set[str]:
    """Names of channels in the system's shared memory that a process made (default: this one)."""
    return {path.name for path in Path("/dev/shm").glob(f"sglang_ssd_{creator or os.getpid()}_*")}
