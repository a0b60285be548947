"""The operators behind ``torch.ops.sgl_kernel.*_cpu``, each against a plain loop."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from sglang_ssd.cpu import operators

operators.register()
ops = torch.ops.sgl_kernel


def filled(*shape: int, value: int = -1, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype)


# --- KV slots --------------------------------------------------------------------------------------------------------


def test_copy_all_layer_kv_cache_reads_before_it_writes() -> None:
    buffers = [torch.randn(20, 2, 8), torch.randn(20, 2, 8), torch.randn(20, 5).to(torch.bfloat16)]
    expected = [b.clone() for b in buffers]
    source, target = torch.tensor([3, 4, 5, 19]), torch.tensor([4, 3, 7, 0])
    for e, b in zip(expected, buffers, strict=True):
        for s, t in zip(source.tolist(), target.tolist(), strict=True):
            e[t] = b[s]
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b[0].numel() * b.element_size() for b in buffers])
    ops.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    assert all(torch.equal(e, b) for e, b in zip(expected, buffers, strict=True))


def test_copy_of_no_slot_does_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    ops.copy_all_layer_kv_cache_cpu(torch.tensor([1], dtype=torch.uint64), torch.tensor([8]), none, none)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_slot_table_is_written_and_read_back(index_dtype: torch.dtype) -> None:
    table = torch.randint(0, 1000, (6, 40), dtype=torch.int32)
    rows, start, end = [4, 0, 5], [3, 0, 38], [9, 0, 40]
    expected, slots, used = table.clone(), torch.randperm(500)[:8], 0
    for r, s, e in zip(rows, start, end, strict=True):
        for column in range(s, e):
            expected[r, column] = slots[used]
            used += 1
    ranges = [torch.tensor(x, dtype=index_dtype) for x in (rows, start, end)]
    ops.assign_req_to_token_pool_cpu(ranges[0], table, ranges[1], ranges[2], slots, 40)
    assert torch.equal(table, expected)
    read = filled(8)
    ops.assign_extend_cache_locs_cpu(ranges[0], table, ranges[1], ranges[2], read, 40)
    assert torch.equal(read, slots)


def test_assign_draft_cache_locs_contiguous() -> None:
    table = torch.arange(5 * 30, dtype=torch.int32).view(5, 30)
    out = filled(2 * 6)
    ops.assign_draft_cache_locs_contiguous_cpu(torch.tensor([3, 1]), table, torch.tensor([10, 0]), out, 30, 2, 3)
    assert out.tolist() == table[3, 10:16].tolist() + table[1, 0:6].tolist()


def test_fill_bonus_tokens() -> None:
    bonus = filled(3, dtype=torch.int32)
    tokens = torch.arange(100, 112, dtype=torch.int32)
    ops.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [100, 107, 109]


def test_fill_accept_out_cache_loc() -> None:
    out = filled(6, value=7)
    index = torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32)
    ops.fill_accept_out_cache_loc_cpu(index, torch.tensor([50, 51, 52, 53]), out)
    assert out.tolist() == [50, 52, 53, 7, 7, 7]


# --- Trees -----------------------------------------------------------------------------------------------------------


def random_parents(rng: random.Random, n: int) -> list[int]:
    return [-1] + [rng.randrange(i) for i in range(1, n)]


def path_to_root(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


def links_of(parents: list[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node."""
    n = len(parents)
    child, sibling = [-1] * n, [-1] * n
    for p in range(n):
        children = [i for i in range(n) if parents[i] == p]
        if children:
            child[p] = children[0]
        for a, b in itertools.pairwise(children):
            sibling[a] = b
    return child, sibling


def mask_of(parents: list[int]) -> list[list[bool]]:
    return [[j in path_to_root(parents, i) for j in range(len(parents))] for i in range(len(parents))]


@pytest.mark.parametrize("n", [2, 5, 16])
def test_reconstruct_indices_from_tree_mask(n: int) -> None:
    rng = random.Random(n)
    trees = [random_parents(rng, n) for _ in range(4)]
    lens = [10, 0, 99, 3]
    mask = torch.tensor([mask_of(t) for t in trees]).flatten()
    positions, index, child, sibling = filled(4 * n), filled(4, n), filled(4, n), filled(4, n)
    ops.reconstruct_indices_from_tree_mask_cpu(mask, torch.tensor(lens), positions, index, child, sibling, 4, n)
    assert index.flatten().tolist() == list(range(4 * n))
    for b, tree in enumerate(trees):
        assert (child[b].tolist(), sibling[b].tolist()) == links_of(tree)
        assert positions.view(4, n)[b].tolist() == [lens[b] + len(path_to_root(tree, i)) - 1 for i in range(n)]


def beam(rng: random.Random, topk: int, depth: int, n: int) -> tuple[list[int], list[int], list[int]]:
    """A beam search as EAGLE runs it: parent_list, selected candidates, and the parents of the resulting tree."""
    places = [list(range(topk))]  # candidates kept at each level; candidate c of level 0 hangs on the root
    parent_list = [-1, *places[0]]
    origin = dict.fromkeys(range(topk), -1)  # candidate -> the candidate it continues
    offset = topk
    for level in range(1, depth):
        kept = places[-1]
        new = {offset + p * topk + j: kept[p] for p in range(topk) for j in range(topk)}
        origin |= new
        places.append(sorted(rng.sample(sorted(new), topk)))
        if level < depth - 1:
            parent_list += places[-1]
        offset += topk * topk
    chosen: list[int] = []
    while len(chosen) < n - 1:  # a candidate is only chosen after the one that it continues
        free = [c for c in origin if c not in chosen and (origin[c] == -1 or origin[c] in chosen)]
        chosen.append(rng.choice(free))
    chosen.sort()
    parents = [-1] + [0 if origin[c] == -1 else chosen.index(origin[c]) + 1 for c in chosen]
    return parent_list, chosen, parents


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(("topk", "depth", "n"), [(1, 4, 5), (2, 3, 6), (3, 4, 12), (4, 1, 4)])
def test_build_tree(topk: int, depth: int, n: int, mode: int) -> None:
    rng = random.Random(topk * 100 + depth)
    lens = [4, 9]
    if topk == 1:
        chain = list(range(-1, n - 2))
        beams = [(chain, list(range(n - 1)), list(range(-1, n - 1)))] * 2
    else:
        beams = [beam(rng, topk, depth, n) for _ in lens]
    parent_list = torch.tensor([b[0] for b in beams]) if depth > 1 else torch.zeros(2, 0, dtype=torch.int64)
    size = 2 * n * n if mode == 1 else sum(n * (length + n) for length in lens)
    mask = torch.ones(size, dtype=torch.bool)
    positions, index, child, sibling = filled(2 * n), filled(2, n), filled(2, n), filled(2, n)
    selected = torch.tensor([b[1] for b in beams])
    ops.build_tree_kernel_efficient_cpu(
        parent_list, selected, torch.tensor(lens), mask, positions, index, child, sibling, topk, depth, n, mode
    )
    expected_mask: list[bool] = []
    for b, (length, (_, _, parents)) in enumerate(zip(lens, beams, strict=True)):
        assert (child[b].tolist(), sibling[b].tolist()) == links_of(parents)
        assert positions.view(2, n)[b].tolist() == [length + len(path_to_root(parents, i)) - 1 for i in range(n)]
        for line in mask_of(parents):
            expected_mask += ([True] * length if mode == 0 else []) + line
    assert mask.tolist() == expected_mask
    assert index.flatten().tolist() == list(range(2 * n))


def test_unknown_mask_mode_is_refused() -> None:
    n, none = 2, filled(1, 2)
    with pytest.raises(NotImplementedError, match="mask mode 2"):
        ops.build_tree_kernel_efficient_cpu(
            none, none, torch.tensor([1]), torch.ones(4, dtype=torch.bool), filled(2), none, none, none, 1, 1, n, 2
        )


@pytest.mark.parametrize("seed", range(20))
def test_verify_tree_greedy(seed: int) -> None:
    rng = random.Random(seed)
    n, batch, vocab = 9, 5, 3  # few tokens, so that paths are accepted
    depth = rng.choice([3, 9])
    trees = [random_parents(rng, n) for _ in range(batch)]
    links = [links_of(t) for t in trees]
    candidates = torch.tensor([[rng.randrange(vocab) for _ in range(n)] for _ in trees])
    target = torch.tensor([[rng.randrange(vocab) for _ in range(n)] for _ in trees])
    predicts, accept = filled(batch * n, value=-9, dtype=torch.int32), filled(batch, depth, dtype=torch.int32)
    count = filled(batch, dtype=torch.int32)
    ops.verify_tree_greedy_cpu(
        predicts,
        accept,
        count,
        candidates,
        torch.arange(batch * n).view(batch, n),
        torch.tensor([c for c, _ in links]),
        torch.tensor([s for _, s in links]),
        target,
    )
    for b, tree in enumerate(trees):
        path = [0]
        while len(path) < depth:
            children = [i for i in range(n) if tree[i] == path[-1]]
            match = [i for i in children if candidates[b, i] == target[b, path[-1]]]
            if not match:
                break
            path.append(match[0])
        assert accept[b].tolist() == [b * n + i for i in path] + [-1] * (depth - len(path))
        assert count[b] == len(path) - 1
        assert [predicts[b * n + i].item() for i in path] == [target[b, i].item() for i in path]


# --- Seeds -----------------------------------------------------------------------------------------------------------


def murmur3(key: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, for keys of whole words."""
    state = 0
    for i in range(0, len(key), 4):
        word = int.from_bytes(key[i : i + 4], "little") * 0xCC9E2D51 % 2**32
        word = (word << 15 | word >> 17) % 2**32 * 0x1B873593 % 2**32
        state ^= word
        state = ((state << 13 | state >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    state ^= len(key)
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
    return state ^ state >> 16


def test_reference_hash_is_the_published_one() -> None:
    assert murmur3(b"test") == 0xBA6BD213
    assert murmur3(b"\xff\xff\xff\xff") == 0x76293B50


def test_murmur_hash32() -> None:
    seeds = [0, 1, 42, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1]
    positions, columns = [0, 7, 1023, 5, 2**31, 3, 9], [0, 1, 2047, 151935]
    hashed = ops.murmur_hash32_cpu(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions).to(torch.uint64), torch.tensor(columns)
    )
    assert hashed.dtype == torch.uint32
    words = [(s % 2**32, s >> 32, p) for s, p in zip(seeds, positions, strict=True)]
    expected = [[murmur3(b"".join(w.to_bytes(4, "little") for w in (*row, c))) for c in columns] for row in words]
    assert hashed.tolist() == expected
