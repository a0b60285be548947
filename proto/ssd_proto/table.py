"""The speculation table: the speculation cache as the verifier sees it, in memory both sides map.

Per verifier slot there are two tables, used in turn by even and odd rounds.  The protocol is
lock-step per slot (table r is rewritten only after outcome r + 1, which is posted after table r was
read), so two suffice.  Every entry carries a checksum over everything that identifies it: channel
incarnation, generation, round, outcome, depth, tokens.  An entry that is stale, torn or not yet
visible fails the checksum and counts as absent; there are no locks and no ordering assumptions.

Column ``num_outcomes`` of each table is the reply: the speculator's answer to the outcome that really
happened, whether it was in the table or not.

The distributions q of sampled tokens lie apart, by the row of the draft engine that made them: verifiers
have many more slots than are speculated for.  They enter the checksum of their entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssd_proto.records import NO_KEY, Entries

_CHECK, _FORM, _TOKENS = 0, 1, 2
_FINAL = 1 << 7
_ROW_SHIFT = 8
"""The word ``form``: depth, whether it is final, and the row of q plus one (0 where nothing was sampled)."""


@dataclass(frozen=True, slots=True)
class TableShape:
    """Sizes of a table. All positive, but ``num_outcomes`` may be 0: then there are replies only."""

    num_slots: int
    num_outcomes: int
    """Outcomes prepared per sequence: sum of the fan-out list (B, or MQ)."""
    lookahead: int
    """K."""
    num_kept: int = 0
    """m: probabilities sent per sampled token; 0: none are."""
    num_rows: int = 0
    """Sequences that are speculated for at once."""

    @property
    def keys(self) -> tuple[int, int, int]:
        return (self.num_slots, 2, self.num_outcomes)

    @property
    def entries(self) -> tuple[int, int, int, int]:
        return (self.num_slots, 2, self.num_outcomes + 1, _TOKENS + self.lookahead)

    @property
    def probs(self) -> tuple[int, int, int, int, int]:
        return (self.num_rows, 2, self.num_outcomes + 1, self.lookahead, self.num_kept)

    @property
    def nbytes(self) -> int:
        return 8 * (int(np.prod(self.keys)) + int(np.prod(self.entries)) + int(np.prod(self.probs)))


class TableRead(NamedTuple):
    """Entries as the verifier found them, row by row."""

    depth: NDArray[np.int32]
    """[b] -1 where absent, stale or torn."""
    is_final: NDArray[np.bool_]
    """[b] whether there is an entry that will not be continued."""
    tokens: NDArray[np.int32]
    """[b, K] meaningless past the depth."""
    q: NDArray[np.int64]
    """[b, K, m] `ssd_proto.records.pack_probs`; 0 where nothing was sampled, and past the depth."""

    def discard(self, rows: NDArray[np.bool_]) -> None:
        """Let ``rows`` [b] be absent."""
        self.depth[rows], self.is_final[rows], self.q[rows] = -1, False, 0


class SpeculationTable:
    """View of a table in ``buffer`` (at least ``shape.nbytes`` bytes, zeroed by its creator).

    One writer (the speculator) and one reader (the verifier).  ``incarnation`` is agreed in the
    handshake and enters every checksum.
    """

    def __init__(self, shape: TableShape, buffer: memoryview | bytearray, incarnation: int) -> None:
        self.shape = shape
        words = np.frombuffer(buffer, np.int64, shape.nbytes // 8)
        keys, entries = int(np.prod(shape.keys)), int(np.prod(shape.entries))
        self._keys: NDArray[np.int64] = words[:keys].reshape(shape.keys)
        self._entries: NDArray[np.int64] = words[keys : keys + entries].reshape(shape.entries)
        self._probs: NDArray[np.int64] = words[keys + entries :].reshape(shape.probs)
        self._seed = _mixed(np.array([incarnation & 0xFFFF_FFFF_FFFF_FFFF], np.uint64))[0]
        weights = _odd_weights(3 + shape.lookahead + shape.lookahead * shape.num_kept)
        self._weights, self._prob_weights = weights[: 3 + shape.lookahead], weights[3 + shape.lookahead :]

    # -- speculator side ---------------------------------------------------------------------------

    def begin(self, slots: NDArray[np.integer], rounds: NDArray[np.integer], keys: NDArray[np.int64]) -> None:
        """Name the outcomes ``keys`` [b, num_outcomes] (or `NO_KEY`) of the tables of ``rounds`` [b].

        Once more for a table of which more outcomes have become known.
        """
        self._keys[slots, rounds & 1] = keys

    def write(self, entries: Entries) -> None:
        """Publish entries. None of ``entries`` may be out of the table's range."""
        slots, generations, rounds, columns, keys, depths, is_final, tokens, q = entries
        words = np.empty((len(slots), _TOKENS + self.shape.lookahead), np.int64)
        words[:, _FORM] = depths + np.where(is_final, _FINAL, 0)
        words[:, _TOKENS:] = tokens
        if q is None:
            words[:, _CHECK] = _sealed(self._digest(generations, rounds, keys, words))
        else:
            words[:, _FORM] += (q.rows.astype(np.int64) + 1) << _ROW_SHIFT
            digest = self._digest(generations, rounds, keys, words) + self._probs_digest(q.words)
            words[:, _CHECK] = _sealed(digest)
            self._probs[q.rows, rounds & 1, columns] = q.words
        self._entries[slots, rounds & 1, columns] = words

    # -- verifier side -----------------------------------------------------------------------------

    def read(
        self,
        slots: NDArray[np.integer],
        generations: NDArray[np.integer],
        rounds: NDArray[np.integer],
        keys: NDArray[np.int64],
    ) -> TableRead:
        """Look outcomes up in the table.  All arguments [b].  Never waits."""
        match = self._keys[slots, rounds & 1] == keys[:, None]  # [b, num_outcomes]
        columns = match.argmax(axis=1) if match.shape[1] else np.zeros(len(slots), np.intp)
        found = self._read_columns(slots, generations, rounds, keys, columns)
        found.discard(~match.any(axis=1))
        return found

    def read_reply(
        self,
        slots: NDArray[np.integer],
        generations: NDArray[np.integer],
        rounds: NDArray[np.integer],
        keys: NDArray[np.int64],
    ) -> TableRead:
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
    ) -> TableRead:
        entries = self._entries[slots, rounds & 1, columns]  # a copy: what is checked is what is used
        digest = self._digest(generations, rounds, keys, entries)
        form = entries[:, _FORM]
        rows = (form >> _ROW_SHIFT) - 1
        sampled = np.flatnonzero((rows >= 0) & (rows < self.shape.num_rows))
        words = self._probs[rows[sampled], rounds[sampled] & 1, columns[sampled]]  # a copy, likewise
        digest[sampled] += self._probs_digest(words)
        valid = entries[:, _CHECK] == _sealed(digest)
        depth = np.where(valid, form & (_FINAL - 1), -1).astype(np.int32)
        is_final = valid & (form & _FINAL != 0)
        q = np.zeros((len(slots), *self.shape.probs[3:]), np.int64)
        is_drafted = np.arange(self.shape.lookahead) < depth[sampled, None]
        q[sampled] = np.where(is_drafted[:, :, None], words, 0)
        return TableRead(depth, is_final, entries[:, _TOKENS:].astype(np.int32), q)

    def _digest(
        self,
        generations: NDArray[np.integer],
        rounds: NDArray[np.integer],
        keys: NDArray[np.int64],
        entries: NDArray[np.int64],
    ) -> NDArray[np.uint64]:
        stamp = (np.asarray(generations, np.int64) << 32) | np.asarray(rounds, np.int64)
        words = np.concatenate([stamp[:, None], keys[:, None], entries[:, _FORM:]], axis=1)
        digest: NDArray[np.uint64] = _weighted(words, self._weights) + self._seed
        return digest

    def _probs_digest(self, words: NDArray[np.int64]) -> NDArray[np.uint64]:
        return _weighted(np.ascontiguousarray(words).reshape(len(words), len(self._prob_weights)), self._prob_weights)


def _weighted(words: NDArray[np.int64], weights: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """[n] digest of words [n, w]."""
    bits = words.view(np.uint64)
    digest: NDArray[np.uint64] = ((bits ^ (bits >> np.uint64(29))) * weights).sum(axis=1)
    return digest


def _sealed(digest: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Never 0: zeroed memory is absent."""
    return (digest | np.uint64(1)).view(np.int64)


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
