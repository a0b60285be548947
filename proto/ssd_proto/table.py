"""The speculation table: the speculation cache as the verifier sees it, in memory both sides map.

Per verifier slot there are two tables, used in turn by even and odd rounds.  The protocol is
lock-step per slot (table r is rewritten only after outcome r + 1, which is posted after table r was
read), so two suffice.  Every entry carries a checksum over everything that identifies it: channel
incarnation, generation, round, outcome, depth, tokens.  An entry that is stale, torn or not yet
visible fails the checksum and counts as absent; there are no locks and no ordering assumptions.

Column ``num_outcomes`` of each table is the reply: the speculator's answer to the outcome that really
happened, whether it was in the table or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssd_proto.records import NO_KEY

_CHECK, _DEPTH, _TOKENS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class TableShape:
    """Sizes of a table. All positive, but ``num_outcomes`` may be 0: then there are replies only."""

    num_slots: int
    num_outcomes: int
    """Outcomes prepared per sequence: sum of the fan-out list (B, or MQ)."""
    lookahead: int
    """K."""

    @property
    def keys(self) -> tuple[int, int, int]:
        return (self.num_slots, 2, self.num_outcomes)

    @property
    def entries(self) -> tuple[int, int, int, int]:
        return (self.num_slots, 2, self.num_outcomes + 1, _TOKENS + self.lookahead)

    @property
    def nbytes(self) -> int:
        return 8 * (int(np.prod(self.keys)) + int(np.prod(self.entries)))


class SpeculationTable:
    """View of a table in ``buffer`` (at least ``shape.nbytes`` bytes, zeroed by its creator).

    One writer (the speculator) and one reader (the verifier).  ``incarnation`` is agreed in the
    handshake and enters every checksum.
    """

    def __init__(self, shape: TableShape, buffer: memoryview | bytearray, incarnation: int) -> None:
        self.shape = shape
        num_keys = int(np.prod(shape.keys))
        words = np.frombuffer(buffer, np.int64, shape.nbytes // 8)
        self._keys: NDArray[np.int64] = words[:num_keys].reshape(shape.keys)
        self._entries: NDArray[np.int64] = words[num_keys:].reshape(shape.entries)
        self._seed = _mixed(np.array([incarnation & 0xFFFF_FFFF_FFFF_FFFF], np.uint64))[0]
        self._weights = _odd_weights(3 + shape.lookahead)

    # -- speculator side ---------------------------------------------------------------------------

    def begin(self, slots: NDArray[np.integer], rounds: NDArray[np.integer], keys: NDArray[np.int64]) -> None:
        """Start the tables of ``rounds`` [b]: their outcomes are ``keys`` [b, num_outcomes] (or `NO_KEY`)."""
        self._keys[slots, rounds & 1] = keys

    def add_keys(
        self, slots: NDArray[np.integer], rounds: NDArray[np.integer], first_column: int, keys: NDArray[np.int64]
    ) -> None:
        """Name outcomes that were not known at `begin`: ``keys`` [b, n] go to columns from ``first_column``."""
        self._keys[slots, rounds & 1, first_column : first_column + keys.shape[1]] = keys

    def write(
        self,
        slots: NDArray[np.integer],
        generations: NDArray[np.integer],
        rounds: NDArray[np.integer],
        columns: NDArray[np.integer],
        keys: NDArray[np.int64],
        depths: NDArray[np.integer],
        tokens: NDArray[np.integer],
    ) -> None:
        """Publish n entries (all arguments [n], ``tokens`` [n, K]); tokens past the depth are ignored."""
        entries = np.empty((len(slots), _TOKENS + self.shape.lookahead), np.int64)
        entries[:, _DEPTH] = depths
        entries[:, _TOKENS:] = tokens
        entries[:, _CHECK] = self._check(generations, rounds, keys, entries)
        self._entries[slots, rounds & 1, columns] = entries

    def reply(
        self,
        slots: NDArray[np.integer],
        generations: NDArray[np.integer],
        rounds: NDArray[np.integer],
        keys: NDArray[np.int64],
        depths: NDArray[np.integer],
        tokens: NDArray[np.integer],
    ) -> None:
        """Answer outcomes ``keys`` [n] of ``rounds`` [n]; depth 0 says that there is no speculation."""
        columns = np.full(len(slots), self.shape.num_outcomes)
        self.write(slots, generations, rounds, columns, keys, depths, tokens)

    # -- verifier side -----------------------------------------------------------------------------

    def read(
        self,
        slots: NDArray[np.integer],
        generations: NDArray[np.integer],
        rounds: NDArray[np.integer],
        keys: NDArray[np.int64],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Look outcomes up in the table.  All arguments [b].

        Returns depth [b] (-1 where absent, stale or torn) and tokens [b, K].  Never waits.
        """
        match = self._keys[slots, rounds & 1] == keys[:, None]  # [b, num_outcomes]
        columns = match.argmax(axis=1) if match.shape[1] else np.zeros(len(slots), np.intp)
        depth, tokens = self._read_columns(slots, generations, rounds, keys, columns)
        depth[~match.any(axis=1)] = -1
        return depth, tokens

    def read_reply(
        self,
        slots: NDArray[np.integer],
        generations: NDArray[np.integer],
        rounds: NDArray[np.integer],
        keys: NDArray[np.int64],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Like `read`, for the speculator's answer to the outcomes."""
        columns = np.full(len(slots), self.shape.num_outcomes)
        return self._read_columns(slots, generations, rounds, keys, columns)

    # -- helpers -----------------------------------------------------------------------------------

    def _read_columns(
        self,
        slots: NDArray[np.integer],
        generations: NDArray[np.integer],
        rounds: NDArray[np.integer],
        keys: NDArray[np.int64],
        columns: NDArray[np.integer],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        entries = self._entries[slots, rounds & 1, columns]  # a copy: what is checked is what is used
        valid = entries[:, _CHECK] == self._check(generations, rounds, keys, entries)
        depth = np.where(valid, entries[:, _DEPTH], -1).astype(np.int32)
        return depth, entries[:, _TOKENS:].astype(np.int32)

    def _check(
        self,
        generations: NDArray[np.integer],
        rounds: NDArray[np.integer],
        keys: NDArray[np.int64],
        entries: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        stamp = (np.asarray(generations, np.int64) << 32) | np.asarray(rounds, np.int64)
        words = np.concatenate([stamp[:, None], keys[:, None], entries[:, _DEPTH:]], axis=1).view(np.uint64)
        total: NDArray[np.uint64] = ((words ^ (words >> np.uint64(29))) * self._weights).sum(axis=1) + self._seed
        return (total | np.uint64(1)).view(np.int64)  # never 0: zeroed memory is absent


def empty_keys(batch_size: int, num_outcomes: int) -> NDArray[np.int64]:
    """[batch_size, num_outcomes] filled with `NO_KEY`."""
    return np.full((batch_size, num_outcomes), NO_KEY, np.int64)


def _odd_weights(count: int) -> NDArray[np.uint64]:
    """Unrelated weights: with related ones (1, 2, 3 ... times a constant) token runs exist that sum up alike."""
    golden = np.uint64(0x9E37_79B9_7F4A_7C15)
    return _mixed(np.arange(1, count + 1, dtype=np.uint64) * golden) | np.uint64(1)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words in which every bit of the result hangs on every bit of the argument."""
    for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))
