"""Random draws from given uniform numbers, so that a seed reproduces whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def seeded_uniforms(seeds: NDArray[np.integer], positions: NDArray[np.integer], stream: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) that depend on (seed, position, stream) alone: a counter-based generator.

    Args:
        seeds: [...] of the requests; any integers.
        positions: broadcastable to ``seeds``; place of the token in its sequence, say.
        stream: purpose of the draw. Draws for different purposes must not share a stream: a draft token and its
            acceptance test drawn from the same number are not independent, and the output is biased.

    Returns:
        [...] multiples of 2^-53.

    >>> seeded_uniforms(np.array([7, 8]), np.arange(2), 0).round(4)
    array([0.4866, 0.3094])
    """
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64
        bits = _mix(np.asarray(seeds).astype(np.uint64) + _mix(np.uint64(stream) * _GOLDEN + _GOLDEN))
        bits = _mix(bits + np.asarray(positions).astype(np.uint64) * _GOLDEN)
    uniforms: NDArray[np.float64] = np.ldexp((bits >> np.uint64(11)).astype(np.float64), -53)
    return uniforms


def _mix(bits: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit changes every output bit half of the time."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The index i drawn with probability ``weights[i] / sum(weights)``: where the distribution function exceeds u.

    An index of weight 0 is never drawn, neither for u = 0 nor by rounding for u just below 1.

    Args:
        weights: [..., n] >= 0 with a positive sum.
        uniforms: [...] in [0, 1).

    Returns:
        [...] int64.

    >>> inverse_cdf(torch.tensor([0., .25, 0., .75, 0.]).expand(4, 5), torch.tensor([0., .2, .25, .999])).tolist()
    [1, 1, 3, 3]
    """
    cumulative = weights.to(torch.float64).cumsum(-1)
    total = cumulative[..., -1:]
    index = (cumulative <= uniforms.to(torch.float64).unsqueeze(-1) * total).sum(-1)
    last_of_weight = (cumulative < total).sum(-1)
    return torch.minimum(index, last_of_weight)
