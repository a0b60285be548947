"""The two rules of verification, draw by draw; their output law is tested in tests/statistical."""

from __future__ import annotations

import pytest
import torch

from speculator_service.saguaro.rejection import (
    dense,
    distribution_without,
    residual_distribution,
    verify_chain,
)
from speculator_service.saguaro.sampling import SparseDistribution, draft_distribution

P = torch.tensor([0.5, 0.3, 0.2])


def grid(count: int) -> torch.Tensor:
    """Midpoints of [0, 1): a mean over them is a probability."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def acceptance(q: torch.Tensor | None, drafted: torch.Tensor) -> float:
    """P(accepted) for a token drawn with probability ``drafted``, one row per token and uniform number."""
    count = 1000
    tokens = torch.arange(3).repeat_interleave(count)[:, None]
    p = P.expand(3 * count, 2, 3)
    sparse = None
    if q is not None:
        sparse = SparseDistribution(torch.arange(3).expand(3 * count, 1, 3), q.expand(3 * count, 1, 3))
    sent = torch.ones(3 * count, dtype=torch.int64)
    uniforms = grid(count).repeat(3)
    result = verify_chain(p, tokens, sent, uniforms[:, None], uniforms, q=sparse)
    return float((result.num_accepted.view(3, count).double().mean(1) * drafted).sum())


def test_acceptance_of_both_rules() -> None:
    """p = q = (.5, .3, .2): the ratio rule accepts all, the other .38 of sampled and .5 of greedy tokens."""
    assert acceptance(P, P.double()) == pytest.approx(1)
    assert acceptance(None, P.double()) == pytest.approx(0.38, abs=1e-3)
    assert acceptance(None, torch.tensor([1.0, 0, 0])) == pytest.approx(0.5, abs=1e-3)
    q = torch.tensor([0.2, 0.3, 0.5])
    assert acceptance(q, q.double()) == pytest.approx(0.7, abs=1e-3)


def test_residuals() -> None:
    p, q = torch.tensor([0.48, 0.48, 0.02, 0.02]), torch.tensor([0.49, 0.49, 0.01, 0.01])
    assert residual_distribution(p, q).tolist() == pytest.approx([0, 0, 0.5, 0.5])
    lowered = torch.tensor([0.47, 0.47, 0.03, 0.03])
    assert residual_distribution(p, lowered).tolist() == pytest.approx([0.5, 0.5, 0, 0])
    assert residual_distribution(p, p).tolist() == p.tolist()
    assert distribution_without(P, torch.tensor(1)).tolist() == pytest.approx([5 / 7, 0, 2 / 7])
    assert distribution_without(torch.tensor([0.0, 1.0]), torch.tensor(1)).tolist() == [0, 1]


def one_row(
    p: torch.Tensor, tokens: list[int], uniforms: list[float], bonus: float, **options: object
) -> tuple[int, int]:
    result = verify_chain(
        p[None],
        torch.tensor([tokens]),
        torch.tensor([options.pop("num_sent", len(tokens))]),
        torch.tensor([uniforms]),
        torch.tensor([bonus]),
        **options,  # type: ignore[arg-type]
    )
    return int(result.num_accepted[0]), int(result.bonus[0])


def test_first_rejection_ends_the_run() -> None:
    """Positions 0..3; the second token is rejected, though the third would be accepted."""
    p = torch.eye(5)[:4].roll(1, 1) * 0.9 + 0.02  # most likely after i tokens: token i + 1
    assert one_row(p, [1, 2, 3], [0.5, 0.5, 0.5], 0.5) == (3, 4)
    assert one_row(p, [1, 4, 3], [0.5, 0.5, 0.5], 0.5) == (1, 2)
    assert one_row(p, [4, 2, 3], [0.5, 0.5, 0.5], 0.5) == (0, 1)


def test_short_and_empty_proposals_get_their_bonus_token_from_p() -> None:
    p = torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
    assert one_row(p, [1, 2], [0.5, 0.5], 0.5, num_sent=2) == (2, 0)
    assert one_row(p, [1, -1], [0.5, 0.5], 0.5, num_sent=1) == (1, 2)
    assert one_row(p, [-1, -1], [0.5, 0.5], 0.5, num_sent=0) == (0, 1)


def test_short_proposal_draws_all_of_p_even_the_padding_token() -> None:
    p = P.expand(2, 3)
    assert [one_row(p, [0], [0.9], u, num_sent=0)[1] for u in (0.1, 0.6, 0.9)] == [0, 1, 2]
    assert [one_row(p, [0], [0.9], u, num_sent=1)[1] for u in (0.1, 0.59, 0.61)] == [1, 1, 2]


def test_greedy_targets_need_no_other_rule() -> None:
    """One-hot p: accepted iff it is the most likely token, whatever the numbers; greedy q changes nothing."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 4, 9, generator=generator)
    best = logits.argmax(-1)
    p = torch.nn.functional.one_hot(best, 9).float()
    tokens = torch.where(torch.rand(200, 3, generator=generator) < 0.7, best[:, :3], best[:, :3].roll(1, 0))
    expected = (tokens == best[:, :3]).long().cumprod(1).sum(1)
    for sampled in (False, True):
        q = draft_distribution(torch.nn.functional.one_hot(tokens, 9).float().view(-1, 9), torch.zeros(600), num_kept=2)
        shaped = SparseDistribution(q.ids.view(200, 3, 2), q.probs.view(200, 3, 2)) if sampled else None
        uniforms = torch.rand(200, 4, generator=generator)
        result = verify_chain(p, tokens, torch.full((200,), 3), uniforms[:, :3], uniforms[:, 3], q=shaped)
        assert (result.num_accepted == expected).all()
        assert (result.bonus == best.gather(1, expected[:, None])[:, 0]).all()


def test_rows_obey_their_own_rule() -> None:
    """The same draws, p and q in one batch: rows equal those verified alone under either rule."""
    generator = torch.Generator().manual_seed(1)
    b, k, v = 400, 3, 7
    p = torch.randn(b, k + 1, v, generator=generator).softmax(-1)
    q_dense = torch.randn(b, k, v, generator=generator).softmax(-1)
    probs, ids = q_dense.sort(-1, descending=True)
    q = SparseDistribution(ids.int(), probs)
    tokens = torch.distributions.Categorical(q_dense).sample()
    sent = torch.randint(0, k + 1, (b,), generator=generator)
    accept, bonus = torch.rand(b, k, generator=generator), torch.rand(b, generator=generator)
    sampled = torch.rand(b, generator=generator) < 0.5
    mixed = verify_chain(p, tokens, sent, accept, bonus, q=q, sampled=sampled)
    ratio = verify_chain(p, tokens, sent, accept, bonus, q=q)
    target_only = verify_chain(p, tokens, sent, accept, bonus)
    for got, by_ratio, by_target in zip(mixed, ratio, target_only, strict=True):
        assert (got == torch.where(sampled, by_ratio, by_target)).all()
    assert (ratio.num_accepted != target_only.num_accepted).any()


def test_token_that_was_not_sampled_from_its_q_is_refused() -> None:
    q = SparseDistribution(torch.tensor([[[0, 1]]]), torch.tensor([[[1.0, 0.0]]]))
    for token in (1, 2):
        with pytest.raises(ValueError, match=r"tokens of sampled rows must have a probability in \(0, 1\]"):
            one_row(P.expand(2, 3), [token], [0.5], 0.5, q=q)
    assert one_row(P.expand(2, 3), [1], [0.5], 0.5, q=q, num_sent=0)[0] == 0


def test_dense() -> None:
    q = SparseDistribution(torch.tensor([[2, 0], [1, 3]], dtype=torch.int32), torch.tensor([[0.7, 0.3], [1, 0]]))
    assert dense(q, 4).tolist() == [pytest.approx([0.3, 0, 0.7, 0]), [0, 1, 0, 0]]
