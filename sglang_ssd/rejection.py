"""The ratio rule of verification, for a whole batch (Leviathan et al., 2023; algorithm.md, sections 2 and 3.9).

A draft s that was sampled from q is accepted iff u q(s) < p(s), with a fresh uniform u. After the first rejection the
bonus token comes from norm(max(p - q, 0)), after none from p. A draft that was not sampled is one that was sampled
from all probability on itself: it is accepted iff u < p(s), and the residual is p without it (the target-only rule).
So every draft has a q, and the emitted tokens are distributed as p whatever it is.

Nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_TINY = torch.finfo(torch.float32).tiny


class SparseProbs(NamedTuple):
    """What drafts were sampled from. A draft that has no probability here was not sampled."""

    ids: torch.Tensor
    """[b, K, m] int64, in the vocabulary."""
    probs: torch.Tensor
    """[b, K, m] float32 in [0, 1]."""


class Verified(NamedTuple):
    """Outcomes (k, t*)."""

    num_accepted: torch.Tensor
    """[b] int64 k, 0..K."""
    tokens: torch.Tensor
    """[b, K + 1] int64: k accepted drafts and t*; what comes after is meaningless."""


def unpack(words: torch.Tensor) -> SparseProbs:
    """q of words [b, K, m] int64 (`ssd_proto.records.pack_probs`); what is no probability becomes 0."""
    probs = (words >> 32).to(torch.int32).view(torch.float32)
    is_probability = (probs > 0) & (probs <= 1)
    return SparseProbs(words & 0xFFFF_FFFF, torch.where(is_probability, probs, 0.0))


def verify_by_ratio(
    p: torch.Tensor,
    drafts: torch.Tensor,
    q: SparseProbs,
    num_offered: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Verified:
    """Accept drafts and draw the bonus token.

    Args:
        p: [b, K + 1, V] float32, target probabilities; ``p[:, i]`` after the first i drafts. One-hot rows are greedy.
        drafts: [b, K] int64 s_1..s_K, padding included: it is verified like any draft that was not sampled. K may be 0.
        q: what the drafts were sampled from; m may be 0.
        num_offered: [b] int64, drafts that may be accepted, K or fewer (where there are fewer and all are accepted,
            the bonus token comes from p); default K.
        generator: of the device's random numbers.
    """
    lookahead = drafts.shape[1]
    if lookahead == 0:
        return Verified(drafts.new_zeros(len(drafts)), draw(p[:, 0], generator).unsqueeze(-1))
    sent = drafts.unsqueeze(-1)
    p_sent = p[:, :lookahead].gather(-1, sent).squeeze(-1)
    q_sent = torch.where(q.ids == sent, q.probs, 0.0).sum(-1)
    is_sampled = q_sent > 0
    uniforms = torch.rand(p_sent.shape, generator=generator, device=p.device)
    accepted = uniforms * torch.where(is_sampled, q_sent, 1.0) < p_sent
    if num_offered is None:
        num_offered = torch.full_like(drafts[:, 0], lookahead)
    num_accepted = leading(accepted, num_offered)
    weights = _bonus_weights(p, drafts, q, is_sampled, num_accepted, num_offered)
    return Verified(num_accepted, _run(drafts, num_accepted, draw(weights, generator)))


def verify_by_equality(drawn: torch.Tensor, drafts: torch.Tensor, num_offered: torch.Tensor | None = None) -> Verified:
    """Accept drafts while they equal the target's own tokens, the first of which that differs is the bonus token.

    The text is that of ``drawn`` by construction, whatever the drafts.

    Args:
        drawn: [b, K + 1] int, the target's token after the first i drafts, drawn without regard to the drafts.
        drafts: [b, K] int.
        num_offered: as in `verify_by_ratio`.
    """
    drawn = drawn.to(torch.int64)
    return Verified(leading(drafts == drawn[:, :-1], num_offered), drawn)


def leading(accepted: torch.Tensor, num_offered: torch.Tensor | None) -> torch.Tensor:
    """[b] int64, how many of ``accepted`` [b, K] bool precede the first that is false, ``num_offered`` at most."""
    count = accepted.cumprod(1).sum(1)
    return count if num_offered is None else torch.minimum(count, num_offered)


def draw(weights: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """[b] int64, indices drawn in proportion to ``weights`` [b, V] float32: the first to come of exponential clocks.

    As SGLang's sampler draws (``SGLANG_OPT_USE_GUMBEL_SAMPLE``); an index without weight is never drawn.
    """
    times = torch.empty_like(weights).exponential_(generator=generator).clamp_min_(_TINY)
    return (weights / times).argmax(-1)


def _bonus_weights(
    p: torch.Tensor,
    drafts: torch.Tensor,
    q: SparseProbs,
    is_sampled: torch.Tensor,
    num_accepted: torch.Tensor,
    num_offered: torch.Tensor,
) -> torch.Tensor:
    """[b, V] max(p - q, 0) at the first rejection, p where nothing was rejected; not normalised."""
    rows = torch.arange(len(drafts), device=p.device)
    p_next = p[rows, num_accepted]
    place = num_accepted.clamp(max=drafts.shape[1] - 1)
    is_rejected = (num_accepted < num_offered).to(p.dtype).unsqueeze(-1)
    removed = q.probs[rows, place] * is_rejected * is_sampled[rows, place].unsqueeze(-1)
    residual = p_next.scatter_add(1, q.ids[rows, place], -removed)
    # Of the rejected token nothing is left: it was either not sampled, or rejected since p < q.
    residual.scatter_add_(1, drafts[rows, place].unsqueeze(-1), -is_rejected).clamp_(min=0)
    is_left = residual.sum(-1, keepdim=True) > 0  # not where p equals q up to rounding
    return torch.where(is_left, residual, p_next)


def _run(drafts: torch.Tensor, num_accepted: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
    """[b, K + 1] the drafts, with the bonus token after the accepted ones."""
    tokens = torch.cat([drafts, bonus.unsqueeze(-1)], 1)
    return tokens.scatter_(1, num_accepted.unsqueeze(-1), bonus.unsqueeze(-1))
