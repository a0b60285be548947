"""Noise that target and draft share, so that both draw the same token wherever their distributions agree.

The token at a position is argmax over t of log p(t) + g(t), with Gumbel noise g (the Gumbel-max trick): that is a draw
from p, and the same whatever else is computed, since g depends on (seed, position, token) alone. A draft that takes
argmax of log q + g with the same g proposes the very token wherever p and q are close.

The uniforms are defined here bit by bit, in integers modulo 2**64; whoever computes them elsewhere must get the same.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

GOLDEN: Final = 0x9E3779B97F4A7C15
"""Step between positions and between tokens (SplitMix64's)."""
STREAM: Final = 0xD1B54A32D192ED03
"""Added to the seed: other draws with the same seed must not use the same numbers."""
FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS: Final = (30, 27, 31)
UNIFORM_BITS: Final = 52


def shared_uniforms(
    seeds: NDArray[np.integer], positions: NDArray[np.integer], tokens: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Independent uniform numbers of (seed, position, token).

    Args:
        seeds: [n] 0..2**63 - 1.
        positions: [n] index in the sequence (prompt and output, from 0) of the token that is drawn.
        tokens: [n, m] >= 0.

    Returns:
        [n, m] odd multiples of 2**-53, so neither 0 nor 1.

    >>> shared_uniforms(np.array([7]), np.array([3]), np.array([[0, 1]])).round(4)
    array([[0.7072, 0.6737]])
    """
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64
        key = _mixed(_words(seeds) + np.uint64(STREAM))
        key = _mixed(key + _words(positions) * np.uint64(GOLDEN))
        bits = _mixed(key[:, None] + _words(tokens) * np.uint64(GOLDEN))
    places = (bits >> np.uint64(64 - UNIFORM_BITS)).astype(np.float64)
    uniforms: NDArray[np.float64] = np.ldexp(places + 0.5, -UNIFORM_BITS)
    return uniforms


def shared_noise(
    seeds: NDArray[np.integer], positions: NDArray[np.integer], tokens: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Standard Gumbel noise of (seed, position, token): -log(-log u) of `shared_uniforms`, same arguments.

    >>> shared_noise(np.array([7]), np.array([3]), np.array([[0, 1]])).round(4)
    array([[1.0601, 0.929 ]])
    """
    noise: NDArray[np.float64] = -np.log(-np.log(shared_uniforms(seeds, positions, tokens)))
    return noise


def _words(integers: NDArray[np.integer]) -> NDArray[np.uint64]:
    return np.asarray(integers).astype(np.uint64)


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit changes every output bit half of the time."""
    bits = (bits ^ (bits >> np.uint64(SHIFTS[0]))) * np.uint64(FACTORS[0])
    bits = (bits ^ (bits >> np.uint64(SHIFTS[1]))) * np.uint64(FACTORS[1])
    return bits ^ (bits >> np.uint64(SHIFTS[2]))
