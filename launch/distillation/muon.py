"""The Muon optimizer in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_COEFFICIENTS, _NUM_ITERATIONS = (3.4445, -4.7750, 2.0315), 5
"""Of the Newton-Schulz iteration, as in ``torch.optim.Muon``."""


class Muon32(Optimizer):
    """``torch.optim.Muon`` with the learning rates of AdamW (``match_rms_adamw``), for matrices, in float32.

    That one orthogonalises in bfloat16, which takes most of a step on a CPU without instructions for it.
    """

    def __init__(self, weights: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Change the weights by their gradients."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(average, group["momentum"]))  # Nesterov's
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape)))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """U V^T of the [m, n] ``matrix`` U S V^T, nearly: its singular values lie between 0.5 and 1.5."""
    is_high = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_high else matrix
    found = found / found.norm().clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_NUM_ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_high else found
