"""Requests that SGLang throws out of a full batch and takes up again later."""

from __future__ import annotations

import pytest

from tests.support.answers import greedy
from tests.support.pool import Oracle, SSDServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.parametrize("ssd", ["sync-retract", "overlap-retract"], indirect=True),
]


@pytest.mark.parametrize("concurrency", [6, 2])
def test_forced_retraction(ssd: SSDServer, oracle: Oracle, prompts: list[str], concurrency: int) -> None:
    """SGLang retracts requests at random; the text stays, and the speculator follows."""
    payloads = [greedy(prompt, 30 + 5 * (i % 7), ignore_eos=True) for i, prompt in enumerate(prompts[:12])]
    hits = ssd.service.outcomes("hit", "short_hit")
    answers = oracle.assert_same(ssd, payloads, concurrency)
    assert sum(answer.meta["num_retractions"] for answer in answers) >= 3
    assert ssd.service.outcomes("hit", "short_hit") > hits


def test_retraction_with_grammar_logprobs_and_stops(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    usual = oracle(greedy(prompts[3], 50))
    payloads = [
        greedy(prompts[0], 40, regex=r"([a-z]{3,9} ){20}"),
        {**greedy(prompts[1], 40, ignore_eos=True), "return_logprob": True},
        greedy(prompts[2], 40, ignore_eos=True),
        greedy(prompts[3], 50, stop_token_ids=[usual.ids[24]]),
        greedy(prompts[4], 37, ignore_eos=True),
    ]
    answers = oracle.assert_same(ssd, payloads)
    assert len(answers[1].meta["output_token_logprobs"]) == 40
    assert sum(answer.meta["num_retractions"] for answer in answers) >= 1


def test_retraction_of_penalised_requests(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """What was put out before the retraction still counts, for the first token after it, too.

    No request has both an additive and the multiplying penalty: without overlap scheduling, as the oracle runs, SGLang
    applies them in the order of a Python set, which is another one in every process.
    """
    sampling = [
        {"frequency_penalty": 0.6},
        {"presence_penalty": 0.7},
        {"repetition_penalty": 1.2},
        {"min_new_tokens": 9},
    ]
    payloads = [greedy(prompt, 60, ignore_eos=True, **sampling[i % 4]) for i, prompt in enumerate(prompts[:8])]
    answers = oracle.assert_same(ssd, payloads)
    assert sum(answer.meta["num_retractions"] for answer in answers) >= 1
