from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from speculator_service.saguaro.outcomes import bonus_rank, outcome_columns, rank_candidates, top_candidates
from ssd_proto.records import NO_KEY

# Draft logits at positions 0, 1, 2 with K = 2.
ROWS = torch.tensor([[5.0, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [1, 5, 2, 4, 3, 0]])


NO_STOPS = np.empty((1, 0), np.int64)


def columns(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """k and rank of the columns of a fan-out list, [1, B] each."""
    accepted = np.repeat(np.arange(len(counts)), counts)
    return accepted[None], np.concatenate([np.arange(count) for count in counts])[None]


@pytest.mark.parametrize(
    ("counts", "sent", "expected"),
    [
        ((2, 1, 3), (0, 5), [(0, 1), (0, 2), (1, 4), (2, 1), (2, 3), (2, 4)]),
        ((4, 1, 1), (3, 2), [(0, 0), (0, 1), (0, 2), (0, 4), (1, 5), (2, 1)]),
    ],
)
def test_fork_vectors(counts: tuple[int, ...], sent: tuple[int, ...], expected: list[tuple[int, int]]) -> None:
    ranked = rank_candidates(top_candidates(ROWS, 5)[None], np.array([[*sent, -1]]), NO_STOPS)
    keys = outcome_columns(ranked, *columns(counts))[0]
    assert [(key >> 32, key & 0xFFFFFFFF) for key in keys.tolist()] == expected


def test_batch_equals_rows() -> None:
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    candidates = top_candidates(torch.randn(5, 4, 9, generator=generator), 6)
    sent, stops = rng.integers(-1, 9, (5, 4)), rng.integers(-1, 9, (5, 2))
    ranked = rank_candidates(candidates, sent, stops)
    for row in range(5):
        one = slice(row, row + 1)
        assert (rank_candidates(candidates[one], sent[one], stops[one])[0] == ranked[row]).all()
        for place in range(4):
            left = [token for token in candidates[row, place] if token not in (sent[row, place], *stops[row])]
            assert ranked[row, place].tolist() == left + [-1] * (6 - len(left))


def test_columns_without_candidate_or_use() -> None:
    ranked = rank_candidates(top_candidates(ROWS[:1], 6)[None], np.array([[0]]), np.array([[2, -1]]))
    keys = outcome_columns(ranked, np.array([[0, 0, 0, 0, 0, 0, -1]]), np.array([[0, 1, 2, 3, 4, 9, 0]]))
    assert keys.tolist() == [[1, 3, 4, 5, NO_KEY, NO_KEY, NO_KEY]]


def test_rank_of_the_bonus_token() -> None:
    ranked = np.array([[4, 7, 9, -1], [4, 7, -1, -1], [1, 2, 3, 4]])
    rank, count = bonus_rank(ranked, np.array([9, 5, 1]))
    assert rank.tolist() == [2, -1, 0]
    assert count.tolist() == [3, 2, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4, 8, 20])
def test_top_candidates_are_those_of_a_sort(dtype: torch.dtype, count: int) -> None:
    logits = torch.stack([torch.randperm(100, generator=torch.Generator().manual_seed(i)) for i in range(12)])
    logits = logits.reshape(3, 4, 100).to(dtype)
    before = logits.clone()
    expected = logits.float().sort(-1, descending=True).indices[..., :count].numpy()
    assert (top_candidates(logits, count) == expected).all()
    assert (logits == before).all()
    assert (top_candidates(logits[0, 0], count) == expected[0, 0]).all()


def test_imports_without_sglang_and_zmq() -> None:
    code = (
        "import sys; sys.modules['sglang'] = sys.modules['zmq'] = None;"
        "import speculator_service.planner, speculator_service.saguaro.outcomes"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
