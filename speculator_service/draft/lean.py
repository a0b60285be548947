"""A short forward for Llama-like models on CPU, on the weights and KV cells of a model that SGLang has loaded.

A step of a small model on CPU is mostly dispatch: SGLang's module tree costs more than the arithmetic. This is the same
arithmetic in float32: matrix products, SGLang's or rounded ones (:mod:`speculator_service.draft.products`), and one
compiled pass between each two of them (:mod:`speculator_service.draft.kernels`). It is an optimisation only: a model is
taken if its parts are exactly the known ones, and :func:`agrees` has compared the two forwards; any other model runs
through SGLang's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from speculator_service.draft import kernels
from speculator_service.draft.kernels import Floats
from speculator_service.draft.products import Product, SGLangProducts
from speculator_service.draft.trunk_attention import AttentionPlan

_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROTARY = ("RotaryEmbedding", "Llama3RotaryEmbedding", "LinearScalingRotaryEmbedding", "YaRNScalingRotaryEmbedding")


@dataclass(frozen=True, slots=True)
class _Layer:
    """Products, and views for the kernels."""

    input_norm: Floats  # [H]
    qkv: Product  # [n, H] to [n, (heads + 2 * key_heads) * D]
    head_norm: Floats | None  # [heads + key_heads, D]: norms of each query and key head
    out: Product  # [n, heads * D] to [n, H]
    mlp_norm: Floats  # [H]
    gate_up: Product  # [n, H] to [n, 2 * M]
    down: Product  # [n, M] to [n, H]
    keys: Floats  # [cells, key_heads, D]
    values: Floats  # [cells, key_heads, D]
    scale: float
    window: int


class _Space:
    """Intermediate results of n rows: tensors, and views of the same memory for the kernels (names ending in _)."""

    def __init__(self, buffers: list[torch.Tensor], rows: int) -> None:
        """``buffers``: those of `LeanForward._buffers_for`, of at least as many rows."""
        self.x, self.normed, self.query, self.mixed, self.gated = (buffer[:rows] for buffer in buffers)
        self.x_, self.normed_, self.gated_ = self.x.numpy(), self.normed.numpy(), self.gated.numpy()
        self.query_, self.mixed_ = self.query.numpy(), self.mixed.numpy()


class LeanForward:
    """Token ids to logits; made by :func:`make_lean`."""

    def __init__(
        self, model: Any, layers: list[_Layer], context_length: int, vocab_size: int, products: SGLangProducts
    ) -> None:
        first = model.model.layers[0].self_attn
        self._layers = layers
        self._key_heads, self._repeats = first.num_kv_heads, first.num_heads // first.num_kv_heads
        self._head_dim = first.head_dim
        self._eps = float(model.model.norm.variance_epsilon)
        self._embedding = _view(model.model.embed_tokens.weight)
        self._norm = _view(model.model.norm.weight)
        self._head, self._batched = products.head(model, vocab_size), products.batched
        cos, sin = first.rotary_emb.cos_sin_cache[:context_length].float().chunk(2, -1)
        self._cos, self._sin = _view(cos.contiguous()), _view(sin.contiguous())
        self._widths = _widths(model)
        self._buffers = self._buffers_for(1)
        self._spaces: dict[int, _Space] = {}  # by number of rows, all of them in the buffers
        self._kv = torch.empty(0)

    def __call__(self, tokens: torch.Tensor, plan: AttentionPlan, *, last_only: bool) -> torch.Tensor:
        """tokens [n] of the rows of the plan; returns logits [n, V], or [1, V] of the last row."""
        space = self._space(len(tokens))
        space.x_.fill(0)
        added = self._embedding[tokens.numpy()]
        for layer in self._layers:
            kernels.add_and_normalise(space.x_, added, layer.input_norm, self._eps, space.normed_)
            self._attend(layer, space, plan, is_prompt=last_only)
            added = layer.out(space.mixed).numpy()
            kernels.add_and_normalise(space.x_, added, layer.mlp_norm, self._eps, space.normed_)
            kernels.gate(layer.gate_up(space.normed).numpy(), space.gated_)
            added = layer.down(space.gated).numpy()
        kernels.add_and_normalise(space.x_, added, self._norm, self._eps, space.normed_)
        return self._head(space.normed[-1:] if last_only else space.normed)

    def _attend(self, layer: _Layer, space: _Space, plan: AttentionPlan, *, is_prompt: bool) -> None:
        """Project, write keys and values, then mix the values that each row sees."""
        b, g, k, r, size = plan.batch, plan.rows, self._key_heads, self._repeats, self._head_dim
        projected = layer.qkv(space.normed).numpy()
        if layer.head_norm is not None:
            kernels.normalise_heads(projected, layer.head_norm, self._eps)
        query = space.query_.reshape(b, k, g, r, size)
        kernels.rotate_and_store(
            projected,
            self._cos,
            self._sin,
            plan.positions.numpy(),
            plan.written.numpy(),
            layer.keys,
            layer.values,
            query,
        )
        keys, values = self._gathered(plan)
        kernels.gather(layer.keys, layer.values, plan.keys.numpy().reshape(b, -1), keys.numpy(), values.numpy())
        if is_prompt:  # its scores would fill the memory, and PyTorch's attention has threads
            bias = plan.bias(layer.window, r, torch.float32)
            folded = space.query.view(b, k, g * r, size)
            mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=layer.scale).contiguous()
        else:
            mixed = self._mixed(layer, space, plan, keys, values)
        kernels.by_row(mixed.view(b, k, g, r, size).numpy(), space.mixed_)

    def _mixed(
        self, layer: _Layer, space: _Space, plan: AttentionPlan, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """[b * k, G * r, D] attention's output of a step."""
        b, g, k, r, size = plan.batch, plan.rows, self._key_heads, self._repeats, self._head_dim
        scores = self._batched(space.query.view(b * k, g * r, size), keys.view(b * k, -1, size).transpose(1, 2))
        kernels.masked_softmax(
            scores.view(b, k, g, r, -1).numpy(),
            plan.allowed,
            plan.key_positions,
            plan.query_positions,
            layer.window,
            layer.scale,
        )
        return self._batched(scores, values.view(b * k, -1, size))

    def _space(self, rows: int) -> _Space:
        if rows > len(self._buffers[0]):
            self._buffers = self._buffers_for(2 * rows)
            self._spaces.clear()
        if rows not in self._spaces:
            self._spaces[rows] = _Space(self._buffers, rows)
        return self._spaces[rows]

    def _buffers_for(self, rows: int) -> list[torch.Tensor]:
        """Memory of spaces of up to ``rows`` rows."""
        return [torch.empty(rows, width) for width in self._widths]

    def _gathered(self, plan: AttentionPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the keys and values of a plan, [b, k, S, D] each; the same memory in every layer."""
        size = len(plan.keys) * self._key_heads * self._head_dim
        if len(self._kv) < 2 * size:
            self._kv = torch.empty(4 * size)
        shape = (plan.batch, self._key_heads, -1, self._head_dim)
        return self._kv[:size].view(shape), self._kv[size : 2 * size].view(shape)


def make_lean(
    model: Any,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    context_length: int,
    vocab_size: int,
    products: SGLangProducts,
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
    if any(tensor.dtype != torch.float32 for tensor in (*model.parameters(), *keys, *values)):
        return None
    if len(model.model.layers[0].self_attn.rotary_emb.cos_sin_cache) < context_length:
        return None
    layers = [_layer(layer, keys[i], values[i], products) for i, layer in enumerate(model.model.layers)]
    return LeanForward(model, layers, context_length, vocab_size, products)


def agrees(lean: torch.Tensor, model: torch.Tensor, tolerance: float = 1e-4) -> bool:
    """Whether logits of the two forwards are equal up to rounding: up to a share of the largest one, or of 1."""
    return bool((lean - model).abs().max() <= tolerance * (1 + model.abs().max()))


def _known(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    plain = all(
        type(linear.quant_method).__name__ == "UnquantizedLinearMethod"
        and not getattr(linear, "use_intel_amx_backend", False)
        for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    )
    rotary = attention.rotary_emb
    rotated = type(rotary).__name__ in _ROTARY and rotary.is_neox_style and rotary.rotary_dim == attention.head_dim
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return plain and rotated and all(type(norm).__name__ == "RMSNorm" for norm in norms)


def _layer(layer: Any, keys: torch.Tensor, values: torch.Tensor, products: SGLangProducts) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norm = None
    if hasattr(attention, "q_norm"):
        query = attention.q_norm.weight.expand(attention.num_heads, -1)
        head_norm = _view(torch.cat([query, attention.k_norm.weight.expand(attention.num_kv_heads, -1)]))
    return _Layer(
        _view(layer.input_layernorm.weight),
        products.linear(attention.qkv_proj),
        head_norm,
        products.linear(attention.o_proj),
        _view(layer.post_attention_layernorm.weight),
        products.linear(mlp.gate_up_proj),
        products.linear(mlp.down_proj),
        _view(keys),
        _view(values),
        attention.attn.scaling,
        attention.attn.sliding_window_size,
    )


def _widths(model: Any) -> tuple[int, int, int, int, int]:
    """Of x, normed, query, mixed and gated."""
    first = model.model.layers[0]
    hidden, intermediate = first.mlp.down_proj.weight.shape
    heads = first.self_attn.num_heads * first.self_attn.head_dim
    return hidden, hidden, heads, heads, intermediate


def _view(tensor: torch.Tensor) -> Floats:
    array: Floats = tensor.detach().numpy()
    return array
