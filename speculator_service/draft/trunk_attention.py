"""Attention for CPU: all rows of a slot share one gather of its trunk, and each layer is one call of SDPA.

A decode backend that works row by row gathers a trunk once per row. Here the keys of a slot are gathered once: the
trunk, followed by the own cells of all its branches; a mask says which row sees which key. Keys and mask are the
same in every layer, so they are built once per step (:class:`AttentionPlan`).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from speculator_service.draft import kernels
from speculator_service.draft.cells import CellTable


class AttentionPlan:
    """Who attends to what in one forward of b slots with G rows each, n = b * G."""

    positions: torch.Tensor
    """[n] of the rows."""

    def __init__(
        self,
        keys: NDArray[np.int64],
        key_positions: NDArray[np.int64],
        query_positions: NDArray[np.int64],
        allowed: NDArray[np.bool_],
        written: NDArray[np.int64],
    ) -> None:
        """Shapes: keys and key_positions [b, S], query_positions [b, G], allowed [b, G, S], written [b, G]."""
        self.batch, self.rows = query_positions.shape
        self.positions = torch.from_numpy(query_positions.reshape(-1))
        self.keys = torch.from_numpy(keys.reshape(-1))  # [b * S] cells to gather
        self.written = torch.from_numpy(written.reshape(-1))  # [n] cell that each row's key and value go to
        self.key_positions = key_positions
        self.query_positions = query_positions
        self.allowed = allowed
        self._bias: dict[tuple[int, int, torch.dtype], torch.Tensor | None] = {}

    def bias(self, window: int, heads_per_key: int, dtype: torch.dtype) -> torch.Tensor | None:
        """[b, 1, G * heads_per_key, S] with 0 and -inf, or None if every row sees every key.

        ``window`` is the distance to the farthest key seen, -1 for no limit.
        """
        key = (window, heads_per_key, dtype)
        if key not in self._bias:
            self._bias[key] = self._make_bias(window, heads_per_key, dtype)
        return self._bias[key]

    def _make_bias(self, window: int, heads_per_key: int, dtype: torch.dtype) -> torch.Tensor | None:
        batch, rows, length = self.allowed.shape
        if window < 0 and self.allowed.all():
            return None
        bias = torch.empty(batch, 1, rows * heads_per_key, length)
        kernels.fill_bias(self.allowed, self.key_positions, self.query_positions, window, bias.numpy())
        return bias.to(dtype)


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan, *, scale: float, window: int
) -> torch.Tensor:
    """softmax(q k^T * scale + bias) v over the cells of the plan.

    Args:
        q: [n, heads, D].
        keys: [cells, key_heads, D], the layer's whole buffer; heads is a multiple of key_heads.
        values: [cells, key_heads, Dv].
        plan: cells and mask.
        scale: factor of the scores.
        window: distance to the farthest key seen, -1 for no limit.

    Returns:
        [n, heads * Dv] in the dtype of ``q``.
    """
    b, g = plan.batch, plan.rows
    num_keys, head_dim = keys.shape[1], keys.shape[2]
    r = q.shape[1] // num_keys
    # The r query heads of a key head become rows: the keys are then read once for all of them.
    grouped = q.view(b, g, num_keys, r, head_dim).permute(0, 2, 1, 3, 4).reshape(b, num_keys, g * r, head_dim)
    gathered_keys = keys.index_select(0, plan.keys).view(b, -1, num_keys, head_dim).transpose(1, 2)
    gathered_values = values.index_select(0, plan.keys).view(b, -1, num_keys, values.shape[2]).transpose(1, 2)
    bias = plan.bias(window, r, q.dtype)
    out = F.scaled_dot_product_attention(grouped, gathered_keys, gathered_values, attn_mask=bias, scale=scale)
    return out.view(b, num_keys, g, r, -1).permute(0, 2, 1, 3, 4).reshape(b * g, -1)


def plan_extend(cells: CellTable, slot: int, start: int, count: int) -> AttentionPlan:
    """Rows are trunk positions [start, start + count) of one slot, each sees itself and all before."""
    positions = np.arange(start + count)[None]
    trunk = cells.trunk[slot, None, : start + count]
    queries = positions[:, start:].copy()
    return AttentionPlan(trunk, positions, queries, positions[:, None] <= queries[:, :, None], trunk[:, start:].copy())


def plan_decode(
    cells: CellTable,
    slots: NDArray[np.int64],
    branches: NDArray[np.int64],
    prefix: NDArray[np.int64],
    depth: NDArray[np.int64],
    live: NDArray[np.bool_],
) -> AttentionPlan:
    """One step; slots [b], branches [G] (0: the trunk's own row), the others [b, G].

    A dead row writes to cell 0 and sees the first key, so that its output is finite.
    """
    b, g = prefix.shape
    live = np.ascontiguousarray(live)
    prefix, depth = (np.ascontiguousarray(np.where(live, values, 0)) for values in (prefix, depth))
    positions = prefix + depth
    length, width = int(prefix.max(initial=0)) + 1, int(depth.max(initial=0)) + 1
    num_keys = length + width * int(np.count_nonzero(branches))
    keys, key_positions = np.empty((b, num_keys), np.int64), np.empty((b, num_keys), np.int64)
    allowed, written = np.empty((b, g, num_keys), np.bool_), np.empty((b, g), np.int64)
    kernels.lay_out_step(
        cells.trunk,
        cells.own,
        slots,
        branches,
        prefix,
        depth,
        live,
        length,
        width,
        keys,
        key_positions,
        allowed,
        written,
    )
    return AttentionPlan(keys, key_positions, positions, allowed, written)
