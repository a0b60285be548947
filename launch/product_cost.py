"""What a product of a few rows and a weight costs: as PyTorch has the weight, packed, and packed in bfloat16."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from sglang_ssd.cpu.packed_weights import PackedWeight
from speculator_service.draft.products import rounded_product

SHAPES = ((1280, 256), (2048, 256), (3072, 576), (576, 1536), (49152, 576))
"""N, K: gate and output layer of the tiny target; gate, down and output layer of SmolLM2-135M."""
ROWS = (1, 5, 8, 20, 40)
_CACHES = 128_000_000
"""Bytes of weights used in turn, so that they come from memory as those of a model do."""
_MOST_COPIES = 30
_REPEATS = 60


class ProductCost(NamedTuple):
    """Median microseconds."""

    shape: tuple[int, int]
    rows: int
    plain: float
    packed: float
    rounded: float
    """With a bfloat16 weight, the draft's; conversions of the float32 rows included."""


def measure_product_costs() -> Iterator[ProductCost]:
    """Of every shape and number of rows, float32."""
    for n, k in SHAPES:
        copies = min(_MOST_COPIES, max(1, _CACHES // (4 * n * k)))
        weights = [torch.randn(n, k) for _ in range(copies)]
        packed = [PackedWeight(weight) for weight in weights]
        rounded = [rounded_product(weight, None) for weight in weights]
        for rows in ROWS:
            x = torch.randn(rows, k)
            ways = (
                [_plain(x, weight) for weight in weights],
                [_packed(x, weight) for weight in packed],
                [partial(product, x) for product in rounded],
            )
            yield ProductCost((n, k), rows, *map(_median_us, ways))


def _plain(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    return lambda: F.linear(x, weight)


def _packed(x: torch.Tensor, weight: PackedWeight) -> Callable[[], object]:
    return lambda: weight.product(x, None)


def _median_us(products: Sequence[Callable[[], object]]) -> float:
    seconds = [timeit.timeit(products[i % len(products)], number=1) for i in range(_REPEATS + len(products))]
    return 1e6 * float(np.median(seconds[len(products) :]))
