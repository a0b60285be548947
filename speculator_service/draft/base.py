"""What the speculator asks of a draft model with its KV cache.

Vocabulary: a *slot* holds one sequence.  Its *trunk* is the KV of the sequence's own tokens by position.
A *branch* g of a slot is a continuation after the first ``prefix`` positions of the trunk; it owns
``lookahead`` KV cells.  *Adopting* a branch makes its first cells part of the trunk (cell numbers are
swapped, nothing is copied or computed).  Nothing here knows of verifiers, rounds or outcomes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class BranchStep(NamedTuple):
    """One decode step of b slots with G rows each: row 0 extends the trunk, rows 1..G-1 are branches.

    Dead rows compute nothing of use and write nowhere.  Trunk positions that a row attends to must have
    been computed, in an earlier step, or by row 0 of the same slot in this step or before.
    """

    slots: NDArray[np.int64]
    """[b]"""
    tokens: NDArray[np.int64]
    """[b, G] input token of each row."""
    prefix: NDArray[np.int64]
    """[b, G] trunk positions [0, prefix) that the row attends to; row 0: its own position (also seen)."""
    depth: NDArray[np.int64]
    """[b, G] own cell that the row writes, 0..lookahead-1; its position is ``prefix + depth``, it attends to own
    cells 0..depth. Row 0: 0 (its token is written to the trunk at position ``prefix``)."""
    live: NDArray[np.bool_]
    """[b, G]"""


class DraftModel(Protocol):
    """A draft model over ``max_slots`` slots of at most ``context_length`` positions."""

    vocab_size: int
    token_map: NDArray[np.int64] | None
    """[V'] the token of each column of the logits, which are V' wide; None: columns are tokens."""
    max_slots: int
    num_branches: int
    """G - 1: branches of each slot."""
    lookahead: int
    context_length: int

    def reserve(self, slot: int, length: int) -> bool:
        """Make room for trunk positions [0, length); False (and nothing changed) if there is none.

        Keeps what is there. The first call for a slot also takes its branch cells.
        """

    def release(self, slot: int) -> None:
        """Give back everything the slot holds. Releasing an empty slot does nothing."""

    def held_tokens(self, slot: int) -> int:
        """KV cells that the slot holds, those of its branches included."""

    def copy_trunk(self, source: int, slot: int, start: int, stop: int) -> bool:
        """Let positions [start, stop) of the trunk of ``slot``, reserved already, be those of ``source``.

        False, and nothing changed, if KV of this model cannot be copied.
        """

    def extend(self, slot: int, start: int, tokens: NDArray[np.integer]) -> torch.Tensor:
        """Compute trunk positions [start, start + len(tokens)); returns the last position's logits [V].

        Positions [0, start) must have been computed. Used for prompts, chunk by chunk.
        """

    def extend_one(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> torch.Tensor:
        """Compute one trunk position of each of b different slots (all arguments [b]); returns logits [b, V]."""

    def extend_each(
        self, slots: NDArray[np.int64], starts: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> torch.Tensor:
        """Compute trunk positions [start, start + count) of each of b different slots, in one forward.

        ``tokens`` [b, n], the others [b]; at least one position of each. Returns the logits [b, n, V] after every
        one; those beyond a count are anything finite.
        """

    def step(self, step: BranchStep) -> torch.Tensor:
        """Run one step over all live rows; returns logits [b, G, V] (dead rows: anything finite)."""

    def adopt(
        self,
        slots: NDArray[np.int64],
        branches: NDArray[np.int64],
        prefix: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> None:
        """Trunk positions [prefix, prefix + count) become the first ``count`` cells of the branch (1..G-1) by swapping.

        All arguments [b]; slots are different; ``prefix`` is the one the branch was stepped with.
        """

    @property
    def free_tokens(self) -> int:
        """KV cells that no slot holds."""
