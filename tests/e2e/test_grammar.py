"""Constrained output: the same tokens as without speculation, although the draft knows of no grammar."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.answers import Payload, greedy
from tests.support.pool import Oracle, SSDServer
from tests.support.sglang_server import LOOKAHEAD

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
NESTED = json.dumps(
    {
        "type": "object",
        "properties": {"at": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
        "required": ["at"],
        "additionalProperties": False,
    }
)
DATE = r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]"
CALL = r"(read|write|close)\([a-z]{1,8}(, [a-z]{1,8}){0,2}\)"
EBNF = 'root ::= "def " name "(self):"\nname ::= [a-z] | [a-z] name'

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.parametrize("ssd", ["sync", "overlap"], indirect=True),
]


def constrained(prompts: list[str]) -> list[Payload]:
    """Requests with grammars of all kinds, which end by the grammar or by the length."""
    requests = [greedy(prompt, 90, json_schema=PERSON) for prompt in prompts[:3]]
    requests += [greedy(prompt, 60, json_schema=NESTED) for prompt in prompts[3:5]]
    requests += [greedy(prompt, 40, regex=DATE) for prompt in prompts[5:7]]
    requests += [greedy(prompt, 40, regex=CALL) for prompt in prompts[7:9]]
    requests += [greedy(prompts[9], 30, ebnf=EBNF)]
    return requests


def test_grammars_alone(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    answers = oracle.assert_same(ssd, constrained(prompts), concurrency=1)
    documents = [json.loads(answer.text) for answer in answers[:5] if answer.finish["type"] == "stop"]
    assert len(documents) >= 3
    assert all(re.fullmatch(DATE, answer.text) for answer in answers[5:7])
    assert all(re.fullmatch(CALL, answer.text) for answer in answers[7:9])


def test_grammars_beside_free_requests(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """Half of the batch constrained; free requests keep their speculation."""
    free = [greedy(prompt, 50) for prompt in prompts[10:16]]
    mixed = [payload for pair in zip(constrained(prompts), free, strict=False) for payload in pair]
    answers = oracle.assert_same(ssd, mixed)
    alone = ssd.generate_all(free, concurrency=1)
    assert [a.rounds for a in answers[1::2]] == [a.rounds for a in alone]


def test_grammar_cut_by_length(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """Length limits at each place around the end of the grammar."""
    whole = oracle(greedy(prompts[5], 40, regex=DATE))
    lengths = range(1, len(whole.ids) + LOOKAHEAD + 1)
    oracle.assert_same(ssd, [greedy(prompts[5], length, regex=DATE) for length in lengths])


def test_grammar_and_stop_in_the_same_run(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """A stop id or string inside the text that the grammar allows, its last token included."""
    payloads = []
    for grammar in ({"regex": CALL}, {"json_schema": NESTED}):
        whole = oracle(greedy(prompts[7], 40, **grammar))
        payloads += [greedy(prompts[7], 40, stop_token_ids=[token], **grammar) for token in dict.fromkeys(whole.ids)]
        payloads += [greedy(prompts[7], 40, stop=whole.text[at : at + 2], **grammar) for at in range(len(whole.text))]
    oracle.assert_same(ssd, payloads)


def test_grammar_with_logprobs_and_several_completions(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    payload = greedy(prompts[6], 40, regex=DATE)
    expected = oracle(payload)
    answers = ssd.generate_several({**greedy(prompts[6], 40, regex=DATE, n=2), "return_logprob": True})
    assert [answer.essence for answer in answers] == [expected.essence] * 2
    assert [len(answer.meta["output_token_logprobs"]) for answer in answers] == [len(expected.ids)] * 2


def test_abort_of_a_constrained_request(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    stream = ssd.stream(greedy(prompts[3], 400, regex=r"([a-z]{3,9} ){200}"))
    chunks = [next(stream) for _ in range(3)]
    assert re.fullmatch(r"[a-z ]+", chunks[-1]["text"])
    stream.close()
    oracle.assert_same(ssd, [greedy(prompts[3], 60, json_schema=NESTED), greedy(prompts[4], 30)])
