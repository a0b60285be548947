"""Greedy text is the same, token for token, whatever shares a batch, a prefix or a cache."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.support.answers import Answer, greedy
from tests.support.pool import Oracle, SSDServer
from tests.support.sglang_server import CHUNK, LOOKAHEAD, TARGET, SGLangServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.parametrize("ssd", ["sync", "overlap"], indirect=True),
]

STREAM_INTERVAL = 1
"""Rounds per chunk: SGLang's default."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TARGET)


def test_concurrent_requests_with_shared_prefixes_and_mixed_lengths(
    ssd: SSDServer, oracle: Oracle, prompts: list[str]
) -> None:
    """Twelve at once; prompts share beginnings of several lengths, outputs end at different times."""
    shared = prompts[0]
    texts = [shared[:150] + prompts[i] if i % 2 else shared[: 60 * i] + prompts[i][:90] for i in range(12)]
    payloads = [greedy(text, 5 + 5 * i) for i, text in enumerate(texts)]
    answers = oracle.assert_same(ssd, payloads)
    rounds, tokens = sum(a.rounds for a in answers), sum(len(a.ids) - 1 for a in answers)
    assert 0 < rounds < tokens, "nothing was accepted: speculation is not at work"


def test_prompt_longer_than_a_chunk(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """A prompt of many chunks, prefilled while shorter requests run."""
    long = "".join(prompts[:6])
    answers = oracle.assert_same(ssd, [greedy(prompts[7], 48), greedy(long, 40), greedy(prompts[8], 48)])
    assert answers[1].meta["prompt_tokens"] > 6 * CHUNK


def test_many_requests_one_after_the_other(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """More requests than run at once: slots are used again and again."""
    oracle.assert_same(ssd, [greedy(prompt, 1 + 7 * i % 23) for i, prompt in enumerate(prompts)], concurrency=5)


def second_turns(server: SGLangServer, first: list[int], more: list[int]) -> list[Answer]:
    """Chats of two turns from an empty cache; the first turn ends at different places of an accepted run."""
    answers = []
    for length in (7, 8, 9, 10, 24):
        server.flush()
        turn = server.generate(greedy(first, length))
        answers += [turn, server.generate(greedy([*first, *turn.ids, *more], 12))]
    usual = turn.ids
    for stop in usual[5:8]:
        server.flush()
        turn = server.generate(greedy(first, 40, stop_token_ids=[stop]))
        answers += [turn, server.generate(greedy([*first, *turn.ids, *more], 12))]
    return answers


def test_second_turn_hits_the_radix_cache(
    ssd: SSDServer, plain: SGLangServer, prompts: list[str], tokenizer: PreTrainedTokenizerBase
) -> None:
    """As many cached tokens as without speculation: the cache holds the first turn and no token more.

    One token more or less is SGLang's: whether the KV of the very last token has been written when a request
    ends depends on the forward that produced it (plain decoding: one of its own; speculation: draft or bonus).
    """
    first = tokenizer(prompts[0])["input_ids"]
    more = tokenizer("\n\nuser: and now?\n", add_special_tokens=False)["input_ids"]
    expected, actual = second_turns(plain, first, more), second_turns(ssd, first, more)
    assert [a.essence for a in actual] == [a.essence for a in expected]
    cached = [
        (have.meta["cached_tokens"], want.meta["cached_tokens"]) for have, want in zip(actual, expected, strict=True)
    ]
    assert all(have == want for have, want in cached[::2]), cached
    assert all(abs(have - want) <= 1 and have > len(first) for have, want in cached[1::2]), cached


def test_warm_cache_changes_neither_text_nor_acceptance(ssd: SSDServer, prompts: list[str]) -> None:
    ssd.flush()
    payloads = [greedy(prompt, 40) for prompt in prompts[10:14]]
    cold, warm = ssd.generate_all(payloads), ssd.generate_all(payloads)
    assert all(w.meta["cached_tokens"] > c.meta["cached_tokens"] for c, w in zip(cold, warm, strict=True))
    assert [a.essence for a in warm] == [a.essence for a in cold]
    assert [a.rounds for a in warm] == [a.rounds for a in cold]


def test_flush_cache(ssd: SSDServer, plain: SGLangServer, prompts: list[str]) -> None:
    def cached(server: SGLangServer) -> list[int]:
        server.flush()
        before = server.generate(greedy(prompts[2], 24))
        again = server.generate(greedy(prompts[2], 24))
        server.flush()
        after = server.generate(greedy(prompts[2], 24))
        assert before.essence == again.essence == after.essence
        return [answer.meta["cached_tokens"] for answer in (before, again, after)]

    assert cached(ssd) == cached(plain)


def test_token_ids_as_prompt(
    ssd: SSDServer, oracle: Oracle, prompts: list[str], tokenizer: PreTrainedTokenizerBase
) -> None:
    """A prompt given as ids is the prompt given as text."""
    for prompt in prompts[14:17]:
        from_ids = ssd.generate(greedy(tokenizer(prompt)["input_ids"], 30))
        assert from_ids.essence == oracle(greedy(prompt, 30)).essence


def test_several_completions_of_a_prompt(ssd: SSDServer, plain: SGLangServer, prompts: list[str]) -> None:
    payload = greedy(prompts[3], 30, n=3)
    expected, actual = plain.generate_several(payload), ssd.generate_several(payload)
    assert [a.essence for a in actual] == [a.essence for a in expected]
    assert len(actual) == 3


def test_batch_in_one_request(ssd: SSDServer, plain: SGLangServer, prompts: list[str]) -> None:
    payload: dict[str, Any] = {"text": prompts[20:25], "sampling_params": greedy("", 25)["sampling_params"]}
    expected, actual = plain.generate_several(payload), ssd.generate_several(payload)
    assert [a.essence for a in actual] == [a.essence for a in expected]


def test_logit_bias(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """Bias on tokens that the draft proposes: forbidden ones never come, favoured ones do, others are not touched."""
    usual = oracle(greedy(prompts[5], 30))
    forbidden = {str(token): -100.0 for token in set(usual.ids[2:12])}
    answers = oracle.assert_same(
        ssd,
        [
            greedy(prompts[5], 30, logit_bias=forbidden),
            greedy(prompts[5], 30),
            greedy(prompts[6], 30, logit_bias={str(usual.ids[4]): 4.0}),
        ],
    )
    assert not set(answers[0].ids) & set(map(int, forbidden))


def test_streaming(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """Chunks grow by one accepted run at most, never change what was sent, and end as the whole answer does."""
    for payload in (greedy(prompts[1], 45), greedy(prompts[4], 45, stop=["return", "class"])):
        whole = oracle(payload)
        chunks = list(ssd.stream(payload))
        assert Answer.of(chunks[-1]).essence == whole.essence
        for chunk in chunks:
            ids = chunk["output_ids"]
            assert ids == list(whole.ids[: len(ids)])
            assert len(ids) == chunk["meta_info"]["completion_tokens"]
            assert whole.text.startswith(chunk["text"])
        lengths = [0] + [len(chunk["output_ids"]) for chunk in chunks]
        steps = [after - before for before, after in pairwise(lengths)]
        assert min(steps) >= 0
        assert max(steps) <= STREAM_INTERVAL * (LOOKAHEAD + 1)
        assert {str(chunk["meta_info"]["finish_reason"]) for chunk in chunks[:-1]} == {"None"}


def test_counters_of_a_request(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """``meta_info`` agrees with itself: rounds, accepted drafts, and tokens."""
    for answer in oracle.assert_same(ssd, [greedy(prompt, 48, ignore_eos=True) for prompt in prompts[:6]]):
        meta = answer.meta
        assert meta["spec_num_proposed_drafts"] == LOOKAHEAD * answer.rounds
        # The prompt's forward gives one token, each round its accepted drafts and a bonus; the end may be cut off.
        produced = 1 + answer.rounds + meta["spec_num_correct_drafts"]
        assert len(answer.ids) <= produced <= len(answer.ids) + LOOKAHEAD
        assert meta["spec_accept_length"] == pytest.approx(1 + meta["spec_num_correct_drafts"] / answer.rounds, abs=0.5)
        assert 1 <= meta["spec_accept_length"] <= LOOKAHEAD + 1


@pytest.mark.parametrize("way", ["abort_request", "disconnect"])
def test_abort_of_one_of_several(ssd: SSDServer, oracle: Oracle, prompts: list[str], way: str) -> None:
    """The others are not affected, and the server lets go of the aborted one at once."""
    others = [greedy(prompt, 64) for prompt in prompts[25:28]]
    expected = oracle.all(others)
    actual: list[Answer] = []
    running = threading.Thread(target=lambda: actual.extend(ssd.generate_all(others)))
    victim = {**greedy(prompts[28], 900, ignore_eos=True), "rid": f"victim-{way}-{time.monotonic_ns()}"}
    stream = ssd.stream(victim)
    chunks = [next(stream)]
    running.start()
    chunks += [next(stream) for _ in range(3)]
    if way == "abort_request":
        ssd.post("/abort_request", {"rid": victim["rid"]})
        chunks += stream
        assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    stream.close()
    running.join(120)
    assert [a.essence for a in actual] == [a.essence for a in expected]
    assert ssd.generate(greedy(prompts[28], 20)).essence == oracle(greedy(prompts[28], 20)).essence
