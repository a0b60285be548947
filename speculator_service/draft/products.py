"""The matrix products of a draft model on a CPU: as SGLang computes them, or rounded to bfloat16.

A draft is a guess, so its weights need not be exact: where the CPU has instructions for bfloat16, a product takes about
half the time of one with packed float32 weights (``launch/microbench --products``). What lies between products stays
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Product = Callable[[torch.Tensor], torch.Tensor]
"""float32 [n, K] to float32 [n, N]."""

_TYPICAL_ROWS = 16
"""oneDNN's layout of a weight depends a little on the rows that it is multiplied with."""
_LEAST_WORK = 250_000
"""Multiplications in a product from which on oneDNN's dispatch and the roundings cost less than they save."""
_LEAST_BATCHED_WORK = 1_500_000
"""The same of batched products, without roundings of ours."""
PLUGINS_COPY = "packed_weight"
"""Attribute of a layer with the plugin's copy of its weight (`sglang_ssd.cpu.packed_weights`), of no use then."""
_LARGEST_SHARE = 0.25
"""Of the free memory that rounded weights may take, beside those that they are made of."""


class SGLangProducts:
    """Products of SGLang's layers, in the dtype of their weights."""

    def linear(self, layer: Any) -> Product:
        """Of a linear layer, with its bias."""
        return partial(layer.quant_method.apply, layer, bias=layer.bias)

    def head(self, model: Any, vocab_size: int) -> Product:
        """Of the output layer, padded to more than ``vocab_size`` perhaps."""

        def logits(normed: torch.Tensor) -> torch.Tensor:
            padded: torch.Tensor = model.logits_processor._compute_lm_head(normed, model.lm_head)
            return padded[:, :vocab_size].contiguous()

        return logits

    def batched(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """[h, n, K] times [h, K, m]."""
        return torch.bmm(a, b)


class Bfloat16Products(SGLangProducts):
    """Products of bfloat16 copies of the weights, in oneDNN's own layout; sums are float32.

    Small ones are SGLang's still, as those are faster.
    """

    def linear(self, layer: Any) -> Product:
        """Of a linear layer, with its bias."""
        layer.__dict__.pop(PLUGINS_COPY, None)
        return _unless_few(rounded_product(layer.weight, layer.bias), super().linear(layer), layer.weight)

    def head(self, model: Any, vocab_size: int) -> Product:
        """Of the output layer without padding."""
        model.lm_head.__dict__.pop(PLUGINS_COPY, None)
        weight = model.lm_head.weight[:vocab_size]
        return _unless_few(rounded_product(weight, None), super().head(model, vocab_size), weight)

    def batched(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """[h, n, K] times [h, K, m], by oneDNN where that pays.

        With leave to round, PyTorch calls it for float32, too. It rounds where tiles of AMX make that faster.
        """
        if a.numel() * b.shape[-1] < _LEAST_BATCHED_WORK:
            return torch.bmm(a, b)
        precision: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        before, precision.fp32_precision = precision.fp32_precision, "bf16"
        try:
            return torch.bmm(a, b)
        finally:
            precision.fp32_precision = before


def can_round(model: torch.nn.Module, free_bytes: int) -> bool:
    """Whether `Bfloat16Products` of a model are faster here, and there is memory for the copies."""
    if not (torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()):
        return False
    size = 2 * sum(weight.numel() for weight in model.parameters())
    return size <= _LARGEST_SHARE * free_bytes


def rounded_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """x W^T + bias with all of them rounded to bfloat16, as is the result; weight [N, K], bias [N]."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().bfloat16(), _TYPICAL_ROWS)
    rounded_bias = None if bias is None else bias.detach().bfloat16()
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply(x.bfloat16(), packed, rounded_bias, "none", [], "")
        return result.float()

    return product


def _unless_few(of_many: Product, of_few: Product, weight: torch.Tensor) -> Product:
    """``of_few`` for products with less work than pays."""
    least_values = _LEAST_WORK / len(weight)
    return lambda x: (of_few if x.numel() < least_values else of_many)(x)
