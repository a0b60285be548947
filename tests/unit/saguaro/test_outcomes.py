from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from speculator_service.saguaro.outcomes import (
    bonus_rank,
    candidate_rank,
    nth_candidate,
    rank_candidates,
    top_candidates,
)

# Draft logits at positions 0, 1, 2 with K = 2.
ROWS = torch.tensor([[5.0, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [1, 5, 2, 4, 3, 0]])


@pytest.mark.parametrize(
    ("counts", "sent", "expected"),
    [
        ((2, 1, 3), (0, 5), [(0, 1), (0, 2), (1, 4), (2, 1), (2, 3), (2, 4)]),
        ((4, 1, 1), (3, 2), [(0, 0), (0, 1), (0, 2), (0, 4), (1, 5), (2, 1)]),
    ],
)
def test_fork_vectors(counts: tuple[int, ...], sent: tuple[int, ...], expected: list[tuple[int, int]]) -> None:
    candidates, no_stops = top_candidates(ROWS, 5), np.empty(0, np.int64)
    prepared = [
        (k, nth_candidate(candidates[k], after, no_stops, rank))
        for k, (count, after) in enumerate(zip(counts, [*sent, -1], strict=True))
        for rank in range(count)
    ]
    assert prepared == expected


def test_batch_equals_rows() -> None:
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    candidates = top_candidates(torch.randn(20, 9, generator=generator), 6).reshape(5, 4, 6)
    sent, stops = rng.integers(-1, 9, (5, 4)), rng.integers(-1, 9, (5, 2))
    ranked = rank_candidates(candidates, sent, stops)
    for row in range(5):
        one = slice(row, row + 1)
        assert (rank_candidates(candidates[one], sent[one], stops[one])[0] == ranked[row]).all()
        for place in range(4):
            left = [token for token in candidates[row, place] if token not in (sent[row, place], *stops[row])]
            assert ranked[row, place].tolist() == left + [-1] * (6 - len(left))
            at = candidates[row, place], int(sent[row, place]), stops[row]
            assert [nth_candidate(*at, rank) for rank in range(6)] == ranked[row, place].tolist()
            for bonus in range(9):
                rank, count = bonus_rank(ranked[row, place][None], np.array([bonus]))
                assert candidate_rank(*at, bonus) == (rank[0], count[0])


def test_rank_of_the_bonus_token() -> None:
    ranked = np.array([[4, 7, 9, -1], [4, 7, -1, -1], [1, 2, 3, 4]])
    rank, count = bonus_rank(ranked, np.array([9, 5, 1]))
    assert rank.tolist() == [2, -1, 0]
    assert count.tolist() == [3, 2, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4, 8, 20, 32, 40])
@pytest.mark.parametrize("vocab_size", [50, 256, 257, 1000])
def test_top_candidates_are_those_of_a_sort(dtype: torch.dtype, count: int, vocab_size: int) -> None:
    scores = torch.stack([torch.randperm(256, generator=torch.Generator().manual_seed(i)) for i in range(12)])
    logits = torch.full((12, vocab_size), -torch.inf, dtype=dtype)
    used = min(vocab_size, 256)
    logits[:, vocab_size - used :] = scores[:, :used].to(dtype)  # all different, exact in either type
    before = logits.clone()
    expected = logits.float().sort(-1, descending=True).indices[:, :count].numpy()
    assert (top_candidates(logits, count) == expected).all()
    assert (logits == before).all()
    some = np.array([11, 0, 5])
    assert (top_candidates(logits, count, some) == expected[some]).all()


@pytest.mark.parametrize("num_values", [1, 2, 30])
def test_of_equal_candidates_the_lower_token_is_better(num_values: int) -> None:
    logits = torch.randint(0, num_values, (40, 700), generator=torch.Generator().manual_seed(3)).float()
    logits[:, ::3] = -torch.inf
    expected = np.argsort(-logits.numpy(), axis=1, kind="stable")
    for count in (1, 5, 32):
        assert (top_candidates(logits, count) == expected[:, :count]).all()


def test_imports_without_sglang_and_zmq() -> None:
    code = (
        "import sys; sys.modules['sglang'] = sys.modules['zmq'] = None;"
        "import speculator_service.planner, speculator_service.saguaro.outcomes"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
