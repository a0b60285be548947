"""The hooks: which rule decides about which row, and texts of requests with seeds, over a model made of a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from ssd_proto.noise import shared_noise

from .batches import GREEDY, batch_info, sampler_on_cpu
from .conftest import FakeRequest, params

V, K = 300, 3
N = K + 1
FILTERED = {"top_k": 20, "top_p": 0.9}
Row = dict[str, float]


@pytest.fixture(autouse=True)
def _sglang() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    return sampler_on_cpu(monkeypatch)


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    """[V, V] logits after each token."""
    return 2 * torch.randn(V, V, generator=torch.Generator().manual_seed(0))


def nobody_asks(*_: Any, **__: Any) -> None:
    raise AssertionError("SGLang's own verification was asked")


def no_q(batch_size: int) -> Any:
    from sglang_ssd.rejection import SparseProbs

    return SparseProbs(torch.zeros(batch_size, K, 1, dtype=torch.int64), torch.zeros(batch_size, K, 1))


def chain(drafts: torch.Tensor, positions: torch.Tensor, sampler: Any, **basis: Any) -> Any:
    """The verify input of ``drafts`` [b, N], whose bonus tokens are at ``positions`` [b]."""
    from sglang_ssd.sampling import Basis, ChainVerifyInput

    return ChainVerifyInput(
        draft_token=drafts.flatten(),
        custom_mask=None,
        positions=(positions.unsqueeze(1) + torch.arange(N)).flatten(),
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=K,
        topk=1,
        draft_token_num=N,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
        sampler=sampler,
        generator=torch.Generator().manual_seed(1),
        basis=Basis(**{"q": no_q(len(drafts)), **basis}),
    )


def verify(verify_input: Any, info: Any, logits: torch.Tensor, original: Any = nobody_asks) -> Any:
    from sglang_ssd.sampling import sample_chain

    batch = SimpleNamespace(
        sampling_info=info, forward_mode=SimpleNamespace(is_idle=lambda: False), reqs=[None] * len(info)
    )
    return sample_chain(original, verify_input, batch, LogitsProcessorOutput(next_token_logits=logits))


class Decoding:
    """Requests that are decoded together, round by round."""

    def __init__(self, table: torch.Tensor, sampler: Any, rows: list[Row], seeds: list[int | None]) -> None:
        self.table = table
        self.sampler = sampler
        self.info = batch_info(rows, V)
        self.requests = [
            FakeRequest(str(i), [1], sampling_params=params(**({"top_k": 1 << 30} | row), sampling_seed=seed))
            for i, (row, seed) in enumerate(zip(rows, seeds, strict=True))
        ]

    def prefill(self, prompts: list[list[int]]) -> list[list[int]]:
        from sglang_ssd.sampling import draw_plain, seed_first_tokens

        seed_first_tokens(self.info, self.requests, self.sampler)
        probs = torch.softmax(self.table[[prompt[-1] for prompt in prompts]] / self.info.temperatures, -1)
        ends = torch.tensor([len(prompt) - 1 for prompt in prompts])
        bare = type(self.sampler)._sample_from_probs
        is_simple = not (self.info.need_top_k_sampling or self.info.need_top_p_sampling)
        tokens, _ = draw_plain(bare, self.sampler, probs, self.info, ends, is_simple)
        return [[*prompt, int(token)] for prompt, token in zip(prompts, tokens, strict=True)]

    def round(self, texts: list[list[int]], drafts: torch.Tensor) -> list[list[int]]:
        """The texts after a round that verifies ``drafts`` [b, K]."""
        from sglang_ssd.coupling import coupled_rows
        from sglang_ssd.request_sampling import seed_of

        tokens = torch.cat([torch.tensor([[text[-1]] for text in texts]), drafts], 1)
        positions = torch.tensor([len(text) - 1 for text in texts])
        coupled = coupled_rows(self.requests, seed_of, "cpu")
        verify_input = chain(tokens, positions, self.sampler, coupled=coupled)
        predict, accept_lens, accept_index = verify(verify_input, self.info, self.table[tokens.flatten()])
        for text, length, index in zip(texts, accept_lens, accept_index, strict=True):
            text.extend(predict[index[:length]].tolist())
        return texts


def text_of(
    table: torch.Tensor,
    sampler: Any,
    row: Row,
    seed: int,
    others: list[tuple[Row, int | None]],
    draft: Callable[[list[int]], list[int]],
) -> list[int]:
    """20 tokens of the request ``row`` with ``seed``, among ``others``, whatever ``draft`` proposes."""
    rows, seeds = [*(other for other, _ in others), row], [*(own for _, own in others), seed]
    decoding = Decoding(table, sampler, rows, seeds)
    texts = decoding.prefill([*([2, 3, i] for i in range(len(others))), [5, 17]])
    while len(texts[-1]) < 24:
        texts = decoding.round(texts, torch.tensor([draft(text) for text in texts]))
    return texts[-1][:22]


@pytest.mark.parametrize("row", [{}, FILTERED, {"temperature": 0.6, "min_p": 0.02}], ids=["plain", "filtered", "min_p"])
def test_a_seed_reproduces_the_text_whatever_else_happens(table: torch.Tensor, sampler: Any, row: Row) -> None:
    alone = text_of(table, sampler, row, 42, [], lambda _: [0, 0, 0])

    def oracle(text: list[int]) -> list[int]:
        here = alone[len(text) : len(text) + K]
        return here + [0] * (K - len(here))

    torch.manual_seed(99)
    mixed: list[tuple[Row, int | None]] = [({}, None), (GREEDY, None), (FILTERED, 7), ({"top_p": 0.5}, None)]
    assert text_of(table, sampler, row, 42, [], oracle) == alone
    assert text_of(table, sampler, row, 42, mixed, oracle) == alone
    assert text_of(table, sampler, row, 42, mixed, lambda text: [text[-1]] * K) == alone
    assert text_of(table, sampler, row, 43, [], lambda _: [0, 0, 0]) != alone


def test_a_retracted_request_goes_on_with_the_same_text(table: torch.Tensor, sampler: Any) -> None:
    whole = text_of(table, sampler, FILTERED, 42, [], lambda _: [0, 0, 0])
    decoding = Decoding(table, sampler, [FILTERED], [42])
    texts = decoding.prefill([whole[:9]])
    while len(texts[0]) < 22:
        texts = decoding.round(texts, torch.zeros(1, K, dtype=torch.int64))
    assert texts[0][:22] == whole


def test_filters_of_others_do_not_cut_off_what_rounding_puts_beyond_1() -> None:
    """A row without filters goes through those of the batch if another row has some."""
    from sglang_ssd.coupling import first_by_noise
    from sglang_ssd.target_distribution import Filters

    count = 1000
    probs = torch.tensor([[0.6, 0.45, 0.3]]).expand(count, 3)  # a sum above 1, as rounding makes it, but more of it
    filters = Filters(torch.full((count,), 1 << 30), torch.ones(count), torch.zeros(count))
    seeds, positions = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    without = first_by_noise(probs, seeds, positions, None)
    assert (without == 2).any()
    assert (first_by_noise(probs, seeds, positions, filters) == without).all()


def test_rounds_of_a_seed_take_what_the_speculators_noise_draws(table: torch.Tensor, sampler: Any) -> None:
    """The draft needs nothing but (seed, position, token): here with the target's own probabilities."""
    decoding = Decoding(table, sampler, [{}], [42])
    text = [4, 8, 15]
    drafts: list[int] = []
    for step in range(K):
        last = [*text, *drafts][-1]
        noise = shared_noise(np.array([42]), np.array([len(text) + step]), np.arange(V)[None])
        drafts.append(int((table[last].double().log_softmax(-1).numpy() + noise[0]).argmax()))
    (after,) = decoding.round([list(text)], torch.tensor([drafts]))
    assert after[:6] == [*text, *drafts]
    assert len(after) == 7


@pytest.mark.parametrize("row", [{}, {"top_k": 4, "top_p": 0.8, "temperature": 1.5}], ids=["plain", "filtered"])
def test_over_many_seeds_the_law_is_the_targets(row: Row) -> None:
    from sglang_ssd.coupling import CoupledRows, draw_coupled
    from sglang_ssd.target_distribution import filtered, tempered

    count, size = 100_000, 8
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(5))
    info = batch_info([row], size)
    probs = tempered(logits, info.temperatures)
    p = filtered(probs, info, "pytorch")[0, 0].double()
    for name in ("top_ks", "top_ps", "min_ps", "temperatures"):
        setattr(info, name, getattr(info, name).repeat_interleave(count, 0))
    coupled = CoupledRows(torch.arange(count), torch.arange(count) * 3, is_filtered=bool(row))
    tokens = draw_coupled(probs.expand(count, 2, size), coupled, torch.tensor([[4, 5]]).expand(count, 2), info)
    both = torch.bincount(tokens[:, 0] * size + tokens[:, 1], minlength=size * size)
    expected = torch.outer(p, p).flatten()
    assert not both[expected == 0].any()
    assert chisquare(both[expected > 0], expected[expected > 0] / expected.sum() * count).pvalue > 1e-3


def test_every_row_obeys_its_rule(table: torch.Tensor, sampler: Any) -> None:
    """A greedy row, a seeded one and a sampled one whose q is p: all drafts accepted, by three rules."""
    from sglang_ssd.coupling import CoupledRows
    from sglang_ssd.rejection import SparseProbs

    info = batch_info([GREEDY, {}, {}], V)
    by_seed = Decoding(table, sampler, [{}], [11])
    seeded = by_seed.round([[9]], torch.zeros(1, K, dtype=torch.int64))[0]
    while len(seeded) < 5:
        seeded = by_seed.round([seeded], torch.zeros(1, K, dtype=torch.int64))[0]
    tokens = torch.zeros(3, N, dtype=torch.int64)
    tokens[:, 0] = 9
    for step in range(K):
        tokens[0, step + 1] = table[tokens[0, step]].argmax()
        tokens[2, step + 1] = table[tokens[2, step]].softmax(-1).topk(5).indices[4]  # unlikely, so not by p alone
    tokens[1] = torch.tensor(seeded[:N])
    q = SparseProbs(torch.arange(V).expand(3, K, V), torch.zeros(3, K, V))
    q.probs[2] = table[tokens[2, :-1]].softmax(-1) * (1 - 1e-6)
    coupled = CoupledRows(torch.tensor([1]), torch.tensor([11]), False)
    verify_input = chain(tokens, torch.zeros(3, dtype=torch.int64), sampler, q=q, coupled=coupled)
    logits = table[tokens.flatten()]
    before = logits.clone()
    predict, accept_lens, accept_index = verify(verify_input, info, logits)
    assert accept_lens.tolist() == [N] * 3
    assert accept_index.tolist() == [[row * N + step for step in range(N)] for row in range(3)]
    assert (predict.view(3, N)[:, :-1] == tokens[:, 1:]).all()
    assert {tensor.dtype for tensor in (predict, accept_lens, accept_index)} == {torch.int32}
    assert (logits == before).all(), "log probabilities are made of them afterwards"


def test_rows_with_a_processor_emit_one_token(table: torch.Tensor, sampler: Any) -> None:
    def only_seven(logits: torch.Tensor, _: Any) -> torch.Tensor:
        return torch.full_like(logits, float("-inf")).index_fill_(1, torch.tensor([7]), 0.0)

    for rows, is_explicit in (([{}, {}], True), ([GREEDY, GREEDY], False)):
        info = batch_info(rows, V)
        info.has_custom_logit_processor, info.custom_params = True, [None, None]
        entry = SimpleNamespace(processor=only_seven, rows=[1], indices=torch.tensor([1]))
        info.custom_logit_processor = {0: entry}
        tokens = torch.full((2, N), 7)
        logits = table[tokens.flatten()].clone()
        logits[:, 7] = 50.0  # all drafts would be accepted
        for coupled in (None, "row 1") if is_explicit else (None,):
            from sglang_ssd.coupling import CoupledRows

            rows_of_seed = coupled and CoupledRows(torch.tensor([1]), torch.tensor([3]), False)
            verify_input = chain(tokens, torch.zeros(2, dtype=torch.int64), sampler, coupled=rows_of_seed)
            predict, accept_lens, accept_index = verify(verify_input, info, logits.clone())
            assert accept_lens.tolist() == [N, 1]
            assert accept_index[1].tolist() == [N, -1, -1, -1]
            assert predict[N] == 7


def test_greedy_batches_are_sglangs_own_business(table: torch.Tensor, sampler: Any) -> None:
    info = batch_info([GREEDY], V)
    tokens = torch.zeros(1, N, dtype=torch.int64)
    verify_input = chain(tokens, torch.zeros(1, dtype=torch.int64), sampler)
    assert verify(verify_input, info, table[tokens.flatten()], lambda *_, **__: "asked") == "asked"


def test_deterministic_inference_keeps_sglangs_seeds(table: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ssd.sampling import seed_first_tokens

    sampler = sampler_on_cpu(monkeypatch, deterministic=True)
    info = batch_info([{}, {}], V)
    info.sampling_seed = torch.tensor([5, 5])
    tokens = torch.zeros(2, N, dtype=torch.int64)
    verify_input = chain(tokens, torch.tensor([3, 3]), sampler, q=None)
    predict, accept_lens, _ = verify(verify_input, info, table[tokens.flatten()])
    first = sampler(
        LogitsProcessorOutput(next_token_logits=table[[0, 0]].clone()), info, False, [], [], torch.tensor([3, 3])
    )
    assert predict.view(2, N)[:, 0].tolist() == first.tolist()
    assert accept_lens[0] == accept_lens[1]
    seed_first_tokens(info, [FakeRequest("a", [1], sampling_params=params(top_k=5, sampling_seed=1))] * 2, sampler)
    assert info.ssd_coupled is None


def test_other_ranks_take_what_rank_0_decides(table: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ssd import sampling

    info = batch_info([{}, FILTERED], V)
    tokens = torch.randint(0, V, (2, N), generator=torch.Generator().manual_seed(3))
    wire: list[torch.Tensor] = []

    def group(rank: int) -> SimpleNamespace:
        def broadcast(tensor: torch.Tensor, src: int) -> torch.Tensor:
            assert src == 0
            wire.append(tensor.clone()) if rank == 0 else tensor.copy_(wire.pop(0))
            return tensor

        return SimpleNamespace(world_size=2, rank_in_group=rank, device_group=None, broadcast=broadcast)

    results = []
    for rank in (0, 1):
        sampler = sampler_on_cpu(monkeypatch)
        monkeypatch.setattr(sampling, "get_parallel", lambda rank=rank: SimpleNamespace(tp_group=group(rank)))
        verify_input = chain(tokens, torch.zeros(2, dtype=torch.int64), sampler)
        if rank:
            verify_input.basis = sampling.Basis()
        results.append(verify(verify_input, info, table[tokens.flatten()]))
    assert all((ours == theirs).all() for ours, theirs in zip(*results, strict=True))
    assert not wire


def test_sglangs_own_sampler_draws_the_first_token_through_the_hook(
    table: torch.Tensor, sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed as in a server; only requests with a seed are touched."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative import eagle_utils

    from sglang_ssd import sampling

    for owner, name in ((type(sampler), "_sample_from_probs"), (eagle_utils, "eagle_sample")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # what is installed here is taken back
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    sampling.install()
    info = batch_info([{}, {}, FILTERED], V)
    requests = [
        FakeRequest("a", [1], sampling_params=params(top_k=1 << 30, sampling_seed=seed)) for seed in (42, None, 42)
    ]
    requests[2].sampling_params.top_k, requests[2].sampling_params.top_p = 20, 0.9
    alone = text_of(table, sampler, {}, 42, [], lambda _: [0, 0, 0])
    filtered = text_of(table, sampler, FILTERED, 42, [], lambda _: [0, 0, 0])
    seen = set()
    for _ in range(20):
        sampling.seed_first_tokens(info, requests, sampler)
        out = LogitsProcessorOutput(next_token_logits=table[[17, 17, 17]].clone())
        tokens = sampler(out, info, False, [], [], torch.tensor([1, 1, 1]))
        assert (tokens[0], tokens[2]) == (alone[2], filtered[2])
        seen.add(int(tokens[1]))
    assert len(seen) > 5
