"""The OpenAI client and SGLang's frontend language against a server with SSD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sglang
from openai import OpenAI

from tests.support.pool import SSDServer
from tests.support.sglang_server import SGLangServer

MODEL = "default"

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("ssd", ["sync", "overlap"], indirect=True)]


Clients = tuple[Any, Any]
"""OpenAI clients of the server with SSD and of the one without. (Any: their answers are wide unions.)"""


@pytest.fixture
def clients(ssd: SSDServer, plain: SGLangServer) -> Iterator[Clients]:
    with (
        OpenAI(base_url=f"{ssd.url}/v1", api_key="none", max_retries=0) as with_ssd,
        OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0) as without,
    ):
        yield with_ssd, without


MESSAGES: list[Any] = [
    {"role": "system", "content": "You document Python code."},
    {"role": "user", "content": "Explain the arguments of the function ``read_records(path, encoding)``."},
]


def test_chat_of_two_turns(clients: Clients) -> None:
    with_ssd, without = clients
    for turns in (MESSAGES, [*MESSAGES, {"role": "assistant", "content": "It reads."}, MESSAGES[1]]):
        actual, expected = (
            client.chat.completions.create(model=MODEL, messages=turns, temperature=0, max_tokens=40)
            for client in (with_ssd, without)
        )
        assert actual.choices == expected.choices
        assert actual.usage.completion_tokens == expected.usage.completion_tokens == 40


def test_chat_streamed(clients: Clients) -> None:
    def streamed(client: Any) -> tuple[str, list[str]]:
        stream = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=40, stop=["class"], stream=True
        )
        choices = [chunk.choices[0] for chunk in stream if chunk.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        return text, [choice.finish_reason for choice in choices if choice.finish_reason]

    with_ssd, without = clients
    text, ends = streamed(with_ssd)
    assert (text, ends) == streamed(without)
    assert len(ends) == 1
    assert text


def test_chat_with_logprobs_and_json_schema(clients: Clients) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    actual, expected = (
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            max_tokens=30,
            response_format=form,
            logprobs=True,
            top_logprobs=2,
        )
        for client in clients
    )
    assert actual.choices[0].message == expected.choices[0].message
    assert actual.choices[0].finish_reason == expected.choices[0].finish_reason
    have, want = actual.choices[0].logprobs.content, expected.choices[0].logprobs.content
    assert [entry.token for entry in have] == [entry.token for entry in want]
    assert [entry.logprob for entry in have] == pytest.approx([entry.logprob for entry in want], abs=1e-4)


def test_completions(clients: Clients, prompts: list[str]) -> None:
    actual, expected = (
        client.completions.create(
            model=MODEL, prompt=prompts[:3], temperature=0, max_tokens=24, n=2, logprobs=2, stop=["return"]
        )
        for client in clients
    )
    assert [choice.text for choice in actual.choices] == [choice.text for choice in expected.choices]
    assert [choice.finish_reason for choice in actual.choices] == [choice.finish_reason for choice in expected.choices]
    assert actual.usage.completion_tokens == expected.usage.completion_tokens
    for have, want in zip(actual.choices, expected.choices, strict=True):
        assert have.logprobs.token_logprobs == pytest.approx(want.logprobs.token_logprobs, abs=1e-4)


def test_completions_streamed(clients: Clients, prompts: list[str]) -> None:
    def streamed(client: Any) -> tuple[str, Any]:
        stream = client.completions.create(
            model=MODEL,
            prompt=prompts[5],
            temperature=0,
            max_tokens=33,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks[-1].usage.completion_tokens

    with_ssd, without = clients
    assert streamed(with_ssd) == streamed(without)


@sglang.function
def review(s: Any, code: str) -> None:
    """A frontend program: choose, generate, generate on two branches, go on from both."""
    s += "Code under review:\n" + code
    s += "Kind: " + sglang.select("kind", choices=["a function", "a class", "a module"]) + "\n"
    s += "Summary: " + sglang.gen("summary", max_tokens=20, stop="\n") + "\n"
    branches = s.fork(2)
    branches += ["Arguments: ", "Errors: "]
    branches += sglang.gen("detail", max_tokens=16)
    s += "Details:" + branches[0]["detail"] + branches[1]["detail"] + "\n"
    s += "Version: " + sglang.gen("version", max_tokens=10, regex=r"[0-9]\.[0-9]{1,2}")


def test_frontend_language(ssd: SSDServer, plain: SGLangServer, prompts: list[str]) -> None:
    def run(server: SGLangServer) -> list[str]:
        backend = sglang.RuntimeEndpoint(server.url)
        arguments = [{"code": prompt} for prompt in prompts[:3]]
        return [state.text() for state in review.run_batch(arguments, backend=backend, temperature=0, num_threads=3)]

    actual = run(ssd)
    assert actual == run(plain)
    assert all("Version: " in text for text in actual)
