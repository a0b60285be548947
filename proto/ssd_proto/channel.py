"""The data channel between one verifier and the speculator.

Two ends, several transports (`ssd_proto.channels`).  Order: everything that the verifier posts
(opens, closes, outcomes) arrives in the order of posting.  Threading: each end is used by one thread.
Waits have deadlines; `close` and `abort` may be called twice and never raise.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from typing import Final, NamedTuple

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
        found = self._read_table(_Asked.of(outcomes))
        depth, q, is_answer = found.depth, found.q, found.is_final
        if np.count_nonzero(is_answer) < len(is_answer):
            depth, q = np.where(is_answer, depth, np.int32(-1)), _where(is_answer, q)
        kind = (depth > 0).astype(np.int32)  # 1 is HIT, 0 is EMPTY
        return Proposals(depth, found.tokens, kind, q)

    def wait(self, outcomes: NDArray[np.void], proposals: Proposals, timeout: float) -> Proposals:
        """Complete the rows of ``proposals`` that have depth -1; at most ``timeout`` seconds.

        Table and reply are both polled: an entry cut short is completed in either, whichever comes
        first.  Rows without an answer keep depth -1.
        """
        answers = _Answers(proposals)
        asked = _Asked.of(outcomes)
        deadline = time.monotonic() + timeout
        pause = _Pause(deadline)
        missing = np.flatnonzero(proposals.depth < 0)
        known, may_be_torn, read_at = b"", True, 0.0
        while len(missing):
            self.refresh()
            left = asked.pick(missing)
            # To read takes long, and where the speculator has the other half of this core it waits for us meanwhile.
            marks, now = self.table.marks(left.slots, left.rounds), time.monotonic()
            if marks != known or may_be_torn or now - read_at > _REREAD_S:
                may_be_torn, known, read_at = marks != known, marks, now
                missing = answers.take(missing, self._read_table(left), self.table.read_reply(*left.address))
            if len(missing) and not pause():
                break
        return answers.proposals()

    def _read_table(self, asked: _Asked) -> TableRead:
        """`SpeculationTable.read`, absent where padding was accepted: the table continues the speculator's tokens."""
        found = self.table.read(*asked.address)
        if not np.count_nonzero(asked.is_padding_accepted):
            return found
        is_right = ~asked.is_padding_accepted
        depth = np.where(is_right, found.depth, np.int32(-1))
        return TableRead(depth, found.is_final & is_right, found.tokens, _where(is_right, found.q))


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


_SLEEP_S = 20e-6
"""Asked for; with what the system adds it is some 80 us."""
_NO_SLEEP_S = 300e-6
"""Before a deadline: a sleep may take longer than it should."""
_REREAD_S = 1e-3
"""Whatever the marks say: an entry may become visible word by word."""
_SLEEPS = (os.cpu_count() or 1) <= 8

MAX_LOOKAHEAD: Final = 16
MAX_OUTCOMES: Final = 1024
MAX_KEPT: Final = 1024


class _Asked(NamedTuple):
    """Outcomes [b] that are looked up."""

    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    rounds: NDArray[np.int64]
    keys: NDArray[np.int64]
    is_padding_accepted: NDArray[np.bool_]

    @classmethod
    def of(cls, outcomes: NDArray[np.void]) -> _Asked:
        """``outcomes`` [b] of `outcome_dtype`."""
        words = np.ascontiguousarray(outcomes).view("<i4").reshape(len(outcomes), outcomes.dtype.itemsize // 4)
        slots, generations, rounds, accepted, bonus, _, num_sent = words[:, :7].T.astype(np.int64)
        return cls(slots, generations, rounds, outcome_keys(accepted, bonus), accepted > num_sent)

    @property
    def address(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Arguments of `SpeculationTable.read`."""
        return self[:4]

    def pick(self, index: NDArray[np.integer]) -> _Asked:
        """Those at ``index``."""
        return _Asked(*(array[index] for array in self))


class _Answers:
    """Proposals [b] that are being completed; the ones it begins with are left as they are."""

    def __init__(self, proposals: Proposals) -> None:
        self._depth, self._tokens, self._kind = (array.copy() for array in proposals[:3])
        self._q = None if proposals.q is None else proposals.q.copy()
        self._was_started = np.zeros(len(self._depth), bool)

    def take(self, missing: NDArray[np.intp], table: TableRead, reply: TableRead) -> NDArray[np.intp]:
        """Take what was found for the rows ``missing``; returns those that are missing still."""
        self._was_started[missing] |= table.depth >= 0
        replied = reply.depth >= 0
        for found, ready in ((table, table.is_final), (reply, replied)):
            rows = missing[ready]
            if len(rows):
                self._depth[rows], self._tokens[rows] = found.depth[ready], found.tokens[ready]
                self._take_q(rows, found, ready)
        answered = table.is_final | replied
        done = missing[answered]
        self._kind[done] = np.where(self._was_started[done], ProposalKind.SHORT_HIT, ProposalKind.BACKUP)
        return missing[~answered]

    def _take_q(self, rows: NDArray[np.intp], found: TableRead, ready: NDArray[np.bool_]) -> None:
        if found.q is not None and self._q is None:
            self._q = np.zeros((len(self._depth), *found.q.shape[1:]), np.int64)
        if self._q is not None:
            self._q[rows] = 0 if found.q is None else found.q[ready]

    def proposals(self) -> Proposals:
        """All of them; without an answer those that are missing."""
        self._kind[self._depth == 0] = ProposalKind.EMPTY
        return Proposals(self._depth, self._tokens, self._kind, self._q)


class _Pause:
    """Lets a moment pass between two looks at the table.

    On a machine with few processors the speculator has the other half of this core, or this very processor: it is done
    sooner where nobody spins beside it, by more than a short sleep costs.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def __call__(self) -> bool:
        """False, at once, if the deadline has passed; it is not slept over."""
        left = self._deadline - time.monotonic()
        if _SLEEPS and left > _NO_SLEEP_S:
            time.sleep(_SLEEP_S)
        return left >= 0


def _where(rows: NDArray[np.bool_], q: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """``q`` [b, K, m], 0 but for ``rows``."""
    return None if q is None else np.where(rows[:, None, None], q, 0)
