"""Attention over a planned batch: one gather of K and V and one attention call per block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sglang_ssd.cpu.attention_plan import NO_WINDOW, Block, Layout, TranslateSlots


def attend(
    query: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    blocks: Sequence[Block],
    *,
    scale: float,
    window: int = NO_WINDOW,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    translate: TranslateSlots | None = None,
) -> torch.Tensor:
    """Attention of the new tokens of a batch over the paged KV cache.

    query: [tokens, heads, head_dim]. key_buffer: [slots, kv_heads, head_dim]. value_buffer: [slots, kv_heads, v_dim];
    K and V of the new tokens are in the buffers already. logit_cap: scores become cap * tanh(score / cap), 0 for none.
    sinks: float [heads], a learned logit per head that takes probability and gives no value, or None.
    Returns [tokens, heads, v_dim] in the dtype of ``query``.
    """
    heads, kv_heads = query.shape[1], key_buffer.shape[1]
    repeats = heads // kv_heads
    outputs = query.new_empty(query.shape[0], heads, value_buffer.shape[2])
    for block in blocks:
        layout = block.layout(window=window, repeats=repeats, dtype=query.dtype, translate=translate)
        rows, n = block.num_rows, block.num_queries
        block_query = query if block.gather is None else query.index_select(0, block.gather)
        # Query heads that share a key head are folded into the query axis: K and V need no copy per query head.
        folded = block_query.view(rows, n, kv_heads, repeats, -1).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(rows, kv_heads, repeats * n, -1)
        key = _gather(key_buffer, layout, rows, query.dtype)
        value = _gather(value_buffer, layout, rows, query.dtype)
        if logit_cap or sinks is not None:
            out = _attend_explicit(folded, key, value, layout.bias, scale, logit_cap, sinks)
        else:
            out = F.scaled_dot_product_attention(folded, key, value, attn_mask=layout.bias, scale=scale)
        out = out.view(rows, kv_heads, repeats, n, -1).permute(0, 3, 1, 2, 4).reshape(rows * n, heads, -1)
        if block.scatter is None:
            return out
        padded_position, flat_position = block.scatter
        outputs.index_copy_(0, flat_position, out.index_select(0, padded_position))
    return outputs


def _gather(buffer: torch.Tensor, layout: Layout, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, kv_heads, keys, dim] of the slots in ``layout``."""
    gathered = buffer.index_select(0, layout.slots)
    return gathered.view(rows, layout.num_keys, *buffer.shape[1:]).transpose(1, 2).to(dtype)


def _attend_explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    logit_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same as scaled_dot_product_attention with what it lacks: capped scores and attention sinks."""
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if logit_cap:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        rows, kv_heads, folded, _ = scores.shape
        sink = sinks.float().view(1, kv_heads, -1, 1).expand(rows, -1, -1, folded * kv_heads // sinks.numel())
        scores = torch.cat((scores, sink.reshape(rows, kv_heads, folded, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value
