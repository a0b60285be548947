"""Weights in a byte each: rows of int8 with a scale, which rounds about as bfloat16 does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SCALE = ".scale"
_MOST = 127


def packed(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices [n, m] as int8 [n, m] and a float32 scale [n, 1] of each row; vectors as they are."""
    result: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() != 2:
            result[name] = weight
            continue
        scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / _MOST
        result[name] = (weight / scale).round().char()
        result[name + _SCALE] = scale
    return result


def unpacked(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `packed` was given, in float32 up to rounding. Raises `KeyError` if a scale is missing."""
    return {
        name: weight.float() * weights[name + _SCALE] if weight.dim() == 2 else weight
        for name, weight in weights.items()
        if not name.endswith(_SCALE)
    }
