"""Branches as rows of SGLang's block table, for its own decode backends (triton, fa3, flashinfer, torch_native).

Row (slot, g) lists, by position, the trunk's cells up to the branch's prefix and the branch's own cells after it. The
trunk's cells are aliased, never copied. Rows persist between steps: only columns that changed are written, about
2K after an adoption, none in the later steps of a branch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from speculator_service.draft.cells import CellTable

_FAR = 1024
"""Columns from which on a copy on the device is cheaper than listing them."""


class AliasedRows:
    """Keeps the device's block table in step with a :class:`CellTable`.

    Args:
        cells: the host's truth.
        table: [rows, columns] int32, SGLang's ``req_to_token``, on the device.
        row_ids: [max_slots, G] the row of each slot and branch; g = 0 is the trunk itself.
    """

    def __init__(self, cells: CellTable, table: torch.Tensor, row_ids: NDArray[np.int64]) -> None:
        self._cells = cells
        self._table = table
        self.row_ids = row_ids
        self._known = np.zeros(row_ids.shape, np.int64)  # leading columns that equal the trunk
        self._own_at = np.full(row_ids.shape, -1, np.int64)  # prefix after which the own cells stand, -1: nowhere

    def sync(self, slots: NDArray[np.int64], branches: NDArray[np.int64], prefix: NDArray[np.int64]) -> None:
        """Bring n different rows up to date for a step with these prefixes; all [n]. Does not wait for the device.

        Rows with branch 0 get the trunk's columns [0, prefix), others also their own cells after it.
        """
        self._catch_up(slots, branches, prefix)
        width = self._cells.own.shape[2]
        known, is_branch = self._known[slots, branches], branches > 0
        start = np.minimum(known, prefix)
        stale = (known < prefix) | (is_branch & (self._own_at[slots, branches] != prefix))
        end = np.where(is_branch, np.minimum(prefix + width, self._cells.trunk.shape[1]), prefix)
        i = np.nonzero(stale)[0]
        counts = end[i] - start[i]
        if not len(i):
            return
        which = np.repeat(i, counts)
        column = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + start[which]
        slot, branch = slots[which], branches[which]
        step = column - prefix[which]
        own = self._cells.own[slot, branch, np.clip(step, 0, width - 1)]
        value = np.where(step >= 0, own, self._cells.trunk[slot, column])
        rows, columns, values = upload(self._table.device, self.row_ids[slot, branch], column, value)
        self._table[rows, columns] = values.to(self._table.dtype)
        # A branch overwrites what its row knew of the trunk beyond the prefix.
        self._known[slots[i], branches[i]] = prefix[i]
        self._own_at[slots[i], branches[i]] = np.where(is_branch[i], prefix[i], -1)

    def _catch_up(self, slots: NDArray[np.int64], branches: NDArray[np.int64], prefix: NDArray[np.int64]) -> None:
        """Copy what rows lack of a long trunk from the trunk's own row, on the device.

        Only new rows lack that much. To list each column on the host would take most of a second for 100 000 tokens.
        """
        far = (branches > 0) & (prefix - self._known[slots, branches] > _FAR)
        for slot in np.unique(slots[far]).tolist():
            mine = branches[far & (slots == slot)]
            end = int(min(self._known[slot, 0], prefix[far & (slots == slot)].min()))
            trunk, rows = int(self.row_ids[slot, 0]), upload(self._table.device, self.row_ids[slot, mine])[0]
            self._table[rows, :end] = self._table[trunk, :end]
            self._known[slot, mine] = np.maximum(self._known[slot, mine], end)

    def adopted(self, slots: NDArray[np.int64], branches: NDArray[np.int64], prefix: NDArray[np.int64]) -> None:
        """The trunks changed from ``prefix`` on, and so did the own cells of ``branches``; all [b]."""
        self._known[slots] = np.minimum(self._known[slots], prefix[:, None])
        self._own_at[slots, branches] = -1

    def released(self, slot: int) -> None:
        """Nothing in the slot's rows is of use any more."""
        self._known[slot] = 0
        self._own_at[slot] = -1


def upload(device: torch.device, *arrays: NDArray[np.int64]) -> list[torch.Tensor]:
    """Copies of 1-d arrays on the device by one transfer, which the host does not wait for."""
    host = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        # Pinned memory of torch's caching allocator is not reused before the transfer has been done.
        host = host.pin_memory().to(device, non_blocking=True)
    return list(host.split([len(a) for a in arrays]))
