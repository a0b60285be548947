"""Registers the PyTorch operators under the names that SGLang calls on CPU: ``torch.ops.sgl_kernel.*_cpu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_ssd.cpu import hash_ops, kv_ops, tree_ops

_LINKS = "Tensor(c!) retrive_index, Tensor(d!) retrive_next_token, Tensor(e!) retrive_next_sibling"
_RANGES = "Tensor start_offset, Tensor end_offset"

OPERATORS: dict[str, Callable[..., Any]] = {
    "copy_all_layer_kv_cache_cpu(Tensor data_ptrs, Tensor strides, Tensor tgt_loc, Tensor src_loc) -> ()": (
        kv_ops.copy_all_layer_kv_cache
    ),
    "assign_req_to_token_pool_cpu(Tensor req_pool_indices, Tensor(a!) req_to_token, "
    f"{_RANGES}, Tensor out_cache_loc, int pool_len) -> ()": kv_ops.assign_req_to_token_pool,
    "assign_extend_cache_locs_cpu(Tensor req_pool_indices, Tensor req_to_token, "
    f"{_RANGES}, Tensor(a!) out_cache_loc, int pool_len) -> ()": kv_ops.assign_extend_cache_locs,
    "assign_draft_cache_locs_contiguous_cpu(Tensor req_pool_indices, Tensor req_to_token, Tensor seq_lens, "
    "Tensor(a!) out_cache_loc, int pool_len, int topk, int num_steps) -> ()": (
        kv_ops.assign_draft_cache_locs_contiguous
    ),
    "fill_bonus_tokens_cpu(Tensor accept_tokens, Tensor accept_lens, Tensor(a!) bonus_tokens, "
    "int accept_stride) -> ()": kv_ops.fill_bonus_tokens,
    "fill_accept_out_cache_loc_cpu(Tensor accept_index, Tensor out_cache_loc, Tensor(a!) accept_out_cache_loc) -> ()": (
        kv_ops.fill_accept_out_cache_loc
    ),
    "build_tree_kernel_efficient_cpu(Tensor parent_list, Tensor selected_index, Tensor verified_seq_len, "
    f"Tensor(a!) tree_mask, Tensor(b!) positions, {_LINKS}, "
    "int topk, int depth, int draft_token_num, int tree_mask_mode) -> ()": tree_ops.build_tree,
    "reconstruct_indices_from_tree_mask_cpu(Tensor tree_mask, Tensor verified_seq_len, Tensor(a!) positions, "
    f"{_LINKS}, int batch_size, int draft_token_num) -> ()": tree_ops.reconstruct_indices_from_tree_mask,
    "verify_tree_greedy_cpu(Tensor(a!) predicts, Tensor(b!) accept_index, Tensor(c!) accept_token_num, "
    "Tensor candidates, Tensor retrive_index, Tensor retrive_next_token, Tensor retrive_next_sibling, "
    "Tensor target_predict) -> ()": tree_ops.verify_tree_greedy,
    "murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor": hash_ops.murmur_hash32,
}

# The library must live as long as its operators: torch unregisters them when it is collected.
_library: torch.library.Library | None = None


def register() -> None:
    """Define the operators. Does nothing the second time."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for schema, function in OPERATORS.items():
        _library.define(schema)
        _library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
