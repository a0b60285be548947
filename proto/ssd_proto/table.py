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
_STAMP = 1
"""Words before an entry where it is digested."""
_FINAL = 1 << 7
_ROW_SHIFT = 8
"""The word ``form``: depth, whether it is final, and the row of q plus one (0 where nothing was sampled)."""


@dataclass(frozen=True, slots=True)
class TableShape:
    """Sizes of a table. All positive, but ``num_outcomes`` may be 0: then there are replies only."""

    num_slots: int
    num_outcomes: int
    """Outcomes prepared per sequence at most: sum of the longest fan-out list (B, or MQ)."""
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
    q: NDArray[np.int64] | None
    """[b, K, m] `ssd_proto.records.pack_probs`; 0 where nothing was sampled, and past the depth. None: all is 0."""


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
        self._checks = self._entries[..., _CHECK]
        self._width = _TOKENS + shape.lookahead
        # The same by line: taking lines of two dimensions is several times as fast as of four.
        self._key_lines = self._keys.reshape(2 * shape.num_slots, shape.num_outcomes)
        self._entry_lines = self._entries.reshape(-1, self._width)
        self._seed = _mixed(np.array([incarnation & 0xFFFF_FFFF_FFFF_FFFF], np.uint64))
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
        words = self._stamped(generations, rounds, keys)
        form = words[:, _STAMP + _FORM]
        form[:] = is_final
        form *= _FINAL
        form += depths
        words[:, _STAMP + _TOKENS :] = tokens
        if q is not None:
            form += (q.rows.astype(np.int64) + 1) << _ROW_SHIFT
            self._probs[q.rows, rounds & 1, columns] = q.words
        digest = self._digest(words) if q is None else self._digest(words) + self._probs_digest(q.words)
        words[:, _STAMP + _CHECK] = _sealed(digest)
        self._entries[slots, rounds & 1, columns] = words[:, _STAMP:]

    # -- verifier side -----------------------------------------------------------------------------

    def read(
        self,
        slots: NDArray[np.integer],
        generations: NDArray[np.integer],
        rounds: NDArray[np.integer],
        keys: NDArray[np.int64],
    ) -> TableRead:
        """Look outcomes up in the table.  All arguments [b].  Never waits."""
        match = self._key_lines.take(_half(slots, rounds), 0) == keys[:, None]  # [b, num_outcomes]
        if not match.shape[1]:
            return self._read_columns(slots, generations, rounds, keys, np.zeros(len(slots), np.intp), match.any(1))
        columns = match.argmax(axis=1)
        return self._read_columns(slots, generations, rounds, keys, columns, match[np.arange(len(slots)), columns])

    def read_reply(
        self,
        slots: NDArray[np.integer],
        generations: NDArray[np.integer],
        rounds: NDArray[np.integer],
        keys: NDArray[np.int64],
    ) -> TableRead:
        """Like `read`, for the speculator's answer to the outcomes."""
        columns = np.full(len(slots), self.shape.num_outcomes)
        return self._read_columns(slots, generations, rounds, keys, columns, None)

    def marks(self, slots: NDArray[np.integer], rounds: NDArray[np.integer]) -> bytes:
        """Differs from what it was if entries of these tables [b] were written since; almost surely so.

        A fraction of the price of `read`, for those who wait.
        """
        checks: bytes = self._checks[slots, rounds & 1].tobytes()
        return checks

    # -- helpers -----------------------------------------------------------------------------------

    def _read_columns(
        self,
        slots: NDArray[np.integer],
        generations: NDArray[np.integer],
        rounds: NDArray[np.integer],
        keys: NDArray[np.int64],
        columns: NDArray[np.integer],
        is_named: NDArray[np.bool_] | None,
    ) -> TableRead:
        """``is_named`` [b]: False where the entry is not that of the key; None: all are."""
        words = self._stamped(generations, rounds, keys)
        at = _half(slots, rounds) * (self.shape.num_outcomes + 1) + columns
        words[:, _STAMP:] = self._entry_lines.take(at, 0)  # a copy: what is checked is what is used
        check, form = words[:, _STAMP + _CHECK].copy(), words[:, _STAMP + _FORM]
        words[:, _STAMP + _CHECK] = keys
        digest = self._digest(words)
        sampled = self._sampled_among(form)
        if len(sampled):
            at_row = (form[sampled] >> _ROW_SHIFT) - 1
            probs = self._probs[at_row, rounds[sampled] & 1, columns[sampled]]  # a copy, likewise
            digest[sampled] += self._probs_digest(probs)
        valid = check == _sealed(digest)
        if is_named is not None:
            valid &= is_named
        depth = np.where(valid, form & (_FINAL - 1), -1).astype(np.int32)
        is_final = valid & (form & _FINAL != 0)
        q = None
        if len(sampled):
            q = np.zeros((len(slots), *self.shape.probs[3:]), np.int64)
            is_drafted = np.arange(self.shape.lookahead) < depth[sampled, None]
            q[sampled] = np.where(is_drafted[:, :, None], probs, 0)
        return TableRead(depth, is_final, words[:, _STAMP + _TOKENS :].astype(np.int32), q)

    def _sampled_among(self, form: NDArray[np.int64]) -> NDArray[np.intp]:
        """Places of the entries that say that they are sampled."""
        places = (form >= 1 << _ROW_SHIFT).nonzero()[0]
        return places[form[places] >> _ROW_SHIFT <= self.shape.num_rows] if len(places) else places

    def _stamped(
        self, generations: NDArray[np.integer], rounds: NDArray[np.integer], keys: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """[n, 1 + words of an entry]: what is digested of n entries, as far as it is not in them.

        The key is where the check word will be: so the entry lies behind its stamp in one piece.
        """
        words = np.empty((len(keys), _STAMP + self._width), np.int64)
        stamp = words[:, 0]
        stamp[:] = generations
        stamp <<= 32
        stamp |= rounds
        words[:, _STAMP + _CHECK] = keys
        return words

    def _digest(self, words: NDArray[np.int64]) -> NDArray[np.uint64]:
        digest: NDArray[np.uint64] = _weighted(words, self._weights) + self._seed
        return digest

    def _probs_digest(self, words: NDArray[np.int64]) -> NDArray[np.uint64]:
        return _weighted(np.ascontiguousarray(words).reshape(len(words), len(self._prob_weights)), self._prob_weights)


_SHIFT = np.uint64(29)


def _weighted(words: NDArray[np.int64], weights: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """[n] digest of words [n, w]."""
    bits = words.view(np.uint64)
    digest: NDArray[np.uint64] = np.einsum("ij,j->i", bits ^ (bits >> _SHIFT), weights)
    return digest


def _half(slots: NDArray[np.integer], rounds: NDArray[np.integer]) -> NDArray[np.integer]:
    """[b] line of the table of ``rounds`` among those of all slots."""
    return 2 * slots + (rounds & 1)


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
