"""Draws that depend on a seed, the position and the target's probabilities alone (`ssd_proto.noise`).

A request with a seed gets the same text whatever else is in the batch and whatever the speculator does: its token at
every position is argmax log p + noise, and a draft is accepted while it equals that token. For these draws p is
filtered by one rule on every backend, so that neither the filters of other requests nor the order in which a GPU adds
up can change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_ssd.noise import shared_uniforms
from sglang_ssd.target_distribution import Filters, filters_of, ranked_weights

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class CoupledRows(NamedTuple):
    """The requests of a batch whose draws are coupled, n of them."""

    rows: torch.Tensor
    """[n] int64, on the target's device."""
    seeds: torch.Tensor
    """[n] int64, 0..2**63 - 1, likewise."""
    is_filtered: bool
    """Whether any of them has top-k, top-p or min-p."""

    def of_positions(self, width: int) -> CoupledRows:
        """The rows of a flattened [b, ``width``] batch."""
        steps = torch.arange(width, device=self.rows.device)
        rows = (self.rows.unsqueeze(-1) * width + steps).flatten()
        return self._replace(rows=rows, seeds=self.seeds.repeat_interleave(width, 0))


def coupled_rows(requests: Sequence[Any], seed_of: Callable[[Any], int | None], device: str) -> CoupledRows | None:
    """Those of ``requests`` for which ``seed_of`` gives a seed; None if there are none. No wait for the device."""
    seeds = {row: seed for row, request in enumerate(requests) if (seed := seed_of(request)) is not None}
    if not seeds:
        return None
    on_host = torch.tensor([list(seeds), list(seeds.values())], dtype=torch.int64, pin_memory=device != "cpu")
    rows, words = on_host.to(device, non_blocking=True)
    return CoupledRows(rows, words, any(_is_filtered(requests[row].sampling_params) for row in seeds))


def draw_coupled(
    probs: torch.Tensor, coupled: CoupledRows, positions: torch.Tensor, info: SamplingBatchInfo
) -> torch.Tensor:
    """The tokens of the coupled requests.

    Args:
        probs: [b, N, V] before the filters.
        positions: [b, N] int, places in the sequence of the tokens drawn.
        info: of the b requests.

    Returns:
        [n, N] int64.
    """
    width = probs.shape[1]
    at = coupled.of_positions(width)
    chosen = probs.flatten(0, 1).index_select(0, at.rows).float()
    places = positions.flatten().index_select(0, at.rows)
    filters = None
    if coupled.is_filtered:
        own = (value.index_select(0, coupled.rows).repeat_interleave(width, 0) for value in filters_of(info))
        filters = Filters(*own)
    return first_by_noise(chosen, at.seeds, places, filters).view(-1, width)


def first_by_noise(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, filters: Filters | None
) -> torch.Tensor:
    """[n] int64, argmax log p + noise; all arguments by row, ``probs`` [n, V] float32."""
    if filters is None:
        weights, ids = probs, torch.arange(probs.shape[-1], device=probs.device)
    else:
        # Rounding of sums just below 1 must not tell a row that is filtered for others' sake from one that is not.
        top_ps = torch.where(filters.top_ps < 1, filters.top_ps, math.inf)
        weights, ids = ranked_weights(probs, filters._replace(top_ps=top_ps))
    # argmax of log w - log(-log u): the same without a logarithm of the weights.
    times = shared_uniforms(seeds, positions, ids).log_().neg_()
    best = (weights / times).argmax(-1)
    return best if filters is None else ids.gather(-1, best.unsqueeze(-1)).squeeze(-1)


def _is_filtered(params: Any) -> bool:
    return bool(params.top_k != TOP_K_ALL or params.top_p != 1.0 or params.min_p > 0)
