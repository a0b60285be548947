"""Saguaro sampling from sparse draft distributions (the paper, section 4.2).

The q that is sent is the distribution that was sampled from: the draft's logits after temperature, top-k, top-p,
truncation to the m most likely tokens, and the down-weighting C. The verifier recomputes none of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from speculator_service.saguaro.domain import check_at_least, check_probabilities
from speculator_service.saguaro.draws import inverse_cdf

_LARGE_VOCAB = 16384
_BLOCK = 32


class SparseDistribution(NamedTuple):
    """Distributions over few tokens of a large vocabulary; every other token has probability 0."""

    ids: torch.Tensor
    """[..., m] int32, all different within a row, most likely token of the draft first."""
    probs: torch.Tensor
    """[..., m] float32 with sum 1; may contain zeros, and need not fall (C lowers the first ones)."""


def draft_distribution(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    *,
    num_kept: int,
    num_sampled: torch.Tensor | None = None,
    fan_out: torch.Tensor | int = 0,
    downweight: torch.Tensor | float = 1.0,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> SparseDistribution:
    """sigma_{F,C} of the draft logits (Definition 14), restricted to the m most likely tokens.

    q(t) proportional to C exp(z_t / T) for t in top_F(z), exp(z_t / T) for the other kept tokens

    so that the residual max(p - q, 0), from which the bonus token is drawn, gathers on the F tokens that are
    prepared. Where top_F holds all kept tokens C cancels, and C = 0 counts as C = 1.

    Args:
        logits: [n, V], any float type; -inf excludes a token. Not all of a row may be excluded.
        temperature: [n] T >= 0; 0: greedy, all probability on the most likely token, whatever C is.
        num_kept: m >= 1; V is enough. Larger is closer to p, smaller is less to send.
        num_sampled: [n] tokens that may have a probability, if that is less than are to be returned.
        fan_out: F >= 0, one or [n]: the fan-out F_k of the position for which the token is drawn.
        downweight: C in [0, 1], one or [n]; 1 changes nothing.
        top_k: [n] kept tokens at most; 0 or less: no limit.
        top_p: [n] in (0, 1]: the fewest most likely tokens whose sum reaches it, measured after top-k.
        min_p: [n] in [0, 1]: least probability of a kept token, as a share of the largest.

    Returns:
        ids and probs of shape [n, min(m, V)], on the device of the logits.

    >>> two_one_zero = torch.tensor([[2., 1., 0.]])
    >>> one = torch.ones(1)
    >>> draft_distribution(two_one_zero, one, num_kept=3, fan_out=1, downweight=.5).probs
    tensor([[0.4984, 0.3667, 0.1349]])
    >>> draft_distribution(two_one_zero, one, num_kept=3, fan_out=1, downweight=0.).probs
    tensor([[0.0000, 0.7311, 0.2689]])
    """
    check_at_least(1, num_kept=num_kept)
    if not isinstance(downweight, torch.Tensor):
        check_probabilities(downweight=downweight)
    values, ids = _most_likely(logits, min(num_kept, logits.shape[-1]))
    greedy = (temperature == 0).unsqueeze(-1)
    scale = torch.where(greedy, 1.0, temperature.unsqueeze(-1)).float()
    scores = values.float() / scale
    rank = torch.arange(ids.shape[-1], device=ids.device)
    if num_sampled is not None:
        scores = scores.masked_fill(rank >= num_sampled.unsqueeze(-1), -math.inf)
    if top_k is not None:
        limit = top_k.unsqueeze(-1)
        scores = scores.masked_fill((limit > 0) & (rank >= limit), -math.inf)
    if top_p is not None:
        log_normalizer = _log_normalizer(logits, scale, scores, top_k)
        probs = (scores - log_normalizer).exp()
        scores = scores.masked_fill(probs.cumsum(-1) - probs >= top_p.unsqueeze(-1), -math.inf)
    if min_p is not None:
        scores = scores.masked_fill(scores < scores[:, :1] + min_p.unsqueeze(-1).log(), -math.inf)
    if isinstance(downweight, torch.Tensor) or downweight < 1:
        factor = torch.as_tensor(downweight, dtype=torch.float32, device=scores.device)
        scores = _downweighted(scores, rank, fan_out, factor.expand(len(scores)))
    probs = torch.where(greedy, (rank == 0).float(), scores.softmax(-1))
    return SparseDistribution(ids.to(torch.int32), probs)


def sample(distribution: SparseDistribution, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens drawn from exactly these distributions, one uniform number each.

    Args:
        distribution: of shape [..., m].
        uniforms: [...] in [0, 1); float64 where probabilities below 1e-7 matter.

    Returns:
        [...] int64 tokens.

    >>> q = SparseDistribution(torch.tensor([[7, 3]], dtype=torch.int32), torch.tensor([[.25, .75]]))
    >>> sample(q, torch.tensor([.3])).tolist()
    [3]
    """
    index = inverse_cdf(distribution.probs, uniforms)
    return distribution.ids.gather(-1, index.unsqueeze(-1)).squeeze(-1).to(torch.int64)


def _most_likely(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids [n, count], largest first.

    On a CPU and for large V by blocks, a third of the time: the largest are in the blocks of largest maximum.
    """
    rows, vocab_size = logits.shape
    if logits.device.type != "cpu" or vocab_size < _LARGE_VOCAB or vocab_size % _BLOCK or count > vocab_size // _BLOCK:
        values, ids = logits.topk(count, dim=-1)
        return values, ids
    blocks = logits.reshape(rows, -1, _BLOCK)
    best = blocks.amax(-1).topk(count, dim=-1, sorted=False).indices
    candidates = blocks.gather(1, best.unsqueeze(-1).expand(-1, -1, _BLOCK)).flatten(1)
    values, places = candidates.topk(count, dim=-1)
    return values, best.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK


def _log_normalizer(
    logits: torch.Tensor, scale: torch.Tensor, scores: torch.Tensor, top_k: torch.Tensor | None
) -> torch.Tensor:
    """[n, 1] log of the sum over what top-k leaves: all kept tokens, or the whole vocabulary if that is more."""
    whole = (logits.float() / scale).logsumexp(-1, keepdim=True)
    if top_k is None:
        return whole
    limit = top_k.unsqueeze(-1)
    is_kept = (limit > 0) & (limit <= scores.shape[-1])
    return torch.where(is_kept, scores.logsumexp(-1, keepdim=True), whole)


def _downweighted(
    scores: torch.Tensor, rank: torch.Tensor, fan_out: torch.Tensor | int, downweight: torch.Tensor
) -> torch.Tensor:
    """``scores + log C`` for the first F tokens; unchanged rows where that leaves nothing."""
    first = rank < (fan_out.unsqueeze(-1) if isinstance(fan_out, torch.Tensor) else fan_out)
    lowered = torch.where(first, scores + downweight.log().unsqueeze(-1), scores)
    nothing_left = (lowered == -math.inf).all(-1, keepdim=True)
    return torch.where(nothing_left, scores, lowered)
