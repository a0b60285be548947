"""Where a forward pass finds its keys: padded gather indices and masks, built once and shared by all layers.

Vocabulary: a *row* is a run of consecutive new tokens (queries) of one request together with the keys they may see; a
*block* is a set of rows of similar size padded to one rectangle, so that one gather and one attention call serve it.
A plan is made for one forward pass and thrown away with it, therefore it can never describe another batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

NO_WINDOW = -1

# Queries of a long prompt are cut into runs of this many tokens: a run needs a mask of run x keys, so that the mask of
# a whole prompt (tokens x tokens) is never built, and keys later than the run are not even gathered.
_MAX_RUN = 128
# Upper bound of rows x padded keys in one block. It bounds the temporary copy of K and V that a layer makes.
_MAX_BLOCK_KEYS = 1 << 16

TranslateSlots = Callable[[torch.Tensor], torch.Tensor]


class Layout(NamedTuple):
    """Gather indices and mask of one block for layers of one kind."""

    slots: torch.Tensor  # int64 [rows * keys], KV slots; padding points to slot 0
    num_keys: int
    bias: torch.Tensor | None  # [rows, 1, repeats * queries, keys], 0 or -inf; None where every key is visible


@dataclass
class Block:
    """Rows padded to ``num_queries`` queries each.

    slot_table: int [requests, width], the KV slot of every position of every request.
    table_rows: int64 [rows], the line of ``slot_table`` that belongs to each row.
    key_lens:   int64 [rows], one more than the position of the row's last query.
    row_queries: int64 [rows] true number of queries where it differs between rows, else None.
    max_key_len: the largest of ``key_lens``.
    gather:     int64 [rows * num_queries] index into the flat queries (padding repeats a real one), or None where the
                block is the whole batch in order.
    scatter:    pair (positions in the padded block, positions in the flat output), or None like ``gather``.
    tree_mask:  bool [rows, num_queries, num_queries], which of the row's own tokens a query sees, or None for a chain.
    """

    slot_table: torch.Tensor
    table_rows: torch.Tensor
    key_lens: torch.Tensor
    num_queries: int
    max_key_len: int
    row_queries: torch.Tensor | None = None
    gather: torch.Tensor | None = None
    scatter: tuple[torch.Tensor, torch.Tensor] | None = None
    tree_mask: torch.Tensor | None = None
    _layouts: dict[tuple[int, int, torch.dtype, bool], Layout] = field(default_factory=dict, repr=False)

    @property
    def num_rows(self) -> int:
        return self.key_lens.shape[0]

    def layout(
        self, *, window: int, repeats: int, dtype: torch.dtype, translate: TranslateSlots | None = None
    ) -> Layout:
        """Indices and mask for a layer.

        window: how many positions before its own a query sees (SGLang's ``sliding_window_size``), or NO_WINDOW.
        repeats: query heads per key head; the mask is repeated because these heads are folded into the query axis.
        translate: maps KV slots to the slots of this layer's pool where windowed layers have a pool of their own.
        """
        key = (window, repeats, dtype, translate is not None)
        if key not in self._layouts:
            self._layouts[key] = self._build_layout(window, repeats, dtype, translate)
        return self._layouts[key]

    def _build_layout(self, window: int, repeats: int, dtype: torch.dtype, translate: TranslateSlots | None) -> Layout:
        first, num_keys = self._key_range(window)
        column = torch.arange(num_keys)
        if first is None:
            slots = self.slot_table[self.table_rows, :num_keys]
            key_position = column.expand(self.num_rows, num_keys)
        else:
            key_position = first[:, None] + column
            last_column = self.slot_table.shape[1] - 1
            slots = self.slot_table[self.table_rows[:, None], key_position.clamp(max=last_column)]
        slots = slots.to(torch.int64)
        if translate is not None:
            slots = translate(slots).to(torch.int64)
        in_row = key_position < self.key_lens[:, None]
        slots = torch.where(in_row, slots, 0)
        if self.num_queries == 1 and bool(in_row.all()):
            return Layout(slots.flatten(), num_keys, None)
        visible = self._visible(key_position, window) & in_row[:, None]
        bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        return Layout(slots.flatten(), num_keys, bias.repeat(1, repeats, 1)[:, None])

    def _key_range(self, window: int) -> tuple[torch.Tensor | None, int]:
        """First key position of every row (None: all begin at 0) and the padded number of keys."""
        span = window + self.num_queries
        if window == NO_WINDOW or span >= self.max_key_len:
            return None, self.max_key_len
        return (self.key_lens - span).clamp_(min=0), span

    def _visible(self, key_position: torch.Tensor, window: int) -> torch.Tensor:
        """bool [rows, queries, keys]: the causal, windowed and tree rules, without the end of the row."""
        query = torch.arange(self.num_queries)
        if self.tree_mask is not None:
            return self._visible_in_tree(key_position, window)
        if self.row_queries is None:
            position = (self.key_lens - self.num_queries)[:, None] + query
        else:
            # Padding queries take the position of the last real one: they must see a key, or softmax would give NaN.
            position = torch.minimum((self.key_lens - self.row_queries)[:, None] + query, self.key_lens[:, None] - 1)
        visible = key_position[:, None] <= position[:, :, None]
        if window != NO_WINDOW:
            visible &= key_position[:, None] >= position[:, :, None] - window
        return visible

    def _visible_in_tree(self, key_position: torch.Tensor, window: int) -> torch.Tensor:
        assert self.tree_mask is not None
        n = self.num_queries
        node = key_position - (self.key_lens - n)[:, None]  # >= 0: one of the row's own tokens
        own = self.tree_mask.gather(2, node.clamp(0, n - 1)[:, None].expand(-1, n, -1))
        prefix = (node < 0)[:, None]
        if window != NO_WINDOW:
            # The position of a tree node is the end of the prefix plus its depth, whatever slot it was written to.
            depth = self.tree_mask.sum(-1) - 1
            position = (self.key_lens - n)[:, None] + depth
            prefix = prefix & (key_position[:, None] >= position[:, :, None] - window)
        return torch.where(node[:, None] < 0, prefix, own)


def plan_uniform(
    slot_table: torch.Tensor,
    table_rows: torch.Tensor,
    key_lens: torch.Tensor,
    *,
    num_queries: int,
    tree_mask: torch.Tensor | None = None,
) -> list[Block]:
    """Plan of a batch in which every request brings ``num_queries`` tokens: decode, verify, draft steps."""
    if key_lens.shape[0] == 0:
        return []
    key_lens = key_lens.to(torch.int64)
    block = Block(slot_table, table_rows, key_lens, num_queries, max_key_len=int(key_lens.max()), tree_mask=tree_mask)
    return [block]


def plan_ragged(
    slot_table: torch.Tensor, table_rows: torch.Tensor, key_lens: Sequence[int], num_queries: Sequence[int]
) -> list[Block]:
    """Plan of a prefill: requests of any length, with or without a cached prefix.

    table_rows: int64 [requests]; key_lens and num_queries: per request, prefix + new tokens and new tokens.
    Rows are grouped by the next power of two of both sizes, so that padding at most doubles either.
    """
    groups: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    start = 0
    for request, (key_len, count) in enumerate(zip(key_lens, num_queries, strict=True)):
        for offset in range(0, count, _MAX_RUN):
            run = min(_MAX_RUN, count - offset)
            run_key_len = key_len - count + offset + run
            group = (run.bit_length(), run_key_len.bit_length())
            groups.setdefault(group, []).append((request, start + offset, run, run_key_len))
        start += count
    blocks = []
    for rows in groups.values():
        longest = max(key_len for *_, key_len in rows)
        per_block = max(1, _MAX_BLOCK_KEYS // longest)
        for i in range(0, len(rows), per_block):
            blocks.append(_ragged_block(slot_table, table_rows, rows[i : i + per_block]))
    return blocks


def _ragged_block(
    slot_table: torch.Tensor, table_rows: torch.Tensor, rows: Sequence[tuple[int, int, int, int]]
) -> Block:
    request, start, count, key_len = torch.tensor(rows, dtype=torch.int64).unbind(1)
    width = int(count.max())
    query = torch.arange(width)
    gather = (start[:, None] + torch.minimum(query, count[:, None] - 1)).flatten()
    real = (query < count[:, None]).flatten().nonzero().flatten()
    return Block(
        slot_table,
        table_rows[request],
        key_len,
        width,
        max_key_len=int(key_len.max()),
        row_queries=count,
        gather=gather,
        scatter=(real, gather[real]),
    )
