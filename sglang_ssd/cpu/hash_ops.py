"""The hash from which SGLang draws the random numbers of seeded requests."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bit) of the four words (low seed, high seed, position, column), bit for bit as on GPUs.

    seed: uint64 or int64 [rows]. positions: int [rows]. col_indices: int [columns]. Returns uint32 [rows, columns].
    """
    # Computed in int64: products wrap modulo 2**64, which leaves their low 32 bits right.
    seed_bits = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    rows = torch.zeros_like(seed_bits)
    for word in (seed_bits & _MASK, (seed_bits >> 32) & _MASK, positions.to(torch.int64) & _MASK):
        rows = _mix(rows, word)
    hashed = _mix(rows[:, None], col_indices.to(torch.int64)[None, :] & _MASK)
    hashed = hashed ^ 16  # the length of the key in bytes
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _MASK
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _MASK
    hashed = hashed ^ (hashed >> 16)
    return hashed.to(torch.uint32)


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = (_rotate(word * 0xCC9E2D51 & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotate(state ^ word, 13) * 5 + 0xE6546B64) & _MASK


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK
