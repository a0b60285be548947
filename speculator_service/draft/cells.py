"""Which KV cell holds which trunk position or branch step. Host memory only: no model, no device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK = 64
"""Trunks grow by this many cells, so that a round rarely has to take any."""


class CellTable:
    """Owns all KV cells and says who holds them.

    Every cell has exactly one holder: a trunk position, a branch of a slot, or the free list. Rows that read
    a trunk hold nothing. Cell 0 belongs to nobody: padding and dead rows write there.
    """

    trunk: NDArray[np.int64]
    """[max_slots, context_length] cell of each trunk position, 0 where none is held."""
    own: NDArray[np.int64]
    """[max_slots, 1 + num_branches, lookahead] cells of the branches; index 0 (the trunk's own row) is unused."""

    def __init__(
        self, cells: NDArray[np.int64], max_slots: int, num_branches: int, lookahead: int, context_length: int
    ) -> None:
        self.trunk = np.zeros((max_slots, context_length), np.int64)
        self.own = np.zeros((max_slots, 1 + num_branches, lookahead), np.int64)
        self._held = np.full(max_slots, -1, np.int64)  # trunk cells of a slot; -1: it has no branch cells either
        self._free = cells.astype(np.int64, copy=True)  # a stack: [0, _num_free) are free
        self._num_free = len(cells)

    @property
    def num_free(self) -> int:
        """Cells that no slot holds."""
        return self._num_free

    def held_by(self, slots: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """Trunk positions of the slots that have a cell."""
        return np.maximum(self._held[slots], 0)

    def num_held(self, slot: int) -> int:
        """Cells of the slot, those of its branches included."""
        held = int(self._held[slot])
        return held + self.own[slot, 1:].size if held >= 0 else 0

    def reserve(self, slot: int, length: int) -> bool:
        """Give trunk positions [0, length) cells, and the slot its branch cells if it has none.

        Returns False, and changes nothing, if there are not enough free cells or positions.
        """
        context_length = self.trunk.shape[1]
        held = int(self._held[slot])
        if length <= held:
            return True
        if length > context_length:
            return False
        start = max(held, 0)
        branch = self.own[slot, 1:]
        num_branch = branch.size if held < 0 else 0
        room = self._num_free - num_branch
        if start + room < length:
            return False
        end = min(-(-length // _BLOCK) * _BLOCK, context_length, start + room)
        if num_branch:
            branch[:] = self._take(num_branch).reshape(branch.shape)
        self.trunk[slot, start:end] = self._take(end - start)
        self._held[slot] = end
        return True

    def release(self, slot: int) -> None:
        """Take back every cell of the slot. Releasing an empty slot does nothing."""
        held = int(self._held[slot])
        if held < 0:
            return
        self._give(self.trunk[slot, :held])
        self._give(self.own[slot, 1:].reshape(-1))
        self.trunk[slot] = 0
        self.own[slot] = 0
        self._held[slot] = -1

    def adopt(
        self,
        slots: NDArray[np.int64],
        branches: NDArray[np.int64],
        prefix: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> None:
        """Swap trunk cells [prefix, prefix + count) with the first ``count`` cells of the branch; all [b]."""
        if (prefix + counts > self._held[slots]).any():
            raise ValueError("adopt: the trunk positions are not reserved")
        i, w = np.nonzero(np.arange(self.own.shape[2]) < counts[:, None])
        s, g, p = slots[i], branches[i], prefix[i] + w
        self.trunk[s, p], self.own[s, g, w] = self.own[s, g, w], self.trunk[s, p]

    def _take(self, count: int) -> NDArray[np.int64]:
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def _give(self, cells: NDArray[np.int64]) -> None:
        self._free[self._num_free : self._num_free + len(cells)] = cells
        self._num_free += len(cells)
