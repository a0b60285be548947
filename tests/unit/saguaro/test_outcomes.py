from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from speculator_service.saguaro.fan_out import FanOut
from speculator_service.saguaro.outcomes import (
    predict_all_accepted,
    predict_first_outcomes,
    predict_outcomes,
    top_candidates,
)
from ssd_proto.records import NO_KEY

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
    fan_out = FanOut(counts)
    candidates = top_candidates(ROWS, fan_out.num_candidates)
    early = predict_outcomes(candidates[None, :2], np.array([sent]), fan_out)
    late = predict_all_accepted(candidates[2:], fan_out)
    keys = np.concatenate([early, late], axis=1)[0]
    assert [(key >> 32, key & 0xFFFFFFFF) for key in keys.tolist()] == expected


def test_batch_equals_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    fan_out = FanOut((3, 1, 0, 4))
    candidates = top_candidates(torch.randn(5, 3, 9, generator=generator), fan_out.num_candidates)
    sent = np.random.default_rng(0).integers(-1, 9, (5, 3))
    batch = predict_outcomes(candidates, sent, fan_out)
    for row in range(5):
        assert (predict_outcomes(candidates[row : row + 1], sent[row : row + 1], fan_out)[0] == batch[row]).all()
        for column, key in enumerate(batch[row].tolist()):
            assert key & 0xFFFFFFFF != sent[row, fan_out.accepted[column]]


def test_first_round_puts_everything_at_position_0() -> None:
    fan_out = FanOut((2, 1, 3))
    keys = predict_first_outcomes(top_candidates(ROWS[:1], 6), fan_out)
    assert keys.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_vocabulary_smaller_than_fan_out() -> None:
    fan_out = FanOut((8, 8))
    candidates = top_candidates(ROWS[:1], fan_out.num_candidates)
    assert candidates.shape == (1, 6)
    assert predict_outcomes(candidates[None], np.array([[0]]), fan_out)[0].tolist() == [1, 2, 3, 4, 5] + [NO_KEY] * 3
    assert (predict_all_accepted(candidates, fan_out) == NO_KEY).sum() == 2
    assert (predict_first_outcomes(candidates, fan_out) == NO_KEY).sum() == 10


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
        "import speculator_service.saguaro.fan_out, speculator_service.saguaro.outcomes"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
