"""p is what SGLang's sampler draws from: its filters' own output, and its draws, are the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_ssd import target_distribution
from sglang_ssd.target_distribution import Filters, filtered, ranked_weights, tempered

from .batches import GREEDY, batch_info

ROWS: list[dict[str, float]] = [
    {},
    GREEDY,
    {"temperature": 0.3},
    {"top_k": 3},
    {"top_p": 0.6},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 2000, "top_p": 0.999},
]


def by_sglang(probs: torch.Tensor, info: Any, width: int) -> torch.Tensor:
    """[b * N, V] the weights that SGLang says it draws from, normalised, in the order of the vocabulary."""
    each = [value.repeat_interleave(width, 0) for value in (info.top_ks, info.top_ps, info.min_ps)]
    _, weights, ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), *each, info.need_min_p_sampling, None, None, return_filtered_probs=True
    )
    dense = torch.zeros_like(probs).scatter_(-1, ids.long(), weights)
    return dense / dense.sum(-1, keepdim=True)


@pytest.mark.parametrize("vocab_size", [20, 5000])
@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
def test_support_and_probabilities_are_sglangs(vocab_size: int, spread: float) -> None:
    """Flat distributions exceed what is sorted first, peaked ones do not."""
    generator = torch.Generator().manual_seed(vocab_size)
    width = 3
    info = batch_info(ROWS, vocab_size)
    logits = spread * torch.randn(len(ROWS) * width, vocab_size, generator=generator)
    before = logits.clone()
    probs = tempered(logits, info.temperatures)
    plain = torch.softmax(logits / info.temperatures.repeat_interleave(width, 0), -1)
    assert (probs.view_as(plain) == plain).all()
    p = filtered(probs, info, "pytorch").view_as(plain)
    expected = by_sglang(plain, info, width)
    assert ((p > 0) == (expected > 0)).all()
    torch.testing.assert_close(p, expected, rtol=1e-5, atol=0)
    assert (p[width : 2 * width].max(-1).values == 1).all(), "greedy among others"
    assert (logits == before).all()


@pytest.mark.parametrize("vocab_size", [20, 5000])
def test_ties_at_the_edge_fall_to_the_smaller_token(vocab_size: int) -> None:
    """SGLang leaves to PyTorch which of equals are kept, but not how many."""
    generator = torch.Generator().manual_seed(1)
    rows = ROWS * 8
    info = batch_info(rows, vocab_size)
    logits = torch.randint(-3, 4, (len(rows), vocab_size), generator=generator).float()
    probs = torch.softmax(logits / info.temperatures, -1)
    p = filtered(probs.unsqueeze(1), info, "pytorch").squeeze(1)
    expected = by_sglang(probs, info, 1)
    torch.testing.assert_close(p.sort(-1).values, expected.sort(-1).values)
    assert ((p > 0) != (expected > 0)).any(), "there were such ties"
    for row, kept in zip(probs, p > 0, strict=True):
        equals = (row == row[kept].min()).nonzero().flatten()
        assert kept[equals].tolist() == sorted(kept[equals].tolist(), reverse=True)


def test_without_filters_p_is_the_softmax() -> None:
    info = batch_info([{}, {"temperature": 0.5}], 30)
    probs = tempered(torch.randn(4, 30), info.temperatures)
    assert filtered(probs, info, "pytorch") is probs


def test_short_top_k_of_a_whole_batch() -> None:
    """SGLang then sorts only so many."""
    info = batch_info([{"top_k": 7, "top_p": 0.9}, {"top_k": 40}], 3000)
    assert info.max_top_k == 40
    probs = tempered(torch.randn(2, 3000, generator=torch.Generator().manual_seed(0)), info.temperatures)
    p = filtered(probs, info, "pytorch").flatten(0, 1)
    expected = by_sglang(probs.flatten(0, 1), info, 1)
    assert ((p > 0) == (expected > 0)).all()
    torch.testing.assert_close(p, expected)


@pytest.mark.parametrize("ties", [False, True])
def test_what_is_sorted_first_is_the_beginning_of_a_stable_sort(monkeypatch: pytest.MonkeyPatch, ties: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    probs = torch.softmax(4 * torch.randn(60, 2000, generator=generator), -1)
    if ties:
        probs = (probs * 300).round() / 300 + 1e-6
    limits = torch.randint(1, 300, (60,), generator=generator)
    filters = Filters(
        torch.where(limits > 150, TOP_K_ALL, limits), torch.rand(60, generator=generator), torch.zeros(60)
    )
    weights, ids = ranked_weights(probs, filters)
    monkeypatch.setattr(target_distribution, "_HEAD", 2000)
    all_weights, all_ids = ranked_weights(probs, filters)
    assert all_weights.shape[1] == 2000
    assert weights.shape[1] == (2000 if ties else 256)
    kept = all_weights[:, : weights.shape[1]] > 0
    assert (weights == all_weights[:, : weights.shape[1]]).all()
    assert not all_weights[:, weights.shape[1] :].any()
    assert (ids == all_ids[:, : weights.shape[1]])[kept].all()


@pytest.mark.parametrize("row", [ROWS[0], ROWS[2], ROWS[3], ROWS[4], ROWS[6], ROWS[8]])
def test_draws_of_sglang_follow_p(row: dict[str, float]) -> None:
    count, vocab_size = 200_000, 12
    torch.manual_seed(3)
    info = batch_info([row, {"min_p": 0.01, "top_p": 0.99}], vocab_size)
    logits = torch.randn(2, vocab_size)
    p = filtered(tempered(logits, info.temperatures), info, "pytorch")[0, 0].double()
    probs = torch.softmax(logits / info.temperatures, -1)[0].expand(count, vocab_size).clone()
    each = [value[:1].expand(count) for value in (info.top_ks, info.top_ps, info.min_ps)]
    drawn = top_k_top_p_min_p_sampling_from_probs_torch(probs, *each, True, None, None)
    observed = torch.bincount(drawn, minlength=vocab_size)
    assert not observed[p == 0].any()
    assert chisquare(observed[p > 0], p[p > 0] / p.sum() * count).pvalue > 1e-3
    wrong = p.sqrt() / p.sqrt().sum()
    assert chisquare(observed[p > 0], wrong[p > 0] * count).pvalue < 1e-6


def test_flashinfer_joins_top_k_and_top_p_and_puts_min_p_after_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that keep the tokens at or above the threshold and renormalise, as flashinfer's do."""

    def top_k(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
        ranked = probs.sort(-1, descending=True).values
        last = ranked.gather(-1, (top_ks.long().clamp(max=probs.shape[-1]) - 1).unsqueeze(-1))
        kept = torch.where(probs >= last, probs, 0.0)
        return kept / kept.sum(-1, keepdim=True)

    def top_p(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
        ranked = probs.sort(-1, descending=True).values
        reached = (ranked.cumsum(-1) - ranked < top_ps.unsqueeze(-1)).sum(-1, keepdim=True)
        kept = torch.where(probs >= ranked.gather(-1, reached - 1), probs, 0.0)
        return kept / kept.sum(-1, keepdim=True)

    monkeypatch.setattr(target_distribution.sampler, "top_k_renorm_prob", top_k, raising=False)
    monkeypatch.setattr(target_distribution.sampler, "top_p_renorm_prob", top_p, raising=False)
    probs = torch.tensor([[[0.4, 0.3, 0.2, 0.1]]])
    joint = filtered(probs, batch_info([{"top_k": 2, "top_p": 0.69}], 4), "flashinfer")
    torch.testing.assert_close(joint, torch.tensor([[[4 / 7, 3 / 7, 0, 0]]]))
    joint = filtered(probs, batch_info([{"top_k": 3, "top_p": 0.69}], 4), "flashinfer")
    torch.testing.assert_close(joint, torch.tensor([[[4 / 7, 3 / 7, 0, 0]]]), msg="top-p of what was before top-k")
    sequential = filtered(probs, batch_info([{"top_k": 2, "top_p": 0.57, "min_p": 0.01}], 4), "flashinfer")
    torch.testing.assert_close(sequential, torch.tensor([[[1.0, 0, 0, 0]]]), msg="top-p of what top-k left: 4/7")
    floor = filtered(probs, batch_info([{"min_p": 0.5}], 4), "flashinfer")
    torch.testing.assert_close(floor, torch.tensor([[[4 / 9, 3 / 9, 2 / 9, 0]]]))
    both = filtered(probs.expand(2, 1, 4), batch_info([{}, GREEDY], 4), "flashinfer")
    torch.testing.assert_close(both[:, 0], torch.tensor([[0.4, 0.3, 0.2, 0.1], [1, 0, 0, 0]]))
