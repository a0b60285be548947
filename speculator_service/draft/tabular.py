"""A draft model without a neural network, for tests of everything that drives a :class:`DraftModel`.

The logits are a seeded function of the tokens that a row really attends to, and every KV cell remembers the token
and the whole context it was computed with.  So a wrong cell, a stale cell or a cell never computed shows: as a
:class:`StaleCellError` if the attended cells do not form one sequence, and else as logits that differ from
:meth:`TabularDraft.next_logits` of the tokens one meant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from speculator_service.draft.base import BranchStep
from ssd_proto.errors import ConfigError

_BASE = 0x9E3779B97F4A7C15  # odd, so that multiplication mod 2**64 loses nothing
_MASK = (1 << 64) - 1
_NUM_STATES = 4099


class StaleCellError(AssertionError):
    """A row attends to a cell that was not computed, or computed in another context."""


class TabularDraft:
    """Implements :class:`DraftModel`; ``next_logits`` is the oracle.

    Args:
        max_slots, num_branches, lookahead, context_length: as in :class:`DraftModel`.
        vocab_size: number of tokens; logits are standard normal, scaled by 2.
        seed: two models with the same seed are the same model.
        order: logits depend on this many last tokens; None: on all of them (the strictest check).
        max_total_tokens: KV cells in all; default: enough for every slot.
        token_map: as in :class:`DraftModel`; the oracle's logits are always those of all tokens.
    """

    def __init__(
        self,
        max_slots: int,
        num_branches: int,
        lookahead: int,
        context_length: int,
        *,
        vocab_size: int = 64,
        seed: int = 0,
        order: int | None = None,
        max_total_tokens: int | None = None,
        token_map: Sequence[int] | None = None,
    ) -> None:
        if min(max_slots, lookahead, context_length, vocab_size) < 1 or num_branches < 0:
            raise ConfigError("max_slots, lookahead, context_length and vocab_size must be at least 1.")
        self.max_slots, self.num_branches, self.lookahead = max_slots, num_branches, lookahead
        self.context_length, self.vocab_size = context_length, vocab_size
        self.token_map = None if token_map is None else np.array(token_map, np.int64)
        self._order = order
        generator = torch.Generator().manual_seed(seed)
        self._table = torch.randn(_NUM_STATES, vocab_size, generator=generator) * 2.0
        self._columns = self._table if token_map is None else self._table[:, torch.from_numpy(self.token_map)]
        self._branch_cells = num_branches * lookahead
        self._capacity = max_total_tokens or max_slots * (context_length + self._branch_cells)
        self._held = np.full(max_slots, -1, np.int64)  # trunk cells; -1: the slot is empty
        # Column p + 1 is trunk position p; column 0 is the empty context, so that chains need no special case.
        self._trunk_token = np.full((max_slots, context_length + 1), -1, np.int64)
        self._trunk_hash = np.zeros((max_slots, context_length + 1), np.uint64)
        self._own_token = np.full((max_slots, num_branches + 1, lookahead), -1, np.int64)
        self._own_hash = np.zeros((max_slots, num_branches + 1, lookahead), np.uint64)

    # ------------------------------------------------------------------ oracle and inspection

    def next_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [V] after ``tokens``, computed without any cells."""
        context = [int(t) for t in tokens]
        return self._table[_sequence_hash(context[-self._order :] if self._order else context) % _NUM_STATES]

    def trunk_tokens(self, slot: int) -> list[int]:
        """Tokens of the longest prefix of the trunk whose cells form one sequence."""
        length = int(self._valid_lengths(np.array([slot]))[0])
        return [int(t) for t in self._trunk_token[slot, 1 : length + 1]]

    # ------------------------------------------------------------------ DraftModel

    @property
    def free_tokens(self) -> int:
        """KV cells that no slot holds."""
        used = self._held[self._held >= 0]
        return int(self._capacity - used.sum() - len(used) * self._branch_cells)

    def reserve(self, slot: int, length: int) -> bool:
        """Make room for trunk positions [0, length); see :class:`DraftModel`."""
        if length > self.context_length:
            return False
        held = int(self._held[slot])
        need = length - max(held, 0) + (self._branch_cells if held < 0 else 0)
        if need > self.free_tokens:
            return False
        self._held[slot] = max(held, length)
        return True

    def release(self, slot: int) -> None:
        """Give back everything the slot holds; its cells count as never computed."""
        self._held[slot] = -1
        self._trunk_token[slot] = -1
        self._own_token[slot] = -1

    def held_tokens(self, slot: int) -> int:
        """KV cells that the slot holds, those of its branches included."""
        held = int(self._held[slot])
        return held + self._branch_cells if held >= 0 else 0

    def copy_trunk(self, source: int, slot: int, start: int, stop: int) -> bool:
        """Let positions [start, stop) of the trunk of ``slot`` be those of ``source``."""
        self._check_held(np.array([source, slot]), np.array([stop, stop]))
        for cells in (self._trunk_token, self._trunk_hash):
            cells[slot, start + 1 : stop + 1] = cells[source, start + 1 : stop + 1]
        return True

    def extend(self, slot: int, start: int, tokens: NDArray[np.integer]) -> torch.Tensor:
        """Compute trunk positions [start, start + len(tokens)); returns the last position's logits [V]."""
        if len(tokens) == 0:
            raise ValueError("extend needs at least one token")
        logits = torch.empty(0)
        for offset, token in enumerate(tokens):
            logits = self.extend_one(np.array([slot]), np.array([start + offset]), np.array([token], np.int64))[0]
        return logits

    def extend_one(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> torch.Tensor:
        """Compute one trunk position of each of b different slots; returns logits [b, V]."""
        self._write_trunk(slots, positions, tokens)
        return self._logits(self._windows(slots, positions + 1))

    def extend_each(
        self, slots: NDArray[np.int64], starts: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> torch.Tensor:
        """Compute ``counts`` [b] trunk positions of each of b slots; returns logits [b, n, V] (beyond: zeros)."""
        out = torch.zeros(*tokens.shape, self._columns.shape[1])
        for offset in range(tokens.shape[1]):
            i = np.flatnonzero(offset < counts)
            out[i, offset] = self.extend_one(slots[i], starts[i] + offset, tokens[i, offset])
        return out

    def step(self, step: BranchStep) -> torch.Tensor:
        """One step over all live rows; returns logits [b, G, V] (dead rows: zeros)."""
        b, width = step.tokens.shape
        if width > self.num_branches + 1:
            raise ValueError(f"{width} rows in a step, at most {self.num_branches + 1} were asked for")
        out = torch.zeros(b, width, self._columns.shape[1])
        i = np.nonzero(step.live[:, 0])[0]
        if len(i):
            out[i, 0] = self.extend_one(step.slots[i], step.prefix[i, 0], step.tokens[i, 0])
        i, g = np.nonzero(step.live)
        i, g = i[g > 0], g[g > 0]
        if len(i):
            out[i, g] = self._branch_rows(step.slots[i], g, step.tokens[i, g], step.prefix[i, g], step.depth[i, g])
        return out

    def adopt(
        self,
        slots: NDArray[np.int64],
        branches: NDArray[np.int64],
        prefix: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> None:
        """Swap trunk positions [prefix, prefix + count) with the first ``count`` cells of the branch."""
        if len(np.unique(slots)) != len(slots) or (branches < 1).any() or (counts > self.lookahead).any():
            raise ValueError("adopt: slots must differ, branches start at 1, counts are at most the lookahead")
        self._check_held(slots, prefix + counts)
        i, w = np.nonzero(np.arange(self.lookahead) < counts[:, None])
        s, g, column = slots[i], branches[i], prefix[i] + w + 1
        if (self._own_token[s, g, w] < 0).any():
            raise StaleCellError("adopt: a branch cell was never computed")
        for trunk, own in ((self._trunk_token, self._own_token), (self._trunk_hash, self._own_hash)):
            trunk[s, column], own[s, g, w] = own[s, g, w], trunk[s, column].copy()

    # ------------------------------------------------------------------ cells

    def _check_held(self, slots: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        if (self._held[slots] < lengths).any():
            raise StaleCellError(f"trunk positions beyond the reserved ones: need {lengths}, have {self._held[slots]}")

    def _valid_lengths(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """[b] number of leading trunk cells that form one sequence."""
        token, chain = self._trunk_token[slots, 1:], self._trunk_hash[slots]
        good = (token >= 0) & (chain[:, 1:] == _chain(chain[:, :-1], token))
        return np.where(good.all(1), self.context_length, np.argmin(good, 1)).astype(np.int64)

    def _check_trunk(self, slots: NDArray[np.int64], prefix: NDArray[np.int64]) -> None:
        valid = self._valid_lengths(slots)
        if (valid < prefix).any():
            raise StaleCellError(f"rows attend to trunk positions [0, {prefix}), only {valid} are one sequence")

    def _write_trunk(self, slots: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        if len(np.unique(slots)) != len(slots):
            raise ValueError("slots must differ")
        self._check_tokens(tokens)
        self._check_held(slots, positions + 1)
        self._check_trunk(slots, positions)
        self._trunk_token[slots, positions + 1] = tokens
        self._trunk_hash[slots, positions + 1] = _chain(self._trunk_hash[slots, positions], tokens)

    def _branch_rows(
        self,
        slots: NDArray[np.int64],
        branches: NDArray[np.int64],
        tokens: NDArray[np.int64],
        prefix: NDArray[np.int64],
        depth: NDArray[np.int64],
    ) -> torch.Tensor:
        """Write and attend for n branch rows (all arguments [n]); returns logits [n, V]."""
        self._check_tokens(tokens)
        if (depth < 0).any() or (depth >= self.lookahead).any() or (prefix + depth >= self.context_length).any():
            raise ValueError("depth or position out of range")
        self._check_trunk(slots, prefix)
        own_token, own_hash = self._own_token[slots, branches], self._own_hash[slots, branches]
        before = np.concatenate([self._trunk_hash[slots, prefix][:, None], own_hash], 1)
        good = (own_token >= 0) & (own_hash == _chain(before[:, :-1], own_token))
        if (~good & (np.arange(self.lookahead) < depth[:, None])).any():
            raise StaleCellError("a branch row attends to an own cell that does not continue its prefix")
        n = np.arange(len(slots))
        self._own_token[slots, branches, depth] = tokens
        self._own_hash[slots, branches, depth] = _chain(before[n, depth], tokens)
        length = prefix + depth + 1
        return self._logits(self._windows(slots, length, branches, prefix))

    def _windows(
        self,
        slots: NDArray[np.int64],
        length: NDArray[np.int64],
        branches: NDArray[np.int64] | None = None,
        prefix: NDArray[np.int64] | None = None,
    ) -> NDArray[np.uint64]:
        """[n] hash of the last ``order`` attended tokens (or of all): polynomial, so windows are a difference."""

        def hash_at(count: NDArray[np.int64]) -> NDArray[np.uint64]:
            if branches is None or prefix is None:
                return self._trunk_hash[slots, count]
            in_own = count > prefix
            own = self._own_hash[slots, branches, np.where(in_own, count - prefix - 1, 0)]
            return np.where(in_own, own, self._trunk_hash[slots, np.minimum(count, prefix)])

        if self._order is None:
            return hash_at(length)
        skipped = np.maximum(length - self._order, 0)
        power = np.array([pow(_BASE, int(m), 1 << 64) for m in length - skipped], np.uint64)
        return hash_at(length) - hash_at(skipped) * power

    def _check_tokens(self, tokens: NDArray[np.int64]) -> None:
        if (tokens < 0).any() or (tokens >= self.vocab_size).any():
            raise ValueError("token id outside the vocabulary")

    def _logits(self, windows: NDArray[np.uint64]) -> torch.Tensor:
        return self._columns[torch.from_numpy((windows % np.uint64(_NUM_STATES)).astype(np.int64))]


def _chain(before: NDArray[np.uint64], token: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash of a context and one more token, elementwise, mod 2**64."""
    return before * np.uint64(_BASE) + token.astype(np.uint64) + np.uint64(1)


def _sequence_hash(tokens: Sequence[int]) -> int:
    value = 0
    for token in tokens:
        value = (value * _BASE + token + 1) & _MASK
    return value
