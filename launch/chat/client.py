"""One answer of a chat, streamed from a server's OpenAI API."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any

from benchmark.client import HOST
from children import ChildFailed

Message = dict[str, str]
"""``role`` and ``content``, as in the API."""

_WITHIN_S = 300.0
"""Longest silence of a server."""
_REASON_LENGTH = 300
_SERVERS_FAULT = 500
"""The lowest status of an error that is not the request's."""
_DATA = b"data: "
_END = b"data: [DONE]"


class Refused(Exception):
    """The server does not answer this request, but others; the message is the first sentence of its reason."""


@dataclass(slots=True)
class Answer:
    """A streamed answer."""

    pieces: list[str] = field(default_factory=list)
    num_tokens: int = 0
    """Counted by the server; the stop token is one."""
    num_rounds: int = 0
    """Verifications, counted by the server; 0 without speculation."""
    is_cut: bool = False
    """Whether it has as many tokens as were allowed."""
    first_token_s: float = 0.0
    """From the request to the first token."""
    decode_s: float = 0.0
    """From the first token to the last one."""

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.pieces)

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first one, which is the prefill's; None if there are none."""
        return (self.num_tokens - 1) / self.decode_s if self.num_tokens > 1 and self.decode_s > 0 else None

    @property
    def tokens_per_round(self) -> float | None:
        """Accepted tokens and the bonus token of a round; None if there was no round."""
        return (self.num_tokens - 1) / self.num_rounds if self.num_rounds else None


def ask(
    port: int, messages: Sequence[Message], temperature: float, max_new_tokens: int, show: Callable[[str], None]
) -> Answer:
    """The answer to a conversation. An exception, whichever it is, closes the connection: the server stops then.

    Args:
        port: of the server, on this machine.
        messages: the conversation, which ends with the question.
        temperature: 0 for greedy decoding.
        max_new_tokens: where the answer is cut.
        show: gets each piece of the text as it comes.

    Raises:
        Refused: the server does not answer this, a conversation that is too long for example.
        ChildFailed: it failed, or ended within the answer.
        OSError: nobody answers at the port.
    """
    body = {
        "model": "default",
        "messages": messages,
        "temperature": temperature,
        "max_tokens": max_new_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_spec_tokens_details": True,  # SGLang's: the rounds of this request
    }
    url, kind = f"http://{HOST}:{port}/v1/chat/completions", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), kind)
    sent_at = time.perf_counter()
    with _open(request) as stream:
        return _read(stream, sent_at, show)


def _open(request: urllib.request.Request) -> HTTPResponse:
    try:
        stream: HTTPResponse = urllib.request.urlopen(request, timeout=_WITHIN_S)
    except urllib.error.HTTPError as error:
        with error:
            raise _failure(error.code, error.read().decode(errors="replace")) from error
    return stream


def _read(lines: Iterable[bytes], sent_at: float, show: Callable[[str], None]) -> Answer:
    answer, has_begun = Answer(), False
    for line in lines:
        if line.startswith(_END):
            return answer
        if not line.startswith(_DATA):
            continue
        event = json.loads(line[len(_DATA) :])
        if "error" in event:
            code = event["error"].get("code")
            raise _failure(code if isinstance(code, int) else _SERVERS_FAULT, json.dumps(event["error"]))
        for choice in event["choices"]:
            now = time.perf_counter()
            if not has_begun:
                has_begun, answer.first_token_s = True, now - sent_at
            answer.decode_s = now - sent_at - answer.first_token_s
            answer.is_cut = choice.get("finish_reason") == "length"
            if piece := choice["delta"].get("content"):
                answer.pieces.append(piece)
                show(piece)
        _count(event, answer)
    raise ChildFailed("the server ended within an answer")


def _count(event: dict[str, Any], answer: Answer) -> None:
    """Take the server's counts, which come after the text."""
    if usage := event.get("usage"):
        answer.num_tokens = int(usage["completion_tokens"])
    if details := (event.get("sglext") or {}).get("spec_tokens_details"):
        answer.num_rounds = int(details["spec_verify_ct"])


def _failure(status: int, body: str) -> Refused | ChildFailed:
    """What a server's error means here; ``body`` is SGLang's JSON, or any text."""
    try:
        reason = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        reason = body
    words = " ".join(reason.split())[:_REASON_LENGTH]
    if status >= _SERVERS_FAULT:
        return ChildFailed(f"the server failed to answer: {words or status}")
    return Refused(words.partition(". ")[0].rstrip(".") or f"status {status}")
