"""The verifier's own rules in float32: the law of the text, and wrong variants of them that must be noticed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from chi_square import chi_square_deviation
from plugin_loop import PluginLoop

from sglang_ssd import rejection
from sglang_ssd.noise import shared_uniforms
from sglang_ssd.rejection import SparseProbs, verify_by_equality, verify_by_ratio
from speculator_service.saguaro.draws import inverse_cdf

LIMIT = 4.5
"""Standard deviations; seeds are fixed, so a test that passes does so always."""


def deviation(loop: PluginLoop, count: int, length: int) -> float:
    tokens = loop.run(count, length)
    cells = (tokens * loop.vocab_size ** torch.arange(length - 1, -1, -1)).sum(1)
    observed = np.bincount(cells.numpy(), minlength=loop.vocab_size**length)
    return chi_square_deviation(observed, loop.law(length))


FAN_OUT = {1: (2, 2), 2: (2, 1, 2), 3: (2, 1, 1, 2), 4: (2, 1, 1, 1, 2)}


@pytest.mark.parametrize("lookahead", [1, 2, 3, 4])
def test_millions_of_draws(lookahead: int) -> None:
    """Sampled drafts, truncated and down-weighted, and padding in their place."""
    loop = PluginLoop(
        vocab_size=6, num_kept=4, lookahead=lookahead, fan_out=FAN_OUT[lookahead], backup="short", downweight=0.5
    )
    assert deviation(loop, 1_000_000, min(lookahead + 1, 4)) < LIMIT


@pytest.mark.parametrize("backup", ["primary", "greedy", "random", "stale", "short", "empty"])
def test_every_backup(backup: str) -> None:
    loop = PluginLoop(vocab_size=5, backup=backup, downweight=0.3, num_kept=3, seed=4)
    assert deviation(loop, 200_000, 4) < LIMIT


@pytest.mark.parametrize("num_offered", [0, 1])
def test_fewer_drafts_offered(num_offered: int) -> None:
    loop = PluginLoop(vocab_size=5, num_offered=num_offered, seed=6)
    assert deviation(loop, 200_000, 4) < LIMIT


def test_greedy_target_is_followed_token_for_token() -> None:
    loop = PluginLoop(greedy=True, backup="random", downweight=0.3)
    expected, last = [], 0
    for _ in range(12):
        last = int(loop.target[last].argmax())
        expected.append(last)
    assert (loop.run(2000, 12) == torch.tensor(expected)).all()


# -- one round with K = 1, where everything is known --------------------------------------------------

P = torch.tensor([0.40, 0.25, 0.15, 0.10, 0.06, 0.04])
Q = torch.tensor([0.10, 0.40, 0.20, 0.10, 0.10, 0.10])
COUNT, V = 1_000_000, 6
Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""First tokens, of drafts [n] and the q [V] that they are said to come from."""


def sparse(q: torch.Tensor) -> SparseProbs:
    return SparseProbs(torch.arange(V).expand(COUNT, 1, V), q.expand(COUNT, 1, V))


def by_ratio(drafts: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return verify_by_ratio(P.expand(COUNT, 2, V), drafts[:, None], sparse(q)).tokens[:, 0]


def proposed(law: torch.Tensor, seed: int) -> torch.Tensor:
    """[n] drafts; what the verifier draws afterwards is another stream."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed + 1000)
    return inverse_cdf(law.expand(COUNT, V), torch.rand(COUNT, generator=generator, dtype=torch.float64))


def deviation_from_p(tokens: torch.Tensor) -> float:
    law = P.double() / P.double().sum()
    return chi_square_deviation(np.bincount(tokens.numpy(), minlength=V), law.numpy())


NOT_SAMPLED = torch.zeros(V)
TRUNCATED = torch.where(Q >= 0.2, Q, 0) / 0.6


@pytest.mark.parametrize("law", [Q, TRUNCATED, P, torch.eye(V)[3]], ids=["q", "truncated", "p", "greedy"])
def test_the_right_rule_passes(law: torch.Tensor) -> None:
    """With the q that was sampled from; and without any."""
    assert deviation_from_p(by_ratio(proposed(law, 0), law)) < LIMIT
    assert deviation_from_p(by_ratio(proposed(law, 1), NOT_SAMPLED)) < LIMIT


@pytest.mark.parametrize("said", [0.9 * Q, 1.1 * Q, Q.sqrt() / Q.sqrt().sum()], ids=["0.9", "1.1", "flattened"])
def test_another_q_than_the_true_one_fails(said: torch.Tensor) -> None:
    assert deviation_from_p(by_ratio(proposed(Q, 2), said)) > 20


def test_padding_verified_by_the_q_of_its_place_fails() -> None:
    """A repeated token, where q has a probability for it by chance."""
    assert deviation_from_p(by_ratio(proposed(torch.eye(V)[1], 3), Q)) > 20


def test_bonus_from_p_instead_of_the_residual_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_bonus_weights", lambda p, *_: p[:, 0])
    assert deviation_from_p(by_ratio(proposed(Q, 4), Q)) > 20
    assert deviation_from_p(by_ratio(proposed(Q, 4), NOT_SAMPLED)) > 20


def test_acceptance_by_ratio_with_p_without_the_token_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio rule's acceptance with the target-only rule's residual, p without the token."""

    def without_token(p: torch.Tensor, drafts: torch.Tensor, *_: object) -> torch.Tensor:
        return p[:, 0].scatter(1, drafts, 0.0)

    monkeypatch.setattr(rejection, "_bonus_weights", without_token)
    assert deviation_from_p(by_ratio(proposed(Q, 5), Q)) > 20


def test_acceptance_by_p_alone_with_the_ratio_residual_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    uniforms = torch.rand(COUNT, 1, generator=torch.Generator().manual_seed(6))
    drafts = proposed(Q, 7)
    # u < p(s) is u q(s) < p(s) with u / q(s) for u.
    monkeypatch.setattr(rejection.torch, "rand", lambda *_, **__: uniforms / Q[drafts][:, None])
    assert deviation_from_p(by_ratio(drafts, Q)) > 20


def test_acceptance_with_the_number_that_drew_the_draft_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = torch.rand(COUNT, generator=torch.Generator().manual_seed(8))
    drafts = inverse_cdf(Q.expand(COUNT, V), shared)
    monkeypatch.setattr(rejection.torch, "rand", lambda *_, **__: shared[:, None])
    assert deviation_from_p(by_ratio(drafts, Q)) > 20


def test_a_point_mass_for_sampled_drafts_is_lossless_but_accepts_less() -> None:
    """Why q is sent at all."""
    drafts = proposed(Q, 9)
    shares = []
    for q in (Q, NOT_SAMPLED):
        k, tokens = verify_by_ratio(P.expand(COUNT, 2, V), drafts[:, None], sparse(q))
        assert deviation_from_p(tokens[:, 0]) < LIMIT
        shares.append(float(k.double().mean()))
    assert shares == pytest.approx([float(torch.minimum(P, Q).sum()), float((P * Q).sum())], abs=2e-3)


# -- drafts and target with the same noise --------------------------------------------------------------


def by_noise(law: torch.Tensor) -> torch.Tensor:
    """[n] the tokens that the noise of n seeds draws."""
    seeds = torch.arange(COUNT)
    return (law / -shared_uniforms(seeds, torch.full((COUNT,), 5), torch.arange(V)).log()).argmax(-1)


def test_shared_noise_is_lossless_and_agrees_often() -> None:
    """At least as often as sum min(p, q) / sum max(p, q), the bound for drafts with common noise."""
    drawn = torch.stack([by_noise(P), torch.zeros(COUNT, dtype=torch.int64)], 1)
    k, tokens = verify_by_equality(drawn, by_noise(Q)[:, None])
    assert deviation_from_p(tokens[:, 0]) < LIMIT
    bound = float(torch.minimum(P, Q).sum() / torch.maximum(P, Q).sum())
    assert float(k.double().mean()) > bound - 2e-3


def test_a_new_draw_where_the_noises_disagree_fails() -> None:
    mine, theirs = by_noise(P), by_noise(Q)
    anew = proposed(P, 10)
    assert deviation_from_p(torch.where(mine == theirs, mine, anew)) > 20
