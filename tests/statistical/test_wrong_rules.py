"""Rules seen elsewhere that bias the text. The chi-square test that the right rules pass must fail them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from chi_square import chi_square_deviation

from speculator_service.saguaro.draws import inverse_cdf
from speculator_service.saguaro.rejection import verify_chain
from speculator_service.saguaro.sampling import SparseDistribution

P = torch.tensor([0.40, 0.25, 0.15, 0.10, 0.06, 0.04], dtype=torch.float64)
Q = torch.tensor([0.10, 0.40, 0.20, 0.10, 0.10, 0.10], dtype=torch.float64)
COUNT, V = 500_000, 6
UNIFORM = torch.full((V,), 1 / V, dtype=torch.float64)

Draw = Callable[[torch.Tensor], torch.Tensor]


def draws(seed: int) -> tuple[Draw, Callable[[], torch.Tensor]]:
    """Sampler from a law, and uniform numbers."""
    generator = torch.Generator().manual_seed(seed)

    def uniforms() -> torch.Tensor:
        return torch.rand(COUNT, generator=generator, dtype=torch.float64)

    return lambda law: inverse_cdf(law.expand(COUNT, V), uniforms()), uniforms


def first_tokens(proposed: torch.Tensor, uniforms: Callable[[], torch.Tensor], q: torch.Tensor | None) -> torch.Tensor:
    """First token of a round with K = 1; a given q means the ratio rule."""
    sparse = None if q is None else SparseDistribution(torch.arange(V).expand(COUNT, 1, V), q.expand(COUNT, 1, V))
    k, bonus = verify_chain(
        P.expand(COUNT, 2, V),
        proposed[:, None],
        torch.ones(COUNT, dtype=torch.int64),
        uniforms()[:, None],
        uniforms(),
        q=sparse,
    )
    return torch.where(k == 1, proposed, bonus)


def deviation(tokens: torch.Tensor) -> float:
    return chi_square_deviation(np.bincount(tokens.numpy(), minlength=V), P.numpy())


def share_of_best(tokens: torch.Tensor) -> float:
    return float((tokens == 0).double().mean())


@pytest.mark.parametrize("law", [Q, UNIFORM, P, torch.eye(V, dtype=torch.float64)[3]])
def test_right_rules_pass(law: torch.Tensor) -> None:
    """The target-only rule for any law of the proposal, and the ratio rule for the true q."""
    draw, uniforms = draws(0)
    assert deviation(first_tokens(draw(law), uniforms, None)) < 4
    assert deviation(first_tokens(draw(law), uniforms, law)) < 4


@pytest.mark.parametrize(("law", "share"), [(Q, 0.4604), (UNIFORM, 0.5006)])
def test_greedy_verification_at_a_temperature(law: torch.Tensor, share: float) -> None:
    """Accepted iff it is the most likely token, otherwise sampled from p."""
    draw, _ = draws(1)
    proposed, bonus = draw(law), draw(P)
    tokens = torch.where(proposed == 0, proposed, bonus)
    assert share_of_best(tokens) == pytest.approx(share, abs=2e-3)
    assert deviation(tokens) > 20


def test_invented_logits() -> None:
    """A random proposal that is said to come from q."""
    draw, uniforms = draws(2)
    tokens = first_tokens(draw(UNIFORM), uniforms, Q)
    assert deviation(tokens) > 20


def test_greedy_proposal_with_its_softmax_as_q() -> None:
    """The draft's argmax, sent with the distribution it was not sampled from."""
    draw, uniforms = draws(3)
    tokens = first_tokens(draw(torch.eye(V, dtype=torch.float64)[1]), uniforms, Q)
    assert deviation(tokens) > 20


def test_q_before_truncation() -> None:
    """Sampled from the two most likely tokens, verified with the distribution before they were cut off."""
    truncated = torch.where(Q >= 0.2, Q, 0)
    draw, uniforms = draws(4)
    tokens = first_tokens(draw(truncated), uniforms, Q)
    assert deviation(tokens) > 20
    right = first_tokens(draw(truncated), uniforms, truncated / truncated.sum())
    assert deviation(right) < 4


def test_bonus_token_sampled_anew_after_preemption() -> None:
    """The first of it came from the residual; p is not its law."""
    draw, uniforms = draws(5)
    proposed = draw(Q)
    kept = uniforms() * Q[proposed] < P[proposed]
    tokens = torch.where(kept, proposed, draw(P))
    assert share_of_best(tokens) == pytest.approx(0.10 + 0.30 * 0.40, abs=2e-3)
    assert deviation(tokens) > 20


def test_acceptance_test_with_the_number_that_drew_the_token() -> None:
    """Shared randomness: the reason why draft and verifier have streams of their own."""
    _, uniforms = draws(6)
    shared = uniforms()
    proposed = inverse_cdf(Q.expand(COUNT, V), shared)
    tokens = first_tokens(proposed, iter([shared, uniforms()]).__next__, Q)
    assert deviation(tokens) > 20


def test_statistic_is_calibrated() -> None:
    """Standard normal on data from the law itself; infinite where something impossible was observed."""
    generator = np.random.default_rng(0)
    law = generator.dirichlet(np.ones(100))
    values = [chi_square_deviation(generator.multinomial(20_000, law), law) for _ in range(300)]
    assert abs(np.mean(values)) < 0.25
    assert 0.85 < np.std(values) < 1.15
    assert chi_square_deviation(np.array([5, 1]), np.array([1.0, 0.0])) == np.inf
