"""Where generation stops: length, stop ids, stop strings and end of sequence at every place of an accepted run."""

from __future__ import annotations

import pytest

from tests.support.answers import Payload, greedy
from tests.support.pool import Oracle, SSDServer
from tests.support.sglang_server import LOOKAHEAD

OFFSETS = range(1, 2 * LOOKAHEAD + 4)
"""More than two whole rounds, so that a stop meets each place of a run."""

EOS = 1

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.parametrize("ssd", ["sync", "overlap"], indirect=True),
]


def test_max_new_tokens(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    payloads = [greedy(prompt, length) for prompt in prompts[:4] for length in OFFSETS]
    for payload, answer in zip(payloads, oracle.assert_same(ssd, payloads), strict=True):
        assert len(answer.ids) == payload["sampling_params"]["max_new_tokens"]
        assert answer.finish["type"] == "length"


def test_prefill_alone(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """No token, or one: such requests end before any round."""
    for answer in oracle.assert_same(ssd, [greedy(prompt, n) for prompt in prompts[:2] for n in (0, 1)]):
        assert answer.rounds == 0


def test_stop_ids(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """A stop id that first comes at each place of the output."""
    payloads = []
    for prompt in prompts[:4]:
        usual = oracle(greedy(prompt, 48)).ids
        payloads += [greedy(prompt, 48, stop_token_ids=[usual[offset]]) for offset in OFFSETS]
        payloads += [greedy(prompt, 48, stop_token_ids=list(usual[20:22]))]
    answers = oracle.assert_same(ssd, payloads)
    assert {answer.finish["type"] for answer in answers} == {"stop"}
    assert len({len(answer.ids) for answer in answers}) > len(OFFSETS) // 2


def test_stop_ids_that_do_not_come(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    usual = oracle(greedy(prompts[0], 30)).ids
    strangers = [token for token in range(300, 320) if token not in usual]
    oracle.assert_same(ssd, [greedy(prompts[0], 30, stop_token_ids=strangers)])


def test_stop_id_and_length_in_the_same_run(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """The earlier of the two wins, also when one run goes beyond both."""
    payloads = []
    for prompt in prompts[:2]:
        usual = oracle(greedy(prompt, 48)).ids
        for length in OFFSETS:
            near = range(max(0, length - 3), length + 3)
            payloads += [greedy(prompt, length, stop_token_ids=[usual[place]]) for place in near]
    answers = oracle.assert_same(ssd, payloads)
    assert {answer.finish["type"] for answer in answers} == {"stop", "length"}


def stop_strings(text: str) -> list[str]:
    """Pieces of ``text`` of several lengths, which begin and end inside tokens, too."""
    return [text[start : start + length] for start in range(2, 40, 3) for length in (1, 4, 9)]


def test_stop_strings(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    payloads = []
    for prompt in prompts[4:6]:
        payloads += [greedy(prompt, 32, stop=piece) for piece in stop_strings(oracle(greedy(prompt, 32)).text)]
    answers = oracle.assert_same(ssd, payloads)
    assert {answer.finish["type"] for answer in answers} == {"stop"}


def test_stop_variants(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """Several strings, kept stops, regular expressions, a string and the length in the same run."""
    usual = oracle(greedy(prompts[6], 40))
    piece = usual.text[30:33]
    payloads = [
        greedy(prompts[6], 40, stop=[piece, "never to be seen", usual.text[25:27]]),
        greedy(prompts[6], 40, stop=piece, no_stop_trim=True),
        greedy(prompts[6], 40, stop_token_ids=[usual.ids[9]], no_stop_trim=True),
        greedy(prompts[6], 40, stop_regex=r"[a-z]+ [a-z]+ [a-z]+"),
        greedy(prompts[6], 40, stop=piece, stop_token_ids=[usual.ids[8]]),
        *[greedy(prompts[6], length, stop=piece) for length in OFFSETS],
    ]
    oracle.assert_same(ssd, payloads)


def ending(prompt: str, bias: float, **sampling: object) -> Payload:
    """A request that ends by itself sooner the greater ``bias``."""
    return greedy(prompt, 40, logit_bias={str(EOS): bias}, **sampling)


def test_end_of_sequence(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    payloads = [ending(prompt, bias) for prompt in prompts[8:12] for bias in (6.0, 8.0, 9.0, 10.0, 11.0, 12.0)]
    answers = oracle.assert_same(ssd, payloads)
    ended = [answer for answer in answers if answer.finish.get("matched") == EOS]
    assert len({len(answer.ids) for answer in ended}) >= 4, [len(answer.ids) for answer in ended]


def test_end_of_sequence_ignored(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """The token comes, also within a run, and generation goes on."""
    payloads = [ending(prompt, bias, ignore_eos=True) for prompt in prompts[8:10] for bias in (9.0, 12.0)]
    answers = oracle.assert_same(ssd, payloads)
    assert {answer.finish["type"] for answer in answers} == {"length"}
    assert any(EOS in answer.ids for answer in answers)
