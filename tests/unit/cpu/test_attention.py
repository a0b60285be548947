"""Attention of the torch_cpu backend against attention computed request by request, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from sglang_ssd.cpu import attention_plan
from sglang_ssd.cpu.attention import attend
from sglang_ssd.cpu.attention_plan import NO_WINDOW, plan_ragged, plan_uniform

HEADS, KV_HEADS, DIM = 6, 2, 16
POOL_ROWS, WIDTH, SLOTS = 9, 700, 4000


@dataclass
class Cache:
    """A slot table whose requests lie scattered over the pool, and the pool itself."""

    table: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@pytest.fixture
def cache() -> Cache:
    torch.manual_seed(0)
    table = torch.randperm(SLOTS - 1)[: POOL_ROWS * 400].view(POOL_ROWS, 400) + 1
    table = torch.cat((table, torch.zeros(POOL_ROWS, WIDTH - 400, dtype=torch.int64)), dim=1).to(torch.int32)
    key, value = torch.randn(SLOTS, KV_HEADS, DIM), torch.randn(SLOTS, KV_HEADS, DIM)
    key[0], value[0] = 1e3, 1e3  # what padding points to must never be seen
    return Cache(table, key, value)


def reference(
    query: torch.Tensor,
    cache: Cache,
    rows: list[int],
    key_lens: list[int],
    counts: list[int],
    *,
    window: int = NO_WINDOW,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    trees: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """One query token and one head at a time, in double precision."""
    out = torch.empty(query.shape[0], HEADS, DIM, dtype=torch.float64)
    token = 0
    for request, (row, key_len, count) in enumerate(zip(rows, key_lens, counts, strict=True)):
        for i in range(count):
            prefix = key_len - count
            if trees is None:
                position, visible = prefix + i, list(range(prefix + i + 1))
            else:
                position = prefix + int(trees[request][i].sum()) - 1
                visible = list(range(prefix)) + [prefix + j for j in range(count) if trees[request][i, j]]
            if window != NO_WINDOW:
                visible = [p for p in visible if p >= prefix or p >= position - window]
                if trees is None:
                    visible = [p for p in visible if p >= position - window]
            slots = cache.table[row, visible].long()
            for head in range(HEADS):
                k, v = (b[slots, head // (HEADS // KV_HEADS)].double() for b in (cache.key, cache.value))
                scores = k @ query[token, head].double() / math.sqrt(DIM)
                scores = cap * torch.tanh(scores / cap) if cap else scores
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                out[token, head] = torch.softmax(scores, 0)[: len(visible)] @ v
            token += 1
    return out


def run(query: torch.Tensor, cache: Cache, blocks: list[attention_plan.Block], **kwargs: object) -> torch.Tensor:
    return attend(query, cache.key, cache.value, blocks, scale=1 / math.sqrt(DIM), **kwargs)  # type: ignore[arg-type]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual.double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("window", [NO_WINDOW, 1, 7, 64])
@pytest.mark.parametrize("key_lens", [[33], [50, 50], [1, 200, 37, 8]])
def test_decode(cache: Cache, key_lens: list[int], window: int) -> None:
    rows = [3, 0, 7, 5][: len(key_lens)]
    query = torch.randn(len(rows), HEADS, DIM)
    blocks = plan_uniform(cache.table, torch.tensor(rows), torch.tensor(key_lens, dtype=torch.int32), num_queries=1)
    expected = reference(query, cache, rows, key_lens, [1] * len(rows), window=window)
    assert_close(run(query, cache, blocks, window=window), expected)


@pytest.mark.parametrize("window", [NO_WINDOW, 3, 20])
def test_verify_chain(cache: Cache, window: int) -> None:
    rows, key_lens, n = [2, 8, 1], [5, 140, 77], 5
    query = torch.randn(len(rows) * n, HEADS, DIM)
    blocks = plan_uniform(cache.table, torch.tensor(rows), torch.tensor(key_lens), num_queries=n)
    expected = reference(query, cache, rows, key_lens, [n] * 3, window=window)
    assert_close(run(query, cache, blocks, window=window), expected)


@pytest.mark.parametrize("window", [NO_WINDOW, 10, 30])
def test_verify_tree(cache: Cache, window: int) -> None:
    rows, key_lens, parents = [4, 6], [60, 21], [[-1, 0, 0, 1, 2, 4], [-1, 0, 1, 2, 0, 0]]
    n = len(parents[0])
    trees = [torch.zeros(n, n, dtype=torch.bool) for _ in rows]
    for tree, parent in zip(trees, parents, strict=True):
        for i in range(n):
            node = i
            while node >= 0:
                tree[i, node] = True
                node = parent[node]
    query = torch.randn(len(rows) * n, HEADS, DIM)
    blocks = plan_uniform(
        cache.table, torch.tensor(rows), torch.tensor(key_lens), num_queries=n, tree_mask=torch.stack(trees)
    )
    expected = reference(query, cache, rows, key_lens, [n] * 2, window=window, trees=trees)
    assert_close(run(query, cache, blocks, window=window), expected)
    chain = plan_uniform(cache.table, torch.tensor(rows), torch.tensor(key_lens), num_queries=n)
    assert (run(query, cache, chain, window=window).double() - expected).abs().max() > 1e-2  # the mask matters


@pytest.mark.parametrize("window", [NO_WINDOW, 9, 100])
@pytest.mark.parametrize(
    ("key_lens", "counts"),
    [([30], [30]), ([12, 12], [12, 12]), ([90, 4, 300, 17, 63], [40, 4, 1, 16, 31]), ([390, 20], [390, 3])],
)
def test_prefill(cache: Cache, key_lens: list[int], counts: list[int], window: int) -> None:
    """Mixed lengths, cached prefixes (radix hits, later chunks of a prompt) and prompts longer than one run."""
    rows = [8, 1, 4, 0, 6][: len(key_lens)]
    query = torch.randn(sum(counts), HEADS, DIM)
    blocks = plan_ragged(cache.table, torch.tensor(rows), key_lens, counts)
    expected = reference(query, cache, rows, key_lens, counts, window=window)
    assert_close(run(query, cache, blocks, window=window), expected)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("cap", [0.0, 2.5])
def test_logit_cap_and_sinks(cache: Cache, cap: float, with_sinks: bool) -> None:
    rows, key_lens, counts = [0, 5], [40, 11], [3, 11]
    sinks = torch.randn(HEADS) if with_sinks else None
    query = torch.randn(sum(counts), HEADS, DIM)
    blocks = plan_ragged(cache.table, torch.tensor(rows), key_lens, counts)
    expected = reference(query, cache, rows, key_lens, counts, cap=cap, sinks=sinks)
    assert_close(run(query, cache, blocks, logit_cap=cap, sinks=sinks), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(cache: Cache, dtype: torch.dtype) -> None:
    rows, key_lens, counts = [0, 5, 2], [40, 11, 100], [3, 11, 100]
    cache.key, cache.value = cache.key.to(dtype), cache.value.to(dtype)
    query = torch.randn(sum(counts), HEADS, DIM).to(dtype)
    out = run(query, cache, plan_ragged(cache.table, torch.tensor(rows), key_lens, counts))
    assert out.dtype == dtype
    assert (out.double() - reference(query, cache, rows, key_lens, counts)).abs().max() < 0.03


def test_windowed_layers_may_have_a_pool_of_their_own(cache: Cache) -> None:
    rows, key_lens = [3, 1], [25, 60]
    query = torch.randn(2, HEADS, DIM)
    blocks = plan_uniform(cache.table, torch.tensor(rows), torch.tensor(key_lens), num_queries=1)
    expected = reference(query, cache, rows, key_lens, [1, 1], window=8)
    order = torch.cat((torch.zeros(1, dtype=torch.int64), torch.randperm(SLOTS - 1) + 1))
    moved = Cache(cache.table, torch.empty_like(cache.key), torch.empty_like(cache.value))
    moved.key[order], moved.value[order] = cache.key, cache.value
    assert_close(run(query, moved, blocks, window=8, translate=lambda slots: order[slots]), expected)


def test_memory_of_a_long_prompt_is_bounded(cache: Cache) -> None:
    counts = [400] * 5
    blocks = plan_ragged(cache.table, torch.arange(5), counts, counts)
    assert all(block.num_queries <= 128 for block in blocks)
    assert sum(int(b.row_queries.sum()) for b in blocks if b.row_queries is not None) == sum(counts)


def test_idle_batch() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    blocks = plan_uniform(torch.zeros(2, 4, dtype=torch.int32), empty, empty, num_queries=1)
    out = attend(
        torch.zeros(0, HEADS, DIM), torch.zeros(3, KV_HEADS, DIM), torch.zeros(3, KV_HEADS, DIM), blocks, scale=1
    )
    assert out.shape == (0, HEADS, DIM)
