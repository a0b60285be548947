"""Draft distributions: temperature, truncation, top-k, top-p and Saguaro's C."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speculator_service.saguaro.downweight import saguaro_probs
from speculator_service.saguaro.rejection import dense
from speculator_service.saguaro.sampling import SparseDistribution, draft_distribution, sample

ONE = torch.ones(1)
Z = torch.tensor([[2.0, 1.0, 0.0]])


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize(
    ("downweight", "expected"),
    [
        (1.0, [0.665241, 0.244728, 0.090031]),
        (0.5, [0.498398, 0.366701, 0.134902]),
        (0.0, [0, 0.731059, 0.268941]),
    ],
)
def test_worked_example(downweight: float, expected: list[float]) -> None:
    q = draft_distribution(Z, ONE, num_kept=3, fan_out=1, downweight=downweight)
    assert q.ids.tolist() == [[0, 1, 2]]
    assert q.probs[0].tolist() == pytest.approx(expected, abs=6e-7)


def test_worked_example_of_theorem_19() -> None:
    logits = torch.log(torch.tensor([[0.49, 0.49, 0.01, 0.01]]))
    q = draft_distribution(logits, ONE, num_kept=4, fan_out=2, downweight=47 / 147)
    assert dense(q, 4)[0].tolist() == pytest.approx([0.47, 0.47, 0.03, 0.03], abs=1e-6)


@pytest.mark.parametrize("downweight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("fan_out", [0, 1, 3, 20, 50])
def test_whole_vocabulary_is_the_definition(downweight: float, fan_out: int) -> None:
    logits = random_logits(8, 20)
    q = draft_distribution(logits, torch.full((8,), 0.7), num_kept=20, fan_out=fan_out, downweight=downweight)
    expected = saguaro_probs((logits / 0.7).softmax(-1).double().numpy(), fan_out, downweight)
    assert np.abs(dense(q, 20).numpy() - expected).max() < 1e-6


def test_truncation_keeps_the_most_likely_and_renormalises() -> None:
    logits = random_logits(5, 100)
    q = draft_distribution(logits, torch.full((5,), 1.3), num_kept=8)
    probs, ids = (logits / 1.3).softmax(-1).topk(8)
    assert (q.ids == ids).all()
    assert q.ids.dtype == torch.int32
    assert torch.allclose(q.probs, probs / probs.sum(-1, keepdim=True))


@pytest.mark.parametrize("vocab_size", [16384, 16384 + 1, 20000])
@pytest.mark.parametrize("num_kept", [1, 64, 600])
def test_large_vocabularies(vocab_size: int, num_kept: int) -> None:
    logits = random_logits(3, vocab_size).masked_fill(torch.arange(vocab_size) % 3 == 0, -torch.inf)
    q = draft_distribution(logits, torch.ones(3), num_kept=num_kept)
    values, ids = logits.topk(num_kept)
    assert (q.ids == ids).all()
    assert torch.allclose(q.probs, values.softmax(-1))


def test_rows_have_their_own_settings() -> None:
    logits = random_logits(4, 50)
    temperature = torch.tensor([0.6, 1.0, 0.0, 1.3])
    fan_out, top_k, top_p = torch.tensor([1, 0, 2, 5]), torch.tensor([3, -1, 4, 1000]), torch.tensor([1, 0.5, 0.9, 0.8])
    batch = draft_distribution(
        logits, temperature, num_kept=16, fan_out=fan_out, downweight=0.3, top_k=top_k, top_p=top_p
    )
    for i in range(4):
        row = slice(i, i + 1)
        alone = draft_distribution(
            logits[row],
            temperature[row],
            num_kept=16,
            fan_out=int(fan_out[i]),
            downweight=0.3,
            top_k=top_k[row],
            top_p=top_p[row],
        )
        assert (alone.ids == batch.ids[row]).all()
        assert (alone.probs == batch.probs[row]).all()


def test_greedy_rows_are_one_hot_whatever_c_is() -> None:
    logits = random_logits(6, 30)
    q = draft_distribution(logits, torch.zeros(6), num_kept=4, fan_out=3, downweight=0.0)
    assert q.probs.tolist() == [[1, 0, 0, 0]] * 6
    for uniform in (0.0, 0.5, 1 - 2.0**-53):
        tokens = sample(q, torch.full((6,), uniform, dtype=torch.float64))
        assert (tokens == logits.argmax(-1)).all()


def test_top_k() -> None:
    q = draft_distribution(Z, ONE, num_kept=3, top_k=torch.tensor([2]))
    assert q.probs[0].tolist() == pytest.approx([0.731059, 0.268941, 0], abs=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, 1), (0.6652, 1), (0.6653, 2), (0.9099, 2), (0.91, 3), (1.0, 3)])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: int) -> None:
    q = draft_distribution(Z, ONE, num_kept=3, top_p=torch.tensor([top_p]))
    assert int((q.probs > 0).sum()) == kept
    assert float(q.probs.sum()) == pytest.approx(1)


def test_top_p_is_measured_on_the_whole_vocabulary_unless_top_k_is_less() -> None:
    logits, top_p = torch.zeros(1, 100), torch.tensor([0.045])
    assert int((draft_distribution(logits, ONE, num_kept=10, top_p=top_p).probs > 0).sum()) == 5
    top_k = torch.tensor([10])
    assert int((draft_distribution(logits, ONE, num_kept=10, top_p=top_p, top_k=top_k).probs > 0).sum()) == 1
    top_k = torch.tensor([1 << 30])  # SGLang's "no limit"
    assert int((draft_distribution(logits, ONE, num_kept=10, top_p=top_p, top_k=top_k).probs > 0).sum()) == 5


@pytest.mark.parametrize("downweight", [0.0, 0.3])
def test_c_cancels_where_all_kept_tokens_are_prepared(downweight: float) -> None:
    plain = draft_distribution(Z, ONE, num_kept=3, top_k=torch.tensor([2]))
    same = draft_distribution(Z, ONE, num_kept=3, top_k=torch.tensor([2]), fan_out=2, downweight=downweight)
    assert torch.allclose(plain.probs, same.probs)


def test_c_0_with_nothing_representable_outside() -> None:
    """What is left outside of top_F is e^-200 of the whole: 0 as a float32 probability, yet a distribution."""
    q = draft_distribution(torch.tensor([[0.0, -200, -201]]), ONE, num_kept=3, fan_out=1, downweight=0.0)
    assert q.probs[0].tolist() == pytest.approx([0, 0.731059, 0.268941], abs=1e-6)


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 0.5, -torch.inf]])
    q = draft_distribution(logits, ONE, num_kept=4, fan_out=1, downweight=0.0)
    assert dense(q, 4)[0].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(dtype: torch.dtype) -> None:
    logits = random_logits(3, 40).to(dtype)
    q = draft_distribution(logits, torch.full((3,), 0.8), num_kept=40)
    assert q.probs.dtype == torch.float32
    assert torch.allclose(dense(q, 40), (logits.float() / 0.8).softmax(-1), atol=1e-6)


def test_sample_follows_the_distribution() -> None:
    q = SparseDistribution(torch.tensor([9, 4, 6], dtype=torch.int32), torch.tensor([0.2, 0.5, 0.3]))
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    expanded = SparseDistribution(q.ids.expand(1000, 3), q.probs.expand(1000, 3))
    counts = torch.bincount(sample(expanded, uniforms), minlength=10)
    assert counts[[9, 4, 6]].tolist() == [200, 500, 300]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_kept": 0}, "num_kept must be finite and at least 1"),
        ({"num_kept": 3, "downweight": 1.5}, r"downweight must be in \[0, 1\]"),
        ({"num_kept": 3, "downweight": -0.1}, r"downweight must be in \[0, 1\]"),
    ],
)
def test_mistakes(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        draft_distribution(Z, ONE, **options)  # type: ignore[arg-type]
