"""The attention backend as SGLang drives it: which keys each kind of forward pass sees, and what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ssd.cpu import activate

HEADS, KV_HEADS, DIM = 4, 2, 8


@pytest.fixture(scope="module")
def sgl() -> Any:
    """What the tests use of SGLang; imported late, because that takes a while."""
    if not activate():
        pytest.skip("an accelerator or native CPU operators serve this machine")
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sglang_ssd.cpu import attention_backend

    layer = SimpleNamespace(
        layer_id=0,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
        sliding_window_size=-1,
        scaling=1 / math.sqrt(DIM),
        logit_cap=0.0,
        tp_q_head_num=HEADS,
        qk_head_dim=DIM,
        v_head_dim=DIM,
    )
    return SimpleNamespace(
        backend=attention_backend.TorchCpuAttnBackend,
        draft_steps=attention_backend.TorchCpuMultiStepDraftBackend,
        mode=ForwardMode,
        attention_type=AttentionType,
        layer=layer,
    )


class Pool:
    """A KV pool of one layer."""

    def __init__(self) -> None:
        self.key, self.value = torch.randn(500, KV_HEADS, DIM), torch.randn(500, KV_HEADS, DIM)

    def get_key_buffer(self, _layer: int) -> torch.Tensor:
        return self.key

    def get_value_buffer(self, _layer: int) -> torch.Tensor:
        return self.value

    def set_kv_buffer(self, _layer: object, where: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        self.key[where.loc] = key.view(-1, KV_HEADS, DIM)
        self.value[where.loc] = value.view(-1, KV_HEADS, DIM)


@pytest.fixture
def runner() -> Any:
    torch.manual_seed(1)
    table = (torch.randperm(499)[:480].view(6, 80) + 1).to(torch.int32)
    return SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=Pool())


def batch(mode: Any, rows: list[int], lens: list[int], slots: list[torch.Tensor], **fields: Any) -> Any:
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(rows),
        req_pool_indices=torch.tensor(rows, dtype=torch.int32),
        seq_lens=torch.tensor(lens),
        out_cache_loc=torch.cat(slots).long(),
        **fields,
    )


def run(sgl: Any, backend: Any, forward_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and outputs of one forward pass of the layer over new random tokens."""
    tokens = forward_batch.out_cache_loc.shape[0]
    q = torch.randn(tokens, HEADS * DIM)
    k, v = torch.randn(tokens, KV_HEADS * DIM), torch.randn(tokens, KV_HEADS * DIM)
    out = backend.forward(q, k, v, sgl.layer, forward_batch)
    assert out.shape == (tokens, HEADS * DIM)
    return q.view(tokens, HEADS, DIM), out.view(tokens, HEADS, DIM)


def expect(pool: Pool, query: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Attention of one query token over the given slots."""
    key, value = (b[slots.long()].repeat_interleave(HEADS // KV_HEADS, 1) for b in (pool.key, pool.value))
    weights = torch.softmax(torch.einsum("hd,khd->hk", query, key) / math.sqrt(DIM), -1)
    return torch.einsum("hk,khd->hd", weights, value)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-5)


def test_decode_and_extend(sgl: Any, runner: Any) -> None:
    table, pool = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool
    backend = sgl.backend(runner)
    rows, prefix, new = [4, 1, 2], [0, 30, 7], [12, 1, 5]
    lens = [p + n for p, n in zip(prefix, new, strict=True)]
    slots = [table[r, p:length] for r, p, length in zip(rows, prefix, lens, strict=True)]
    extend = batch(sgl.mode.EXTEND, rows, lens, slots, extend_seq_lens=torch.tensor(new))
    backend.init_forward_metadata(extend)
    query, out = run(sgl, backend, extend)
    token = 0
    for row, p, length in zip(rows, prefix, lens, strict=True):
        for end in range(p + 1, length + 1):
            assert close(out[token], expect(pool, query[token], table[row, :end]))
            token += 1
    decode = batch(
        sgl.mode.DECODE, rows, [n + 1 for n in lens], [table[r, n : n + 1] for r, n in zip(rows, lens, strict=True)]
    )
    backend.init_forward_metadata(decode)
    query, out = run(sgl, backend, decode)
    for i, (row, length) in enumerate(zip(rows, lens, strict=True)):
        assert close(out[i], expect(pool, query[i], table[row, : length + 1]))


@pytest.mark.parametrize("tree_topk", [1, -1])
def test_target_verify(sgl: Any, runner: Any, tree_topk: int) -> None:
    table, pool = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool
    rows, lens, n = [0, 5], [20, 3], 4
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    spec = SimpleNamespace(draft_token_num=n, tree_topk=tree_topk, custom_mask=mask.flatten().repeat(2))
    slots = [table[r, length : length + n] for r, length in zip(rows, lens, strict=True)]
    verify = batch(sgl.mode.TARGET_VERIFY, rows, lens, slots, spec_info=spec)
    backend = sgl.backend(runner)
    backend.init_forward_metadata(verify)
    query, out = run(sgl, backend, verify)
    visible = mask if tree_topk != 1 else torch.tril(torch.ones(n, n, dtype=torch.bool))
    for request, (row, length) in enumerate(zip(rows, lens, strict=True)):
        for i in range(n):
            seen = torch.cat((table[row, :length], table[row, length : length + n][visible[i]]))
            assert close(out[request * n + i], expect(pool, query[request * n + i], seen))


@pytest.mark.parametrize("topk", [1, 3])
def test_draft_steps(sgl: Any, runner: Any, topk: int) -> None:
    """Every branch sees the committed tokens and its own slots, never those of another branch."""
    table, pool = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool
    rows, lens, steps = [3, 0], [10, 25], 4
    backends = sgl.draft_steps(runner, topk, steps)
    first = batch(sgl.mode.DECODE, rows, lens, [torch.zeros(0)])
    backends.init_forward_metadata(first)
    assert len(backends.attn_backends) == steps - 1
    for step, backend in enumerate(backends.attn_backends):
        begin = [(r, length + t * steps) for r, length in zip(rows, lens, strict=True) for t in range(topk)]
        slots = [table[r, b + step : b + step + 1] for r, b in begin]
        query, out = run(sgl, backend, batch(sgl.mode.DECODE, rows, lens, slots))
        for branch, (row, b) in enumerate(begin):
            seen = torch.cat((table[row, : lens[branch // topk]], table[row, b : b + step + 1]))
            assert close(out[branch], expect(pool, query[branch], seen))


def test_plan_is_of_the_latest_batch(sgl: Any, runner: Any) -> None:
    """The same tensors with other contents: nothing may be remembered by identity."""
    table, pool = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool
    backend = sgl.backend(runner)
    decode = batch(sgl.mode.DECODE, [1, 2], [5, 9], [table[1, 4:5], table[2, 8:9]])
    backend.init_forward_metadata(decode)
    run(sgl, backend, decode)
    decode.seq_lens.add_(1)
    decode.out_cache_loc.copy_(torch.stack((table[1, 5], table[2, 9])))
    backend.init_forward_metadata(decode)
    query, out = run(sgl, backend, decode)
    assert close(out[0], expect(pool, query[0], table[1, :6]))
    assert close(out[1], expect(pool, query[1], table[2, :10]))


def test_other_kinds_of_attention_are_refused(sgl: Any, runner: Any) -> None:
    backend = sgl.backend(runner)
    for change in ({"is_cross_attention": True}, {"attn_type": sgl.attention_type.ENCODER_ONLY}):
        layer = SimpleNamespace(**{**vars(sgl.layer), **change})
        with pytest.raises(NotImplementedError, match="torch_native"):
            backend.forward_extend(torch.zeros(1, HEADS * DIM), None, None, layer, SimpleNamespace())
