"""A short forward for Llama-like models on CPU, on the weights and KV cells of a model that SGLang has loaded.

A step of a small model on CPU is mostly dispatch: SGLang's module tree costs about as much as the arithmetic. This is
the same arithmetic without the tree. It is an optimisation only: a model is taken if its parts are exactly the known
ones, and :func:`agrees` has compared the two forwards; any other model runs through SGLang's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from speculator_service.draft.trunk_attention import AttentionPlan, attend

_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROTARY = ("RotaryEmbedding", "Llama3RotaryEmbedding", "LinearScalingRotaryEmbedding", "YaRNScalingRotaryEmbedding")


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [(heads + 2 * key_heads) * D, H]
    qkv_bias: torch.Tensor | None
    head_norm: torch.Tensor | None  # [heads + key_heads, D]: norms of each query and key head
    out: torch.Tensor  # [H, heads * D]
    mlp_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2 * M, H]
    down: torch.Tensor  # [H, M]
    keys: torch.Tensor  # [cells, key_heads, D]
    values: torch.Tensor  # [cells, key_heads, D]
    scale: float
    window: int


class LeanForward:
    """Token ids to logits; made by :func:`make_lean`."""

    def __init__(self, model: Any, layers: list[_Layer], context_length: int, vocab_size: int) -> None:
        first = model.model.layers[0].self_attn
        self._layers = layers
        self._heads, self._key_heads, self._head_dim = first.num_heads, first.num_kv_heads, first.head_dim
        self._eps = float(model.model.norm.variance_epsilon)
        self._embedding = model.model.embed_tokens.weight
        self._norm = model.model.norm.weight
        self._head = model.lm_head.weight[:vocab_size]
        cache = first.rotary_emb.cos_sin_cache[:context_length].to(self._embedding.dtype)
        cos, sin = cache.chunk(2, -1)
        self._cos = torch.cat([cos, cos], -1)[:, None]  # [context, 1, D]
        self._sin = torch.cat([-sin, sin], -1)[:, None]

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, *, last_only: bool
    ) -> torch.Tensor:
        """tokens and positions [n]; returns logits [n, V], or [1, V] of the last row."""
        heads = self._heads + self._key_heads
        half = self._head_dim // 2
        cos, sin = self._cos[positions], self._sin[positions]
        x = self._embedding[tokens]
        for layer in self._layers:
            y = F.linear(self._rms(x, layer.input_norm), layer.qkv, layer.qkv_bias).view(len(x), -1, self._head_dim)
            qk = y[:, :heads]
            if layer.head_norm is not None:
                qk = F.rms_norm(qk, (self._head_dim,), None, self._eps) * layer.head_norm
            turned = torch.cat([qk[..., half:], qk[..., :half]], -1)
            qk = torch.addcmul(qk * cos, turned, sin)
            layer.keys.index_copy_(0, plan.written, qk[:, self._heads :])
            layer.values.index_copy_(0, plan.written, y[:, heads:])
            q = qk[:, : self._heads]
            mixed = attend(q, layer.keys, layer.values, plan, scale=layer.scale, window=layer.window)
            x = x + F.linear(mixed, layer.out)
            gate, up = F.linear(self._rms(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(self._rms(x[-1:] if last_only else x, self._norm), self._head).float()

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)


def make_lean(
    model: Any, keys: list[torch.Tensor], values: list[torch.Tensor], context_length: int, vocab_size: int
) -> LeanForward | None:
    """The short forward of an SGLang model, or None if the model has a part that it does not know.

    Args:
        model: SGLang's ``*ForCausalLM`` module on CPU.
        keys, values: KV buffers of each layer, [cells, key_heads, D].
        context_length: positions used.
        vocab_size: logits wanted; the output matrix may be padded to more.
    """
    if type(model).__name__ not in _MODELS or not all(_known(layer) for layer in model.model.layers):
        return None
    layers = [_layer(layer, keys[i], values[i]) for i, layer in enumerate(model.model.layers)]
    return LeanForward(model, layers, context_length, vocab_size)


def agrees(lean: torch.Tensor, model: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits of the two forwards are equal up to the rounding of a model in ``dtype``."""
    relative = 1e-4 if dtype == torch.float32 else 5e-2
    return bool((lean - model).abs().max() <= relative * (1 + model.abs().max()))


def _known(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    plain = all(
        type(linear.quant_method).__name__ == "UnquantizedLinearMethod"
        and not getattr(linear, "use_intel_amx_backend", False)
        for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    )
    unbiased = all(linear.bias is None for linear in (attention.o_proj, mlp.gate_up_proj, mlp.down_proj))
    rotary = attention.rotary_emb
    rotated = type(rotary).__name__ in _ROTARY and rotary.is_neox_style and rotary.rotary_dim == attention.head_dim
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return plain and unbiased and rotated and all(type(norm).__name__ == "RMSNorm" for norm in norms)


def _layer(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norm = None
    if hasattr(attention, "q_norm"):
        query = attention.q_norm.weight.expand(attention.num_heads, -1)
        head_norm = torch.cat([query, attention.k_norm.weight.expand(attention.num_kv_heads, -1)])
    return _Layer(
        layer.input_layernorm.weight,
        attention.qkv_proj.weight,
        attention.qkv_proj.bias,
        head_norm,
        attention.o_proj.weight,
        layer.post_attention_layernorm.weight,
        mlp.gate_up_proj.weight,
        mlp.down_proj.weight,
        keys,
        values,
        attention.attn.scaling,
        attention.attn.sliding_window_size,
    )
