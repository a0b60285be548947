"""Matrix products with weights in oneDNN's own layout.

PyTorch multiplies a few rows by a weight matrix as it multiplies many: the matrix is rearranged in every call. To
verify a chain is such a product, of K + 1 rows. oneDNN rearranges a weight once and then needs about the time of one
row for the rows of a chain (``launch/microbench --products``). The weights are kept in both layouts: SGLang loads,
updates and reads them as before.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

SWITCH = "SGLANG_SSD_PACK_WEIGHTS"
"""Environment variable; 0: weights stay as they are."""

_ATTRIBUTE = "packed_weight"
_TYPICAL_ROWS = 16
"""The layout depends a little on the number of rows; this one serves 1 to 40 of them well."""
_LEAST_WORK = {torch.float32: 350_000, torch.bfloat16: 0}
"""Multiplications in a product from which on oneDNN's dispatch costs less than it saves."""
_LARGEST_SHARE = 0.25
"""Of the memory that is free when a model has been loaded; the rest is for the KV cache and for other processes."""

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
LOADED = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
PRODUCTS = (
    "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
    "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
)
CHANGES = (
    f"{_UPDATER}.update_weights_from_disk",
    f"{_UPDATER}.update_weights_from_tensor",
    f"{_UPDATER}.update_weights_from_ipc",
    f"{_UPDATER}.load_weights_from_distributed",
    f"{_UPDATER}.end_weight_update",
    "sglang.srt.utils.weight_checker.WeightChecker._reset_tensors",
)
"""All that writes to the weights of a running model."""
COMPLETED = tuple(
    f"{_UPDATER}.{name}" for name in ("update_weights_from_disk", "update_weights_from_ipc", "end_weight_update")
)
"""After which no other part of the same change follows."""


class PackedWeight:
    """A weight in oneDNN's layout."""

    __slots__ = ("_least_values", "_packed", "_product", "_source")

    def __init__(self, weight: torch.Tensor) -> None:
        """``weight``: [N, K] float32 or bfloat16."""
        self._source = weakref.ref(weight)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._least_values = max(1.0, _LEAST_WORK[weight.dtype] / len(weight))

    def is_of(self, weight: torch.Tensor) -> bool:
        return self._source() is weight

    def serves(self, weight: torch.Tensor, x: torch.Tensor) -> bool:
        """Whether this is that weight, and `product` of ``x`` is worth it."""
        return self._source() is weight and x.dtype == weight.dtype and x.numel() >= self._least_values

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [..., K]; bias: [N] or None. Returns [..., N]."""
        result: torch.Tensor = self._product(x, self._packed, bias, "none", [], "")
        return result


def install() -> None:
    """Register the hooks: weights are packed when a model is loaded, and again when they were changed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not torch.backends.mkldnn.is_available() or os.environ.get(SWITCH) == "0":
        return
    HookRegistry.register(LOADED, _pack_loaded, HookType.AFTER)
    for target, hook in zip(PRODUCTS, (_apply, _compute_lm_head), strict=True):
        HookRegistry.register(target, hook, HookType.AROUND)
    for target in CHANGES:
        HookRegistry.register(target, _unpack_changing, HookType.BEFORE)
    for target in COMPLETED:
        HookRegistry.register(target, _pack_changed, HookType.AFTER)


def pack(model: torch.nn.Module) -> None:
    """Pack the unquantised linear layers of a model, if there is memory for that.

    Its output layer follows at first use: which one that is, an embedding perhaps, only SGLang's call tells.
    """
    layers: list[Any] = [layer for layer in model.modules() if _quantisation(layer) == "UnquantizedLinearMethod"]
    layers = [layer for layer in layers if _can_pack(layer)]
    if _is_memory_for(layers):
        for layer in layers:
            setattr(layer, _ATTRIBUTE, PackedWeight(layer.weight))


def unpack(model: torch.nn.Module) -> None:
    """Forget all packed weights: their sources are about to change."""
    for layer in model.modules():
        layer.__dict__.pop(_ATTRIBUTE, None)


def _quantisation(layer: torch.nn.Module) -> str:
    return type(getattr(layer, "quant_method", None)).__name__


def _can_pack(layer: Any) -> bool:
    weight = getattr(layer, "weight", None)
    return (
        isinstance(weight, torch.Tensor)
        and weight.dim() == 2
        and weight.dtype in _LEAST_WORK
        and (weight.dtype is not torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and not hasattr(layer, "set_lora")
    )


def _is_memory_for(layers: Sequence[Any]) -> bool:
    from sglang.srt.utils import get_available_gpu_memory

    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    free = get_available_gpu_memory("cpu", 0) * 2**30
    if size > _LARGEST_SHARE * free:
        logger.warning(
            "weights are not packed for faster products: that takes %.1f GB, %.1f GB are free", size / 1e9, free / 1e9
        )
    return size <= _LARGEST_SHARE * free


def _pack_loaded(_result: None, runner: Any, *_: Any, **__: Any) -> None:
    pack(runner.model)


def _unpack_changing(changer: Any, *_: Any, **__: Any) -> None:
    """``changer``: SGLang's `WeightUpdater` or `WeightChecker`."""
    unpack((changer.get_model if hasattr(changer, "get_model") else changer._get_model)())


def _pack_changed(_result: object, updater: Any, *_: Any, **__: Any) -> None:
    pack(updater.get_model())


def _apply(
    original: Callable[..., torch.Tensor],
    method: Any,
    layer: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``UnquantizedLinearMethod.apply``"""
    packed: PackedWeight | None = layer.__dict__.get(_ATTRIBUTE)
    if packed is not None and packed.serves(layer.weight, x):
        return packed.product(x, bias)
    return original(method, layer, x, bias)


def _compute_lm_head(
    original: Callable[..., torch.Tensor],
    processor: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    embedding_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """``LogitsProcessor._compute_lm_head``"""
    if embedding_bias is None and not processor.use_fp32_lm_head and processor.rl_on_policy_target is None:
        packed = _packed_head(lm_head)
        if packed is not None and packed.serves(lm_head.weight, hidden_states):
            return packed.product(hidden_states, None)
    return original(processor, hidden_states, lm_head, embedding_bias, **kwargs)


def _packed_head(lm_head: Any) -> PackedWeight | None:
    """The output layer's weight, packed if that was not tried yet, or was another one then."""
    tried = _ATTRIBUTE in lm_head.__dict__
    packed: PackedWeight | None = lm_head.__dict__.get(_ATTRIBUTE)
    if not tried or (packed is not None and not packed.is_of(lm_head.weight)):
        is_possible = _can_pack(lm_head) and _is_memory_for([lm_head])
        packed = PackedWeight(lm_head.weight) if is_possible else None
        setattr(lm_head, _ATTRIBUTE, packed)
    return packed
