"""KV slots on CPU: moving them, and reading and writing the table request x position -> slot.

Argument names and orders are those of ``torch.ops.sgl_kernel``; tensors marked (out) are written in place.
"""

from __future__ import annotations

import ctypes

import torch


def copy_all_layer_kv_cache(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy the KV slots ``src_loc`` to ``tgt_loc`` in every buffer of every layer.

    data_ptrs: uint64 [buffers] base addresses. strides: int64 [buffers] bytes per slot. The two lists may overlap: all
    slots are read before any is written.
    """
    if tgt_loc.numel() == 0:
        return
    target, source = tgt_loc.to(torch.int64), src_loc.to(torch.int64)
    num_slots = int(torch.maximum(target.max(), source.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (num_slots * stride)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, stride)
        buffer.index_copy_(0, target, buffer.index_select(0, source))


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write new slots into the table (out): request r gets the next ``end - start`` of them at [start, end).

    req_pool_indices, start_offset, end_offset: int [requests]. req_to_token: int32 [pool, pool_len].
    out_cache_loc: int64 [sum of (end - start)].
    """
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: rows.shape[0]].to(req_to_token.dtype)


def assign_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read slots from the table: the inverse of ``assign_req_to_token_pool``, into ``out_cache_loc`` (out)."""
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: rows.shape[0]] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the ``topk * num_steps`` slots that follow each request's committed tokens into ``out_cache_loc`` (out)."""
    columns = seq_lens.to(torch.int64)[:, None] + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.to(torch.int64)[:, None], columns]
    out_cache_loc[: slots.numel()] = slots.flatten().to(out_cache_loc.dtype)


def fill_bonus_tokens(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Pick the last accepted token of each request, its bonus token, into ``bonus_tokens`` (out).

    accept_tokens: int [requests * accept_stride]. accept_lens: int [requests], the bonus token included.
    """
    last = torch.arange(accept_lens.shape[0]) * accept_stride + accept_lens.to(torch.int64) - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the slots of the accepted tokens to the front of ``accept_out_cache_loc`` (out).

    accept_index: int [any], index into ``out_cache_loc`` or -1 for none.
    """
    flat = accept_index.flatten()
    accepted = flat[flat >= 0].to(torch.int64)
    accept_out_cache_loc[: accepted.shape[0]] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def _cells(rows: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every table cell in the ranges [start, end) of ``rows``, range after range."""
    start = start.to(torch.int64)
    counts = end.to(torch.int64) - start
    before = counts.cumsum(0) - counts
    total = int(counts.sum())
    row = torch.repeat_interleave(rows.to(torch.int64), counts, output_size=total)
    column = torch.arange(total) + torch.repeat_interleave(start - before, counts, output_size=total)
    return row, column
