"""`ssd_proto.noise` on the target's device: the same uniforms, bit for bit."""

from __future__ import annotations

import torch

from ssd_proto.noise import FACTORS, GOLDEN, SHIFTS, STREAM, UNIFORM_BITS


def _signed(word: int) -> int:
    """PyTorch multiplies in int64 only, which is the same modulo 2**64."""
    return word - (1 << 64) if word >> 63 else word


_GOLDEN, _STREAM, _FACTORS = _signed(GOLDEN), _signed(STREAM), tuple(map(_signed, FACTORS))


def shared_uniforms(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Uniform numbers of (seed, position, token); see `ssd_proto.noise.shared_uniforms`.

    Args:
        seeds: [n] int64.
        positions: [n] int.
        tokens: [n, m] int, or [m] for all.

    Returns:
        [n, m] float64, neither 0 nor 1.
    """
    key = _mixed(seeds + _STREAM)
    key = _mixed(key + positions.to(torch.int64) * _GOLDEN)
    bits = _mixed(key.unsqueeze(-1) + tokens.to(torch.int64) * _GOLDEN)
    places = _right_shift(bits, 64 - UNIFORM_BITS).to(torch.float64)
    return places.add_(0.5).mul_(2.0**-UNIFORM_BITS)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """In place."""
    bits.bitwise_xor_(_right_shift(bits, SHIFTS[0])).mul_(_FACTORS[0])
    bits.bitwise_xor_(_right_shift(bits, SHIFTS[1])).mul_(_FACTORS[1])
    return bits.bitwise_xor_(_right_shift(bits, SHIFTS[2]))


def _right_shift(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Of unsigned words: int64 would fill with the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)
