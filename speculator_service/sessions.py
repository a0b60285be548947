"""Verifiers that are connected, and which engine row serves which of their sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speculator_service.ways import Decision
from ssd_proto.channel import SpeculatorChannel
from ssd_proto.records import Sampling
from ssd_proto.table import TableShape

NO_ROW = -1
NO_GENERATION = -1


@dataclass(slots=True)
class WaitingSequence:
    """A sequence without engine row: there was no room. It is answered with empty speculations until there is."""

    generation: int
    round: int
    tokens: NDArray[np.int64]
    """[L] committed so far."""
    sampling: Sampling
    downweight: float
    """Saguaro's C for this sequence."""


class Verifier:
    """One connection of a verifier and its sequences. Owns the speculator's end of the data channel.

    ``row`` and ``generation`` are indexed by the verifier's slot.  An open sequence has a row, or is in
    ``waiting``, or is *lost*: its state is not known any more and it gets empty speculations until it is
    opened anew.
    """

    def __init__(self, number: int, incarnation: int, name: str, shape: TableShape, channel: SpeculatorChannel) -> None:
        self.number, self.incarnation, self.name = number, incarnation, name
        self.shape, self.channel = shape, channel
        self.max_slots = shape.num_slots
        self.generation = np.full(self.max_slots, NO_GENERATION, np.int64)
        self.row = np.full(self.max_slots, NO_ROW, np.int64)
        self.waiting: dict[int, WaitingSequence] = {}
        self.answered_at: float | None = None
        """When the last outcomes were answered, all of them; None while some are not, and before the first."""
        self.taken_at = 0.0
        """When they were taken."""
        self.decision: Decision | None = None
        """How its running batch goes on; None before the first one."""
        self.all_hit = False
        """Whether they were all hits, none of them short."""
        self.attached = True
        """Cleared by the speculator when it has given the verifier up; the channel is closed then."""

    @property
    def num_sequences(self) -> int:
        """Open sequences, whether they are served or not."""
        return int((self.generation != NO_GENERATION).sum())


class VerifierRegistry:
    """Connections by incarnation, and when each was last heard. Used by the control thread only."""

    def __init__(self, expiry_s: float) -> None:
        self._expiry_s = expiry_s
        self._verifiers: dict[int, Verifier] = {}
        self._last_heard: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._verifiers)

    def __getitem__(self, incarnation: int) -> Verifier:
        return self._verifiers[incarnation]

    def add(self, verifier: Verifier, now: float) -> None:
        """Enter a new connection."""
        self._verifiers[verifier.incarnation] = verifier
        self._last_heard[verifier.incarnation] = now

    def heard(self, incarnation: int, now: float) -> bool:
        """Note a sign of life; False if the connection is not (or no longer) known."""
        verifier = self._verifiers.get(incarnation)
        if verifier is None or not verifier.attached:
            return False
        self._last_heard[incarnation] = now
        return True

    def remove(self, incarnation: int) -> Verifier | None:
        """Forget a connection; returns it if it was known."""
        self._last_heard.pop(incarnation, None)
        return self._verifiers.pop(incarnation, None)

    def take_namesakes(self, name: str) -> list[Verifier]:
        """Remove and return the connections that the verifier ``name`` has given up by saying hello anew."""
        namesakes = [verifier for verifier in self._verifiers.values() if verifier.name == name]
        for verifier in namesakes:
            self.remove(verifier.incarnation)
        return namesakes

    def take_expired(self, now: float) -> list[Verifier]:
        """Remove and return the connections that were silent for too long, or that the speculator gave up."""
        gone = [
            verifier
            for incarnation, verifier in self._verifiers.items()
            if not verifier.attached or now - self._last_heard[incarnation] > self._expiry_s
        ]
        for verifier in gone:
            self.remove(verifier.incarnation)
        return gone

    def forgive(self, seconds: float) -> None:
        """Do not count ``seconds`` in which nobody could be heard: the service itself was stopped or starved."""
        for incarnation in self._last_heard:
            self._last_heard[incarnation] += seconds

    def oldest_silence(self, now: float) -> float:
        """Seconds since the verifier that is silent for longest was heard; 0 without verifiers."""
        return max((now - heard for heard in list(self._last_heard.values())), default=0.0)
