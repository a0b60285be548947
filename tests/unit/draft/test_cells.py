"""The cell table never loses a cell or gives one to two holders; rows of the block table say what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speculator_service.draft.aliased_rows import AliasedRows
from speculator_service.draft.cells import CellTable

SLOTS, BRANCHES, K, CONTEXT = 4, 5, 3, 200


def make(count: int = 600) -> CellTable:
    return CellTable(np.arange(1, count + 1), SLOTS, BRANCHES, K, CONTEXT)


def held_cells(table: CellTable) -> list[int]:
    trunk, own = table.trunk, table.own[:, 1:]
    return [*trunk[trunk > 0].tolist(), *own[own > 0].tolist()]


def test_reserve_takes_branch_cells_once_and_keeps_the_trunk() -> None:
    table = make()
    assert table.reserve(1, 0)
    assert table.num_free == 600 - BRANCHES * K
    assert table.reserve(1, 10)
    assert int(table.held_by(1)) == 64
    before = table.trunk[1, :64].copy()
    assert table.reserve(1, 70)
    assert (table.trunk[1, :64] == before).all()
    assert table.num_free == 600 - BRANCHES * K - 128
    assert not table.reserve(1, CONTEXT + 1)
    assert table.reserve(1, CONTEXT)
    assert int(table.held_by(1)) == CONTEXT


def test_refused_reserve_changes_nothing() -> None:
    table = make(100)
    assert table.reserve(0, 60)
    state = table.trunk.copy(), table.own.copy(), table.num_free
    assert table.num_free == 100 - BRANCHES * K - 64
    assert not table.reserve(1, 7)  # 21 cells are left, 15 of them for the branches
    assert not table.reserve(0, 86)
    assert (table.trunk == state[0]).all()
    assert (table.own == state[1]).all()
    assert table.num_free == state[2]
    assert table.reserve(1, 6)  # a smaller block than usual
    assert table.num_free == 0


def test_adopt_beyond_the_reserved_positions_is_an_error() -> None:
    table = make()
    assert table.reserve(0, 64)
    one = np.array([1])
    with pytest.raises(ValueError, match="not reserved"):
        table.adopt(one - 1, one, np.array([63]), np.array([2]))


@pytest.mark.parametrize("far", [4, 1024], ids=["copied on the device", "listed by the host"])
def test_random_use_keeps_every_cell_once_and_rows_right(far: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculator_service.draft.aliased_rows._FAR", far)
    rng = np.random.default_rng(3)
    cells = make()
    ids = rng.permutation(SLOTS * (BRANCHES + 1)).reshape(SLOTS, -1) + 1
    table = torch.full((ids.size + 1, CONTEXT), -1, dtype=torch.int32)
    rows = AliasedRows(cells, table, ids)
    length = np.zeros(SLOTS, np.int64)
    for _ in range(400):
        slot = int(rng.integers(SLOTS))
        action = rng.random()
        if action < 0.1:
            cells.release(slot)
            rows.released(slot)
            length[slot] = 0
        elif action < 0.5:
            wanted = min(int(length[slot]) + int(rng.integers(1, 30)), CONTEXT)
            if cells.reserve(slot, wanted):
                length[slot] = wanted
        elif action < 0.7 and length[slot] > K:
            where = np.array([int(rng.integers(0, length[slot] - K))])
            branch, count = np.array([int(rng.integers(1, BRANCHES + 1))]), np.array([int(rng.integers(1, K + 1))])
            cells.adopt(np.array([slot]), branch, where, count)
            rows.adopted(np.array([slot]), branch, where)
        check_rows(rng, cells, rows, table, length)
        everything = held_cells(cells) + cells._free[: cells.num_free].tolist()
        assert sorted(everything) == list(range(1, 601))
    for slot in range(SLOTS):
        cells.release(slot)
    assert cells.num_free == 600


def check_rows(
    rng: np.random.Generator, cells: CellTable, rows: AliasedRows, table: torch.Tensor, length: np.ndarray
) -> None:
    """Rows of random slots and branches list the trunk up to a random prefix and then the branch's own cells."""
    slots = np.nonzero((length > 1) & (rng.random(SLOTS) < 0.5))[0]
    branches = rng.permutation(BRANCHES + 1)[:3]
    slots, branches = np.repeat(slots, 3), np.tile(branches, len(slots))
    prefix = length[slots] - rng.integers(0, 2, len(slots))
    rows.sync(slots, branches, prefix)
    for slot, branch, at in zip(slots, branches, prefix, strict=True):
        row = table[rows.row_ids[slot, branch]].numpy()
        assert (row[:at] == cells.trunk[slot, :at]).all()
        if branch:
            own = cells.own[slot, branch][: CONTEXT - at]
            assert (row[at : at + K] == own).all()


def test_rows_write_only_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = make()
    rows = AliasedRows(cells, torch.zeros(30, CONTEXT, dtype=torch.int32), np.arange(1, 25).reshape(SLOTS, -1))
    assert cells.reserve(0, 100)
    written: list[int] = []

    from speculator_service.draft import aliased_rows

    original = aliased_rows.upload

    def counting(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
        written.append(len(arrays[0]))
        return original(device, *arrays)

    monkeypatch.setattr(aliased_rows, "upload", counting)
    slot, branch = np.array([0, 0]), np.array([1, 2])
    rows.sync(slot, branch, np.array([90, 91]))
    assert written == [90 + 91 + 2 * K]
    rows.sync(slot, branch, np.array([90, 91]))  # later steps of the same branches
    assert len(written) == 1
    cells.adopt(np.array([0]), np.array([2]), np.array([91]), np.array([3]))
    rows.adopted(np.array([0]), np.array([2]), np.array([91]))
    rows.sync(slot, branch, np.array([95, 94]))
    assert written[1] <= 2 * (2 * K + 2)


def test_new_rows_of_a_long_trunk_are_not_listed_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """15 branches of a prompt of 100 000 tokens: a million columns and more, which took the host half a second."""
    length = 100_000
    cells = CellTable(np.arange(1, 2 * length), 1, 15, K, length + 64)
    assert cells.reserve(0, length + 32)
    table = torch.zeros(17, length + 64, dtype=torch.int32)
    rows = AliasedRows(cells, table, np.arange(1, 17).reshape(1, -1))
    trunk, branches = np.zeros(1, np.int64), np.arange(1, 16)
    rows.sync(trunk, trunk, np.array([length]))

    from speculator_service.draft import aliased_rows

    uploaded: list[int] = []
    original = aliased_rows.upload

    def counting(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
        uploaded.append(sum(len(array) for array in arrays))
        return original(device, *arrays)

    monkeypatch.setattr(aliased_rows, "upload", counting)
    rows.sync(np.zeros(15, np.int64), branches, np.full(15, length))
    assert sum(uploaded) <= 15 + 3 * 15 * K
    assert (table[2:, :length] == table[1, :length]).all()
    assert (table[2:, length : length + K].numpy() == cells.own[0, 1:]).all()
