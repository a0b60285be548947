"""Draft trees on CPU: building the links, and verifying a tree greedily.

A tree of n nodes per request is stored as SGLang stores it: node 0 is the root (the last committed token), a node's
``next_token`` is its first child, its ``next_sibling`` the next child of the same parent, -1 means none. A chain is a
tree without siblings. Argument names and orders are those of ``torch.ops.sgl_kernel``; (out) marks written tensors.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

IntArray: TypeAlias = npt.NDArray[np.integer]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

_FULL_MASK, _QLEN_ONLY = 0, 1


def build_tree(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Turn the drafts that were selected from a beam into a tree.

    parent_list: int64 [requests, 1 + (depth - 1) * topk], which candidate the beam continued at each place (column 0
    stands for the root), empty if the tree has one level. selected_index: int64 [requests, n - 1], the chosen
    candidates in ascending order; candidate c was drafted from place c // topk. verified_seq_len: int [requests].
    tree_mask: bool flat (out), requests x n x n (mode QLEN_ONLY), or for every node a line of seq_len + n (FULL_MASK,
    of which only the last n are written). positions: int64 [requests * n] (out). retrive_*: int64 [requests, n] (out),
    filled with -1 by the caller.
    """
    if tree_mask_mode not in (_FULL_MASK, _QLEN_ONLY):
        raise NotImplementedError(f"tree mask mode {tree_mask_mode} does not exist on CPU")
    n = draft_token_num
    seq_lens = verified_seq_len.numpy().astype(np.int64)
    parents = _parents_of_selected(parent_list.numpy(), selected_index.numpy(), topk, n)
    mask = _ancestors(parents)
    _write_links(parents, retrive_index, retrive_next_token, retrive_next_sibling)
    positions.copy_(torch.from_numpy((seq_lens[:, None] + mask.sum(-1) - 1).ravel()))
    if tree_mask_mode == _QLEN_ONLY:
        tree_mask[: mask.size] = torch.from_numpy(mask.ravel())
    else:
        tree_mask[torch.from_numpy(_full_mask_cells(seq_lens, n))] = torch.from_numpy(mask.ravel())


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Recover positions and links (out) from an n x n mask per request: the parent is the nearest earlier ancestor."""
    n = draft_token_num
    mask = tree_mask.numpy().reshape(batch_size, n, n).astype(bool)
    earlier = mask & np.tri(n, k=-1, dtype=bool)
    has_parent = earlier.any(-1)
    parents = np.where(has_parent, n - 1 - earlier[..., ::-1].argmax(-1), -1)
    seq_lens = verified_seq_len.numpy().astype(np.int64)
    positions.copy_(torch.from_numpy((seq_lens[:, None] + earlier.sum(-1)).ravel()))
    _write_links(parents, retrive_index, retrive_next_token, retrive_next_sibling)


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept the path of drafts that equals the target's own choice at every node.

    candidates: int [requests, n] draft tokens, root first. target_predict: int [requests, n], the target's argmax after
    each node. predicts: int32 [requests * n] (out), the token that follows each accepted node. accept_index: int32
    [requests, depth] (out), flat indices of the accepted nodes, the rest stays -1. accept_token_num: int32 [requests]
    (out), accepted drafts without the bonus token.
    """
    tokens, choice = candidates.numpy(), target_predict.numpy()
    flat_index, child, sibling = (t.numpy() for t in (retrive_index, retrive_next_token, retrive_next_sibling))
    out_index, out_token = accept_index.numpy(), predicts.numpy()
    rows = np.arange(tokens.shape[0])
    current = np.zeros_like(rows)
    accepted = np.zeros_like(rows)
    out_index[:, 0] = flat_index[:, 0]
    node = child[rows, current]
    alive = (node >= 0) & (out_index.shape[1] > 1)
    for _ in range(tokens.shape[1] - 1):
        row = rows[alive]
        if row.size == 0:
            break
        visited = node[row]
        hit = tokens[row, visited] == choice[row, current[row]]
        winners, won = row[hit], visited[hit]
        out_token[flat_index[winners, current[winners]]] = tokens[winners, won]
        accepted[winners] += 1
        out_index[winners, accepted[winners]] = flat_index[winners, won]
        current[winners] = won
        node[row] = np.where(hit, child[row, visited], sibling[row, visited])
        alive[row] = (node[row] >= 0) & (accepted[row] < out_index.shape[1] - 1)
    out_token[flat_index[rows, current]] = choice[rows, current]
    accept_token_num.copy_(torch.from_numpy(accepted))


def _parents_of_selected(parent_list: IntArray, selected: IntArray, topk: int, n: int) -> IntArray:
    """int64 [requests, n]: the parent of every node, -1 for the root and where the parent was not chosen."""
    parents = np.full((selected.shape[0], n), -1, dtype=np.int64)
    place = selected[:, : n - 1] // topk
    if parent_list.shape[-1] == 0:
        parents[:, 1:] = 0
        return parents
    candidate = np.take_along_axis(parent_list, place, axis=1)
    same = candidate[:, :, None] == selected[:, None, : n - 1]
    found = np.where(same.any(-1), same.argmax(-1) + 1, -1)
    parents[:, 1:] = np.where(place == 0, 0, found)
    return parents


def _ancestors(parents: IntArray) -> BoolArray:
    """bool [requests, n, n]: row i marks node i, its ancestors, and always the root. Parents precede their children."""
    requests, n = parents.shape
    mask = np.zeros((requests, n, n), dtype=bool)
    mask[:, 0, 0] = True
    rows = np.arange(requests)
    for i in range(1, n):
        mask[:, i] = mask[rows, np.maximum(parents[:, i], 0)]
        mask[:, i, i] = True
    return mask


def _write_links(
    parents: IntArray, retrive_index: torch.Tensor, retrive_next_token: torch.Tensor, retrive_next_sibling: torch.Tensor
) -> None:
    requests, n = parents.shape
    is_child = (parents[:, None, :] == np.arange(n)[None, :, None]) & (parents[:, None, :] >= 0)
    next_token = np.where(is_child.any(-1), is_child.argmax(-1), -1)
    same_parent = (parents[:, :, None] == parents[:, None, :]) & (parents[:, :, None] >= 0)
    later = same_parent & ~np.tri(n, dtype=bool)
    next_sibling = np.where(later.any(-1), later.argmax(-1), -1)
    retrive_index.copy_(torch.arange(requests * n).view(requests, n))
    retrive_next_token.copy_(torch.from_numpy(next_token))
    retrive_next_sibling.copy_(torch.from_numpy(next_sibling))


def _full_mask_cells(seq_lens: IntArray, n: int) -> IntArray:
    """int64 [requests * n * n]: where the tree part lies in the flat mask whose lines also cover the prefix."""
    width = seq_lens + n
    begin = np.cumsum(n * width) - n * width
    line = begin[:, None] + np.arange(n) * width[:, None] + seq_lens[:, None]
    return (line[:, :, None] + np.arange(n)).ravel()
