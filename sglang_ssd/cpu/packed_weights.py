"""Matrix products with weights in oneDNN's own layout.

PyTorch multiplies a few rows by a weight matrix as it multiplies many: the matrix is rearranged in every call. To
verify a chain is such a product, of K + 1 rows. oneDNN rearranges a weight once and then needs about the time of one
row for the rows of a chain (``launch/microbench products``). The weights are kept in both layouts: SGLang loads,
updates and reads them as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

_ATTRIBUTE = "packed_weight"
_DTYPES = (torch.float32, *([torch.bfloat16] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else []))
_TYPICAL_ROWS = 16
"""The layout depends a little on the number of rows; this one serves 1 to 40 of them well."""
_LEAST_WORK = {torch.float32: 350_000, torch.bfloat16: 0}
"""Multiplications in a product from which on oneDNN's dispatch costs less than it saves."""
_LARGEST_SHARE = 0.5
"""Of the memory that is free when a model has been loaded, for the second layout of its weights."""

_product = torch.ops.mkldnn._linear_pointwise.default


class PackedWeight:
    """A weight in oneDNN's layout."""

    __slots__ = ("_least_values", "_packed", "_source")

    def __init__(self, weight: torch.Tensor) -> None:
        """``weight``: [N, K] float32 or bfloat16."""
        self._source = weight
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)
        self._least_values = _LEAST_WORK[weight.dtype] / len(weight)

    def serves(self, weight: torch.Tensor, x: torch.Tensor) -> bool:
        """Whether this is that weight, and `product` of ``x`` is worth it."""
        return weight is self._source and x.dtype == weight.dtype and x.numel() >= max(self._least_values, 1)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [..., K]; bias: [N] or None. Returns [..., N]."""
        result: torch.Tensor = _product(x, self._packed, bias, "none", [], "")
        return result


def install() -> None:
    """Register the hooks: weights are packed when a model is loaded, and again when its weights were changed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _pack_loaded, HookType.AFTER)
    unquantized = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
    HookRegistry.register(unquantized, _apply, HookType.AROUND)
    head = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
    HookRegistry.register(head, _compute_lm_head, HookType.AROUND)
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    for update in (
        "update_weights_from_disk",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        "load_weights_from_distributed",
        "end_weight_update",
    ):
        HookRegistry.register(f"{updater}.{update}", _repack_updated, HookType.AROUND)


def pack(model: torch.nn.Module) -> None:
    """Pack the unquantised linear layers and the output layer of a model, unless memory is too short for that."""
    from sglang.srt.utils import get_available_gpu_memory

    unpack(model)
    layers = [layer for layer in _layers(model) if _can_pack(layer)]
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    free = get_available_gpu_memory("cpu", 0) * 2**30
    if size > _LARGEST_SHARE * free:
        logger.warning(
            "weights are not packed for faster products: that takes %.1f GB, %.1f GB are free", size / 1e9, free / 1e9
        )
        layers = []
    for layer in layers:
        setattr(layer, _ATTRIBUTE, PackedWeight(layer.weight))


def unpack(model: torch.nn.Module) -> None:
    """Use the weights as SGLang has them."""
    for layer in _layers(model):
        setattr(layer, _ATTRIBUTE, None)


def _layers(model: torch.nn.Module) -> list[Any]:
    """Layers whose products go through the hooks; an output layer may be the embedding, or a part of a vision model."""
    linear = [layer for layer in model.modules() if _quantisation(layer) == "UnquantizedLinearMethod"]
    heads = [getattr(module, "lm_head", None) for module in model.modules()]
    return list(dict.fromkeys([*linear, *(head for head in heads if isinstance(head, torch.nn.Module))]))


def _quantisation(layer: torch.nn.Module) -> str:
    return type(getattr(layer, "quant_method", None)).__name__


def _can_pack(layer: Any) -> bool:
    weight = getattr(layer, "weight", None)
    return (
        isinstance(weight, torch.Tensor)
        and weight.dim() == 2
        and weight.dtype in _DTYPES
        and weight.device.type == "cpu"
        and weight.is_contiguous()
    )


def _pack_loaded(_result: None, runner: Any, *_: Any, **__: Any) -> None:
    pack(runner.model)


def _repack_updated(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """An update may fail half-way: what was packed is wrong then, too."""
    model = updater.get_model()
    unpack(model)
    try:
        return original(updater, *args, **kwargs)
    finally:
        pack(model)


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
    if _ATTRIBUTE not in lm_head.__dict__ and _can_pack(lm_head):  # made later than the model, for a token map
        setattr(lm_head, _ATTRIBUTE, PackedWeight(lm_head.weight))
    packed: PackedWeight | None = lm_head.__dict__.get(_ATTRIBUTE)
    is_plain = embedding_bias is None and not processor.use_fp32_lm_head and processor.rl_on_policy_target is None
    if packed is not None and is_plain and packed.serves(lm_head.weight, hidden_states):
        return packed.product(hidden_states, None)
    return original(processor, hidden_states, lm_head, embedding_bias, **kwargs)
