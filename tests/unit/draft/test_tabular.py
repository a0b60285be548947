"""The table-driven draft model answers as its oracle does, and catches every wrong cell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speculator_service.draft.base import BranchStep, DraftModel
from speculator_service.draft.tabular import StaleCellError, TabularDraft

PROMPT = np.array([3, 1, 4, 1, 5])


def make(order: int | None = None) -> TabularDraft:
    model = TabularDraft(3, 4, 3, 32, vocab_size=16, seed=7, order=order)
    assert model.reserve(1, 16)
    return model


def one_step(
    model: TabularDraft, rows: list[tuple[int, int, int]], *, glue: tuple[int, int] | None = None
) -> torch.Tensor:
    """Rows are (token, prefix, depth) of branches 1.. of slot 1; glue is (token, position)."""
    token0, position0 = glue or (0, 0)
    table = np.array([(token0, position0, 0), *rows], np.int64)
    live = np.array([[glue is not None] + [True] * len(rows)])
    step = BranchStep(np.array([1]), table[None, :, 0], table[None, :, 1], table[None, :, 2], live)
    return model.step(step)[0]


@pytest.mark.parametrize("order", [None, 1, 2])
def test_equals_oracle_through_branches_and_adoption(order: int | None) -> None:
    model: DraftModel = make(order)
    assert isinstance(model, TabularDraft)
    prompt = PROMPT.tolist()
    assert torch.equal(model.extend(1, 0, PROMPT[:2]), model.next_logits(prompt[:2]))
    assert torch.equal(model.extend(1, 2, PROMPT[2:]), model.next_logits(prompt))
    out = one_step(model, [(9, 5, 0), (8, 3, 0), (7, 6, 0)], glue=(2, 5))
    assert torch.equal(out[0], model.next_logits([*prompt, 2]))
    assert torch.equal(out[1], model.next_logits([*prompt, 9]))
    assert torch.equal(out[2], model.next_logits([*prompt[:3], 8]))
    assert torch.equal(out[3], model.next_logits([*prompt, 2, 7]))
    out = one_step(model, [(10, 5, 1), (11, 3, 1), (12, 6, 1)])
    assert torch.equal(out[2], model.next_logits([*prompt[:3], 8, 11]))
    model.adopt(np.array([1]), np.array([2]), np.array([3]), np.array([2]))
    assert model.trunk_tokens(1) == [3, 1, 4, 8, 11]
    got = model.extend_one(np.array([1]), np.array([5]), np.array([6]))
    assert torch.equal(got[0], model.next_logits([3, 1, 4, 8, 11, 6]))


def test_several_positions_of_several_slots() -> None:
    model = make()
    for slot, prompt in ((0, PROMPT[:3]), (1, PROMPT)):
        assert model.reserve(slot, len(prompt) + 3)
        model.extend(slot, 0, prompt)
    tokens = np.array([[7, 0, 0], [8, 9, 10]])
    out = model.extend_each(np.array([0, 1]), np.array([3, 5]), tokens, np.array([1, 3]))
    assert torch.equal(out[0, 0], model.next_logits([*PROMPT[:3], 7]))
    for count in (1, 2, 3):
        assert torch.equal(out[1, count - 1], model.next_logits([*PROMPT, *tokens[1, :count]]))
    assert model.trunk_tokens(0) == [*PROMPT[:3], 7]


def test_stale_cells_raise() -> None:
    model = make()
    model.extend(1, 0, PROMPT)
    with pytest.raises(StaleCellError):
        one_step(model, [(1, 6, 0)])  # position 5 was never computed
    with pytest.raises(StaleCellError):
        one_step(model, [(1, 5, 1)])  # own cell 0 was never computed
    one_step(model, [(1, 5, 0)])
    with pytest.raises(StaleCellError):
        one_step(model, [(1, 4, 1)])  # own cell 0 continues another prefix
    model.extend_one(np.array([1]), np.array([2]), np.array([9]))
    with pytest.raises(StaleCellError):
        one_step(model, [(1, 4, 0)])  # position 3 was computed in the old context
    with pytest.raises(StaleCellError):
        model.extend_one(np.array([2]), np.array([0]), np.array([1]))  # nothing reserved
    with pytest.raises(StaleCellError):
        model.adopt(np.array([1]), np.array([3]), np.array([2]), np.array([1]))


def test_room_is_counted_and_given_back() -> None:
    model = TabularDraft(2, 2, 3, 20, max_total_tokens=30)
    assert model.free_tokens == 30
    assert model.reserve(0, 10)
    assert model.free_tokens == 30 - 10 - 6
    assert not model.reserve(1, 9)
    assert not model.reserve(0, 21)
    assert model.free_tokens == 14
    assert model.reserve(0, 4)
    assert model.free_tokens == 14
    model.release(0)
    model.release(0)
    assert model.free_tokens == 30
