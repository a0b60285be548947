"""The plan's keys, mask and written cells, and attention over it, against a loop over rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speculator_service.draft.cells import CellTable
from speculator_service.draft.lean import agrees
from speculator_service.draft.trunk_attention import AttentionPlan, attend, plan_decode, plan_extend

HEADS, KEY_HEADS, D, DV, CELLS = 6, 2, 8, 4, 300


@pytest.fixture
def table() -> CellTable:
    cells = CellTable(np.random.default_rng(0).permutation(CELLS - 1) + 1, 3, 4, 3, 64)
    for slot in range(3):
        assert cells.reserve(slot, 40)
    return cells


def reference(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: list[int], scale: float) -> torch.Tensor:
    k = keys[seen].repeat_interleave(HEADS // KEY_HEADS, 1)
    v = values[seen].repeat_interleave(HEADS // KEY_HEADS, 1)
    weights = torch.softmax(torch.einsum("hd,shd->hs", q, k) * scale, -1)
    return torch.einsum("hs,shv->hv", weights, v).reshape(-1)


def compare(plan: AttentionPlan, seen: list[list[int] | None], window: int) -> None:
    """``seen`` per row: its cells in order of position, or None for a dead row."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(CELLS, KEY_HEADS, D, generator=generator)
    values = torch.randn(CELLS, KEY_HEADS, DV, generator=generator)
    q = torch.randn(len(seen), HEADS, D, generator=generator)
    out = attend(q, keys, values, plan, scale=0.3, window=window)
    assert out.shape == (len(seen), HEADS * DV)
    assert torch.isfinite(out).all()
    for row, cells in enumerate(seen):
        if cells is not None:
            visible = cells if window < 0 else cells[-window - 1 :]
            torch.testing.assert_close(out[row], reference(q[row], keys, values, visible, 0.3))


@pytest.mark.parametrize("window", [-1, 5, 100])
def test_decode(table: CellTable, window: int) -> None:
    slots, branches = np.array([2, 0]), np.array([0, 2, 3, 4])
    prefix = np.array([[11, 9, 12, 10], [30, 0, 31, 28]])
    depth = np.array([[0, 2, 0, 1], [0, 1, 0, 9]])
    live = np.array([[True, True, True, True], [True, True, True, False]])
    plan = plan_decode(table, slots, branches, prefix, depth, live)
    seen: list[list[int] | None] = []
    written = []
    for i, slot in enumerate(slots):
        for j, branch in enumerate(branches):
            own = table.own[slot, branch, : depth[i, j] + 1].tolist() if branch else []
            cells = table.trunk[slot, : prefix[i, j] + (branch == 0)].tolist() + own
            seen.append(cells if live[i, j] else None)
            written.append(cells[-1] if live[i, j] else 0)
    assert plan.written.tolist() == written
    compare(plan, seen, window)


@pytest.mark.parametrize("window", [-1, 5])
def test_extend(table: CellTable, window: int) -> None:
    plan = plan_extend(table, 1, 7, 6)
    trunk = table.trunk[1].tolist()
    assert plan.written.tolist() == trunk[7:13]
    compare(plan, [trunk[: 8 + row] for row in range(6)], window)


def test_no_mask_where_every_row_sees_every_key(table: CellTable) -> None:
    one, zero = np.array([[20]]), np.array([0])
    plan = plan_decode(table, zero, zero, one, one * 0, one > 0)
    assert plan.bias(-1, 3, torch.float32) is None
    assert plan.bias(4, 3, torch.float32) is not None
    compare(plan, [table.trunk[0, :21].tolist()], -1)


def test_short_forward_is_used_only_if_it_agrees() -> None:
    wanted = torch.tensor([3.0, -8.0])
    assert agrees(wanted + 1e-5, wanted)
    assert not agrees(wanted + 1e-2, wanted)
    assert not agrees(wanted * float("nan"), wanted)
