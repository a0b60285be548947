"""Log-probabilities are those of decoding without speculation, one for each token that is returned."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.answers import Answer, Payload, greedy
from tests.support.pool import SSDServer
from tests.support.sglang_server import SGLangServer

TOLERANCE = 1e-4

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.parametrize("ssd", ["sync", "overlap"], indirect=True),
]


def assert_close(actual: Any, expected: Any, place: str = "") -> None:
    """Compare nested lists of [logprob, token, text] up to the tolerance."""
    assert type(actual) is type(expected), f"{place}: {actual} instead of {expected}"
    if isinstance(expected, list):
        assert len(actual) == len(expected), f"{place}: {len(actual)} entries instead of {len(expected)}"
        for index, (have, want) in enumerate(zip(actual, expected, strict=True)):
            assert_close(have, want, f"{place}[{index}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=TOLERANCE), place
    else:
        assert actual == expected, place


FIELDS = (
    "input_token_logprobs",
    "output_token_logprobs",
    "input_top_logprobs",
    "output_top_logprobs",
    "input_token_ids_logprobs",
    "output_token_ids_logprobs",
)


def compare(actual: Answer, expected: Answer) -> None:
    """Same tokens and same log-probabilities, as many as tokens."""
    assert actual.essence == expected.essence
    for field in FIELDS:
        assert_close(actual.meta.get(field), expected.meta.get(field), field)
    assert [entry[1] for entry in actual.meta["output_token_logprobs"]] == list(actual.ids)


def both(plain: SGLangServer, ssd: SSDServer, payloads: list[Payload]) -> list[Answer]:
    """Ask both servers from an empty cache: which input positions are computed depends on it."""
    plain.flush()
    ssd.flush()
    expected, actual = plain.generate_all(payloads), ssd.generate_all(payloads)
    for have, want in zip(actual, expected, strict=True):
        compare(have, want)
    return actual


def with_logprobs(payload: Payload, **options: Any) -> Payload:
    return {**payload, "return_logprob": True, **options}


def test_output_logprobs(ssd: SSDServer, plain: SGLangServer, prompts: list[str]) -> None:
    """For lengths that end inside a run, alone and beside requests that want none or others."""
    payloads = [with_logprobs(greedy(prompts[i], 5 + 3 * i)) for i in range(6)]
    answers = both(plain, ssd, payloads)
    values = [entry[0] for answer in answers for entry in answer.meta["output_token_logprobs"]]
    assert max(values) <= 0
    assert sum(value < -1e-3 for value in values) > len(values) // 2, "log-probabilities of 0 for every token"


def test_top_logprobs_and_chosen_ids(ssd: SSDServer, plain: SGLangServer, prompts: list[str]) -> None:
    payloads = [
        with_logprobs(greedy(prompts[6], 30), top_logprobs_num=3),
        with_logprobs(greedy(prompts[7], 21), top_logprobs_num=5, return_text_in_logprobs=True),
        with_logprobs(greedy(prompts[8], 26), token_ids_logprob=[5, 17, 400]),
        with_logprobs(greedy(prompts[9], 17)),
    ]
    answers = both(plain, ssd, payloads)
    assert all(len(top) == 3 for top in answers[0].meta["output_top_logprobs"])


def test_input_logprobs(ssd: SSDServer, plain: SGLangServer, prompts: list[str]) -> None:
    payloads = [
        with_logprobs(greedy(prompts[10], 20), logprob_start_len=0, top_logprobs_num=2),
        with_logprobs(greedy("".join(prompts[10:13]), 12), logprob_start_len=40),
        with_logprobs(greedy(prompts[14], 1), logprob_start_len=0),
    ]
    both(plain, ssd, payloads)


def test_scoring_a_text(ssd: SSDServer, plain: SGLangServer, prompts: list[str]) -> None:
    """No new tokens. (SGLang itself adds a log-probability of the next token under every speculative algorithm.)"""
    payload = with_logprobs(greedy(prompts[13], 0), logprob_start_len=0)
    plain.flush()
    ssd.flush()
    expected, actual = plain.generate(payload), ssd.generate(payload)
    assert actual.essence == expected.essence
    assert_close(actual.meta["input_token_logprobs"], expected.meta["input_token_logprobs"])


def test_stop_inside_a_run(ssd: SSDServer, plain: SGLangServer, prompts: list[str]) -> None:
    """No log-probability of a token after the stop is returned."""
    usual = plain.generate(greedy(prompts[11], 30))
    payloads = [
        with_logprobs(greedy(prompts[11], 30, stop_token_ids=[token]), top_logprobs_num=2) for token in usual.ids[3:12]
    ]
    payloads += [with_logprobs(greedy(prompts[11], 30, stop=usual.text[at : at + 3])) for at in range(10, 30, 4)]
    both(plain, ssd, payloads)


def test_mixed_with_requests_that_want_none(ssd: SSDServer, plain: SGLangServer, prompts: list[str]) -> None:
    payloads = [greedy(prompts[i], 30) for i in range(15, 18)]
    wanting = with_logprobs(greedy(prompts[18], 30), top_logprobs_num=2)
    expected, actual = plain.generate_all([*payloads, wanting]), ssd.generate_all([*payloads, wanting])
    assert [a.essence for a in actual] == [a.essence for a in expected]
    assert_close(actual[-1].meta["output_top_logprobs"], expected[-1].meta["output_top_logprobs"])
    assert "output_token_logprobs" not in actual[0].meta


def test_streamed(ssd: SSDServer, plain: SGLangServer, prompts: list[str]) -> None:
    """The chunks carry each log-probability, as many as tokens at any time."""
    payload = with_logprobs(greedy(prompts[19], 25), top_logprobs_num=2)
    expected, chunks = plain.generate(payload), list(ssd.stream(payload))
    last = Answer.of(chunks[-1])
    assert last.essence == expected.essence
    assert_close(last.meta["output_token_logprobs"], expected.meta["output_token_logprobs"])
    assert_close(last.meta["output_top_logprobs"], expected.meta["output_top_logprobs"])
    for chunk in chunks:
        assert len(chunk["meta_info"]["output_token_logprobs"]) == len(chunk["output_ids"])
