"""The two rules of verification as an executable specification: what any faster verifier must agree with.

Ratio rule, for a proposal sampled from a known q (Leviathan et al., 2023): s_i is accepted iff U < p(s_i) / q(s_i);
after a rejection the bonus token comes from norm(max(p - q, 0)).

Target-only rule, for any proposal whatever: s_i is accepted iff U < p(s_i); after a rejection the bonus token comes
from p without s_i. Lossless for every law of the proposal: sum_x q(x) [p(x) 1(x=y) + 1(y!=x) p(y)] = p(y).

Under both the bonus token comes from p itself after all tokens were accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from speculator_service.saguaro.draws import inverse_cdf
from speculator_service.saguaro.sampling import SparseDistribution


class Verified(NamedTuple):
    """Verification outcomes v = (k, t*)."""

    num_accepted: torch.Tensor
    """[b] int64 k."""
    bonus: torch.Tensor
    """[b] int64 t*."""


def verify_chain(
    p: torch.Tensor,
    tokens: torch.Tensor,
    num_sent: torch.Tensor,
    accept_uniforms: torch.Tensor,
    bonus_uniforms: torch.Tensor,
    *,
    q: SparseDistribution | None = None,
    sampled: torch.Tensor | None = None,
) -> Verified:
    """Verify one speculation per row.

    Args:
        p: [b, K + 1, V] target probabilities; ``p[:, i]`` after the first i tokens. One-hot rows are greedy.
        tokens: [b, K] int64 s_1..s_K; those from ``num_sent`` on are ignored.
        num_sent: [b] 0..K; 0: an empty proposal, the bonus token is plain sampling.
        accept_uniforms: [b, K] in [0, 1), independent of how the tokens were drawn.
        bonus_uniforms: [b] in [0, 1), likewise.
        q: [b, K, m] what the tokens were sampled from, if any were.
        sampled: [b] bool, which rows were sampled from their q (ratio rule); others obey the target-only rule.
            Default: all if ``q`` is given, else none.

    Raises:
        ValueError: a token of a sampled row has probability 0 under its q: it was not sampled from it.

    >>> p = torch.tensor([[[.5, .3, .2], [0., 1., 0.]]]).expand(2, 2, 3)
    >>> u = torch.tensor([[.4], [.6]])
    >>> verify_chain(p, torch.zeros(2, 1, dtype=torch.int64), torch.tensor([1, 1]), u, torch.tensor([.9, .9]))
    Verified(num_accepted=tensor([1, 0]), bonus=tensor([1, 2]))
    """
    batch_size, lookahead = tokens.shape
    if sampled is None:
        sampled = torch.full((batch_size,), q is not None, device=p.device)
    sent = torch.arange(lookahead, device=p.device) < num_sent.unsqueeze(-1)
    tokens = torch.where(sent, tokens, 0)
    p_sent = p[:, :lookahead].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    q_sent = torch.ones_like(p_sent)
    if q is not None:
        q_sampled = (q.probs * (q.ids == tokens.unsqueeze(-1))).sum(-1).to(p.dtype)
        q_sent = torch.where(sampled.unsqueeze(-1), q_sampled, q_sent)
    if (sent & (q_sent <= 0)).any():  # waits for the device
        raise ValueError("tokens of sampled rows must have a probability in (0, 1] under q.")
    accepted = sent & (accept_uniforms * q_sent < p_sent)
    num_accepted = accepted.cumprod(-1).sum(-1)
    law = _bonus_law(p, tokens, num_accepted, num_accepted < num_sent, q, sampled)
    return Verified(num_accepted, inverse_cdf(law, bonus_uniforms))


def residual_distribution(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """r = norm(max(p - q, 0)), and p where that is 0 (p = q: nothing is ever rejected).

    Args:
        p, q: [..., V].

    >>> residual_distribution(torch.tensor([.48, .48, .02, .02]), torch.tensor([.49, .49, .01, .01]))
    tensor([0.0000, 0.0000, 0.5000, 0.5000])
    """
    return _normalized((p - q).clamp(min=0), p)


def distribution_without(p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """p without one token each, renormalised: the residual of the target-only rule; p where nothing else is left.

    Args:
        p: [..., V].
        tokens: [...] int64.

    >>> distribution_without(torch.tensor([.5, .3, .2]), torch.tensor(0))
    tensor([0.0000, 0.6000, 0.4000])
    """
    return _normalized(p.scatter(-1, tokens.unsqueeze(-1), 0), p)


def dense(distribution: SparseDistribution, vocab_size: int) -> torch.Tensor:
    """[..., V] of a sparse distribution.

    >>> dense(SparseDistribution(torch.tensor([2, 0]), torch.tensor([.75, .25])), 4)
    tensor([0.2500, 0.0000, 0.7500, 0.0000])
    """
    ids, probs = distribution
    return probs.new_zeros(*ids.shape[:-1], vocab_size).scatter_add(-1, ids.to(torch.int64), probs)


def _bonus_law(
    p: torch.Tensor,
    tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    rejected: torch.Tensor,
    q: SparseDistribution | None,
    sampled: torch.Tensor,
) -> torch.Tensor:
    """[b, V] the distribution of each row's bonus token."""
    rows = torch.arange(len(p), device=p.device)
    law = p[rows, num_accepted]
    at = rows[rejected], num_accepted[rejected]
    residual = distribution_without(law[rejected], tokens[at])
    if q is not None:
        q_rejected = dense(SparseDistribution(q.ids[at], q.probs[at]), p.shape[-1]).to(p.dtype)
        ratio = residual_distribution(law[rejected], q_rejected)
        residual = torch.where(sampled[rejected].unsqueeze(-1), ratio, residual)
    return law.index_put((rows[rejected],), residual)


def _normalized(weights: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)
