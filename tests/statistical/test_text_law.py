"""The comparison that the texts of real servers must pass: the right rule passes it, and wrong rules do not.

Texts are drawn from the tiny pair as speculation draws them, chain by chain, with the verifier's rule and with others.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache

from sglang_ssd import rejection
from sglang_ssd.rejection import SparseProbs, Verified, verify_by_ratio
from speculator_service.saguaro.sampling import SparseDistribution, draft_distribution, sample
from tests.support.text_law import LIMIT, Comparison, Filtering, TinyPair, openings

NUM_TEXTS, NUM_TOKENS = 128, 32
"""As many as the servers are asked for."""
FAR_OFF = 8.0

Rule = Callable[[torch.Tensor, torch.Tensor, SparseDistribution], Verified]
"""One draft and the token after it, of p [n, V], drafts [n] and what they were sampled from."""


@pytest.fixture(scope="module")
def pair() -> TinyPair:
    return TinyPair()


@torch.inference_mode()
def speculate(
    pair: TinyPair, filtering: Filtering, downweight: float, lookahead: int, rule: Rule
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and texts, [n, P] and [n, L]."""
    torch.manual_seed(lookahead)
    drafts_from = torch.Generator().manual_seed(7)
    prompts = torch.tensor(openings(NUM_TEXTS))
    caches, inputs, texts = (DynamicCache(), DynamicCache()), prompts, []
    left = torch.zeros(NUM_TEXTS, dtype=torch.int64)  # drafts of the chain
    for _ in range(NUM_TOKENS):
        target, draft = (
            model(inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            for model, cache in zip((pair.target, pair.draft), caches, strict=True)
        )
        p, q = filtering.probs(target).float(), distribution(draft, filtering, downweight)
        drafts = sample(q, torch.rand(NUM_TEXTS, generator=drafts_from, dtype=torch.float64))
        verified = rule(p, drafts, q)
        ends = left == 0  # all were accepted: p itself draws the bonus token
        tokens = torch.where(ends, torch.multinomial(p, 1).squeeze(1), verified.tokens[:, 0])
        left = torch.where((verified.num_accepted == 1) & ~ends, left - 1, lookahead)
        texts.append(tokens)
        inputs = tokens[:, None]
    return prompts.tolist(), torch.stack(texts, 1).tolist()


def distribution(logits: torch.Tensor, filtering: Filtering, downweight: float) -> SparseDistribution:
    """What the speculator samples from."""

    def each(value: float) -> torch.Tensor:
        return torch.full((NUM_TEXTS,), value)

    return draft_distribution(
        logits,
        each(filtering.temperature),
        num_kept=32,
        fan_out=3,
        downweight=downweight,
        top_k=each(filtering.top_k),
        top_p=each(filtering.top_p),
        min_p=each(filtering.min_p),
    )


def by_ratio(p: torch.Tensor, drafts: torch.Tensor, q: SparseDistribution) -> Verified:
    """The verifier's own rule."""
    sparse = SparseProbs(q.ids[:, None].long(), q.probs[:, None])
    return verify_by_ratio(p[:, None].expand(-1, 2, -1), drafts[:, None], sparse)


def without_q(p: torch.Tensor, drafts: torch.Tensor, q: SparseDistribution) -> Verified:
    """Also right: drafts that are said not to be sampled."""
    return by_ratio(p, drafts, q._replace(probs=torch.zeros_like(q.probs)))


def p_for_q(p: torch.Tensor, drafts: torch.Tensor, q: SparseDistribution) -> Verified:
    """q ignored: whatever the target finds possible is accepted."""
    return by_ratio(p, drafts, q._replace(probs=p.gather(1, q.ids.long())))


@pytest.fixture(
    scope="module",
    params=[
        (Filtering(1.0, top_k=4), 1.0, 4),
        (Filtering(1.3, top_p=0.8), 0.3, 4),
        (Filtering(0.6, min_p=0.05), 0.0, 1),
    ],
    ids=["top-k", "top-p", "min-p"],
)
def setting(request: pytest.FixtureRequest) -> tuple[Filtering, float, int]:
    """Filtering, C and K."""
    return request.param


def compare(pair: TinyPair, setting: tuple[Filtering, float, int], rule: Rule) -> Comparison:
    return pair.compare(*speculate(pair, *setting, rule), setting[0], setting[1])


def test_the_right_rule_passes(pair: TinyPair, setting: tuple[Filtering, float, int]) -> None:
    comparison = compare(pair, setting, by_ratio)
    assert comparison.deviation < LIMIT, comparison.deviations


def test_ignoring_q_fails(pair: TinyPair, setting: tuple[Filtering, float, int]) -> None:
    comparison = compare(pair, setting, p_for_q)
    assert comparison.deviation > FAR_OFF, comparison.deviations


def test_p_as_the_residual_fails(
    monkeypatch: pytest.MonkeyPatch, pair: TinyPair, setting: tuple[Filtering, float, int]
) -> None:
    monkeypatch.setattr(rejection, "_bonus_weights", lambda p, *_: p[:, 0])
    comparison = compare(pair, setting, by_ratio)
    assert comparison.deviation > FAR_OFF, comparison.deviations


def test_another_law_fails(pair: TinyPair) -> None:
    """Another temperature or filter than the one that is asked for."""
    texts = speculate(pair, Filtering(1.0, top_k=4), 1.0, 4, without_q)
    right, *others = (
        pair.compare(*texts, filtering)
        for filtering in (
            Filtering(1.0, top_k=4),
            Filtering(1.3, top_k=4),
            Filtering(1.0, top_k=6),
            Filtering(1.0, top_k=3),
        )
    )
    assert right.deviation < LIMIT, right.deviations
    for other in others:
        assert other.deviation > FAR_OFF, other.deviations
