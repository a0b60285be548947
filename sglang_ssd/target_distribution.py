"""The target's distribution p, as SGLang's plain sampler draws from it: temperature, top-k, top-p, min-p.

SGLang's samplers filter and draw in one step. Here are the same filters, with the same rules at the edges, as explicit
probabilities (``Sampler._sample_from_probs`` and ``top_k_top_p_min_p_sampling_from_probs_torch``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.kernels.ops.sampling import softmax
from sglang.srt.layers import sampler

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

BACKENDS = frozenset({"pytorch", "flashinfer"})
"""Sampling backends of SGLang whose filters are known here."""
_HEAD = 256
"""Tokens that hardly any nucleus exceeds."""


class Filters(NamedTuple):
    """Sampling parameters by row, each [n]."""

    top_ks: torch.Tensor
    """int; the vocabulary's size or more: no limit."""
    top_ps: torch.Tensor
    """float32"""
    min_ps: torch.Tensor
    """float32"""


def filters_of(info: SamplingBatchInfo) -> Filters:
    """Those of a batch."""
    return Filters(info.top_ks, info.top_ps, info.min_ps)


def tempered(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Probabilities before the filters, [b, N, V] float32; the logits [b * N, V] stay as they are.

    ``temperatures``: [b, 1] float32.
    """
    scaled = logits.view(len(temperatures), -1, logits.shape[-1]) / temperatures.unsqueeze(-1)
    return softmax(scaled.view(logits.shape)).float().view(scaled.shape)


def filtered(probs: torch.Tensor, info: SamplingBatchInfo, backend: str) -> torch.Tensor:
    """p of every position: ``probs`` [b, N, V] after the filters of the batch, normalised.

    ``backend``: one of `BACKENDS`.
    """
    if not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling):
        return probs
    width = probs.shape[1]
    filters = Filters(*(value.repeat_interleave(width, 0) for value in filters_of(info)))
    flat = probs.flatten(0, 1)
    if backend == "flashinfer":
        p = _normalised(_filtered_by_flashinfer(flat, filters, info))
    else:
        weights, ids = ranked_weights(flat, filters, info.max_top_k)
        p = torch.zeros_like(flat).scatter_(-1, ids, _normalised(weights))
    return p.view(probs.shape)


def ranked_weights(
    probs: torch.Tensor, filters: Filters, max_top_k: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What SGLang's "pytorch" backend draws from: weights and token ids [n, m], most likely first, not normalised.

    Top-k and top-p look at ``probs`` [n, V] independently of each other; min-p is measured from the most likely token.
    m < V where all that follows has no weight. Of equals the smaller token comes first, where SGLang leaves it to
    PyTorch; and so it is here with ``max_top_k``, which must be at least every top_k.
    """
    vocab_size = probs.shape[-1]
    if max_top_k is not None and max_top_k < vocab_size:
        weights, ids = probs.topk(max_top_k, dim=-1)
        return _filter(weights, filters), ids
    if probs.device.type == "cpu" and vocab_size > 4 * _HEAD:
        weights, ids = _head(probs)
        last = weights[:, -1:].clone()
        weights = _filter(weights, filters)
        if not ((weights > 0) & (weights <= last)).any():
            return weights, ids
    weights, ids = probs.sort(dim=-1, descending=True, stable=True)
    return _filter(weights, filters), ids


def _head(probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `_HEAD` of a stable sort, complete but for equals of the last; sorting all takes 40 times as long."""
    ids = probs.topk(_HEAD, dim=-1, sorted=False).indices.sort(dim=-1).values
    weights, order = probs.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return weights, ids.gather(-1, order)


def _filter(weights: torch.Tensor, filters: Filters) -> torch.Tensor:
    """0 for what is filtered out of ``weights`` [n, m], most likely first. In place."""
    before = weights.cumsum(-1) - weights
    rank = torch.arange(weights.shape[-1], device=weights.device)
    is_out = (rank >= filters.top_ks.unsqueeze(-1)) | (before > filters.top_ps.unsqueeze(-1))
    is_out |= weights < weights[:, :1] * filters.min_ps.unsqueeze(-1)
    return weights.masked_fill_(is_out, 0.0)


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True)


def _filtered_by_flashinfer(probs: torch.Tensor, filters: Filters, info: SamplingBatchInfo) -> torch.Tensor:
    """[n, V] weights: what SGLang itself states as the support of its fused sampler (its sampling masks)."""
    if info.need_min_p_sampling:
        weights = sampler.top_k_renorm_prob(probs, filters.top_ks)
        weights = sampler.top_p_renorm_prob(weights, filters.top_ps)
        return weights.masked_fill(weights < weights.amax(-1, keepdim=True) * filters.min_ps.unsqueeze(-1), 0.0)
    weights = sampler.top_k_renorm_prob(probs, filters.top_ks) if info.need_top_k_sampling else probs
    if info.need_top_p_sampling:
        nucleus = sampler.top_p_renorm_prob(probs, filters.top_ps)
        weights = weights.masked_fill(nucleus <= 0, 0.0)
    return weights
