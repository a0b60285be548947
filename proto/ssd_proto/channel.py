"""The data channel between one verifier and the speculator.

Two ends, several transports (`ssd_proto.channels`).  Order: everything that the verifier posts
(opens, closes, outcomes) arrives in the order of posting.  Threading: each end is used by one thread.
Waits have deadlines; `close` and `abort` may be called twice and never raise.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ssd_proto.records import GREEDY, Entries, Event, ProposalKind, Proposals, Sampling, outcome_keys
from ssd_proto.table import SpeculationTable, TableRead


class VerifierChannel(ABC):
    """The verifier's end. Posts never wait; `ChannelFull` if the other side does not keep up."""

    table: SpeculationTable

    @abstractmethod
    def open_sequence(
        self, slot: int, generation: int, tokens: NDArray[np.integer], sampling: Sampling = GREEDY
    ) -> None:
        """Post an `OpenSequence`."""

    @abstractmethod
    def close_sequence(self, slot: int, generation: int) -> None:
        """Post a `CloseSequence`."""

    @abstractmethod
    def post(self, outcomes: NDArray[np.void]) -> None:
        """Post a batch of outcomes (`outcome_dtype`)."""

    @abstractmethod
    def refresh(self) -> None:
        """Make what the speculator has published so far visible in `table`. Never waits."""

    @abstractmethod
    def close(self) -> None:
        """Release everything this end owns."""

    def last_beat(self) -> float:
        """`time.monotonic` of the speculator's last sign of life (its `SpeculatorChannel.beat`); 0.0 before the first.

        A transport without beats says now: then only the control plane knows of the speculator's death.
        """
        return time.monotonic()

    def lookup(self, outcomes: NDArray[np.void]) -> Proposals:
        """Look posted outcomes [b] up without waiting: an entry that is final is a hit, depth -1 is unknown yet.

        A final entry of depth 0 (nothing may follow the outcome) is an answer too, of kind EMPTY.
        """
        self.refresh()
        found = self._read_table(outcomes)
        found.discard(~found.is_final)
        kind = np.where(found.depth > 0, ProposalKind.HIT, ProposalKind.EMPTY).astype(np.int32)
        return Proposals(found.depth, found.tokens, kind, found.q)

    def wait(self, outcomes: NDArray[np.void], proposals: Proposals, timeout: float) -> Proposals:
        """Complete the rows of ``proposals`` that have depth -1; at most ``timeout`` seconds.

        Table and reply are both polled: an entry cut short is completed in either, whichever comes
        first.  Rows without an answer keep depth -1.  Spins: the verifier has nothing else to do.
        """
        depth, tokens = proposals.depth.copy(), proposals.tokens.copy()
        kind, q = proposals.kind.copy(), proposals.q.copy()
        missing = np.flatnonzero(depth < 0)
        was_started = np.zeros(len(depth), bool)
        deadline = time.monotonic() + timeout
        while len(missing):
            self.refresh()
            table = self._read_table(outcomes[missing])
            reply = self.table.read_reply(*_address(outcomes[missing]))
            was_started[missing] |= table.depth >= 0
            replied = reply.depth >= 0
            for found, ready in ((table, table.is_final), (reply, replied)):
                rows = missing[ready]
                depth[rows], tokens[rows], q[rows] = found.depth[ready], found.tokens[ready], found.q[ready]
            answered = table.is_final | replied
            done = missing[answered]
            kind[done] = np.where(was_started[done], ProposalKind.SHORT_HIT, ProposalKind.BACKUP)
            missing = missing[~answered]
            if len(missing) and time.monotonic() > deadline:
                break
        kind[depth == 0] = ProposalKind.EMPTY
        return Proposals(depth, tokens, kind, q)

    def _read_table(self, outcomes: NDArray[np.void]) -> TableRead:
        """`SpeculationTable.read`, absent where padding was accepted: the table continues the speculator's tokens."""
        found = self.table.read(*_address(outcomes))
        found.discard(outcomes["num_accepted"] > outcomes["num_sent"])
        return found


class SpeculatorChannel(ABC):
    """The speculator's end."""

    table: SpeculationTable

    @abstractmethod
    def poll(self) -> Event | None:
        """The next posted event, or None. Raises `ProtocolError` on what cannot be understood."""

    @abstractmethod
    def pending(self) -> bool:
        """Whether `poll` would return an event; cheap enough to be called between model steps."""

    @abstractmethod
    def close(self) -> None:
        """Release everything this end owns."""

    def set_sleeping(self, sleeping: bool) -> None:  # noqa: B027 - a transport that needs none inherits this one
        """Whether the verifier must ring the doorbell when it posts.

        Before a sleep: say True, look at `pending` once more, sleep (bounded), say False.  Transports
        whose posts wake the speculator anyhow ignore it.
        """

    def beat(self) -> None:  # noqa: B027 - a transport that needs none inherits this one
        """Show the verifier that the thread that serves this channel is alive. Cheap; at least every second."""

    # Publishing: same meaning and arguments as the methods of `SpeculationTable`.  The defaults write to
    # `table`; transports without shared memory have no table and override both.

    def begin(self, slots: NDArray[np.integer], rounds: NDArray[np.integer], keys: NDArray[np.int64]) -> None:
        self.table.begin(slots, rounds, keys)

    def write(self, entries: Entries) -> None:
        self.table.write(entries)

    def flush(self) -> None:  # noqa: B027 - a transport that needs none inherits this one
        """Send what was published since the last flush (transports without shared memory)."""


MAX_LOOKAHEAD: Final = 16
MAX_OUTCOMES: Final = 1024
MAX_KEPT: Final = 1024


def _address(
    outcomes: NDArray[np.void],
) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer], NDArray[np.int64]]:
    keys = outcome_keys(outcomes["num_accepted"], outcomes["bonus"])
    return outcomes["slot"], outcomes["generation"], outcomes["round"], keys
