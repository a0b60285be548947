"""Requests to a server's ``/generate``: answers as a whole for throughput, streamed ones for latency.

SGLang's own benchmark client is not used: its import alone takes longer than a short run, and a gigabyte beside the
servers.  Latencies between tokens are defined as there: the time between two chunks, in equal shares for the tokens
that the later one brings.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPResponse
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from children import ChildFailed

HOST = "127.0.0.1"
_WITHIN_S = 600.0
_FLUSH_WITHIN_S = 30
_REASON_LENGTH = 300
_EVENT = b"data: {"

T = TypeVar("T")


class Completion(NamedTuple):
    """An answer, counted by the server."""

    ids: tuple[int, ...]
    num_tokens: int
    num_rounds: int
    """Verifications; without speculation steps."""
    accepted: tuple[int, ...]
    """Rounds by number of accepted drafts."""
    seconds: float
    """From the request's arrival to its end."""


class Stream(NamedTuple):
    """An answer as its reader saw it."""

    first_token_s: float
    """From the request to the first token."""
    token_gaps_s: tuple[float, ...]
    """Between tokens: of a chunk that brings several each has an equal share."""


def complete_all(
    port: int, prompts: Sequence[str], batch_size: int, length: int, temperature: float
) -> tuple[list[Completion], float]:
    """Completions of exactly ``length`` tokens, ``batch_size`` at once, and the seconds that all took."""
    return _at_once(prompts, batch_size, lambda prompt: _complete(port, prompt, length, temperature))


def stream_all(port: int, prompts: Sequence[str], batch_size: int, length: int, temperature: float) -> list[Stream]:
    """The same, streamed."""
    return _at_once(prompts, batch_size, lambda prompt: _stream(port, prompt, length, temperature))[0]


def flush(port: int) -> None:
    """Empty the radix cache, so that every run prefills its prompts."""
    _post(port, f"/flush_cache?timeout={_FLUSH_WITHIN_S}", {}).close()  # it waits for the end of the last step


def completion_of(answer: dict[str, Any]) -> Completion:
    """What a server's JSON answer says. A step of plain decoding yields one token, the first is the prefill's."""
    about = answer["meta_info"]
    num_tokens = int(about["completion_tokens"])
    return Completion(
        tuple(answer["output_ids"]),
        num_tokens,
        int(about.get("spec_verify_ct", num_tokens - 1)),
        tuple(about.get("spec_correct_drafts_histogram", ())),
        float(about["e2e_latency"]),
    )


def stream_of(sent_at: float, chunks: Sequence[tuple[float, int]]) -> Stream:
    """A stream whose chunks came at (time, with so many tokens in all so far).

    >>> stream_of(1.0, [(1.5, 1), (1.75, 1), (2.5, 3)])
    Stream(first_token_s=0.5, token_gaps_s=(0.5, 0.5))
    """
    told = [chunk for number, chunk in enumerate(chunks) if chunk[1] > (chunks[number - 1][1] if number else 0)]
    gaps: list[float] = []
    for (before, fewer), (now, more) in pairwise(told):
        gaps += [(now - before) / (more - fewer)] * (more - fewer)
    return Stream(told[0][0] - sent_at, tuple(gaps))


def _at_once(prompts: Sequence[str], batch_size: int, ask: Callable[[str], T]) -> tuple[list[T], float]:
    pool = ThreadPoolExecutor(batch_size)
    try:
        began = time.perf_counter()
        answers = list(pool.map(ask, prompts))
        return answers, time.perf_counter() - began
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupt does not wait for answers


def _complete(port: int, prompt: str, length: int, temperature: float) -> Completion:
    with _post(port, "/generate", _request(prompt, length, temperature)) as answer:
        return completion_of(json.load(answer))


def _stream(port: int, prompt: str, length: int, temperature: float) -> Stream:
    request = {**_request(prompt, length, temperature), "stream": True}
    sent_at = time.perf_counter()
    with _post(port, "/generate", request) as answer:
        lines = [(time.perf_counter(), line) for line in answer if line.startswith(_EVENT)]
    return stream_of(sent_at, [(at, _tokens_in(line)) for at, line in lines])


def _tokens_in(line: bytes) -> int:
    return int(json.loads(line[len(_EVENT) - 1 :])["meta_info"]["completion_tokens"])


def _request(prompt: str, length: int, temperature: float) -> dict[str, Any]:
    sampling = {"temperature": temperature, "max_new_tokens": length, "ignore_eos": True}
    return {"text": prompt, "sampling_params": sampling}


def _post(port: int, path: str, payload: dict[str, Any]) -> HTTPResponse:
    body = json.dumps(payload).encode()
    request = urllib.request.Request(f"http://{HOST}:{port}{path}", body, {"Content-Type": "application/json"})
    try:
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=_WITHIN_S)
    except urllib.error.HTTPError as error:
        with error:
            reason = " ".join(error.read().decode(errors="replace").split())[:_REASON_LENGTH]
        raise ChildFailed(f"the server refused a request to {path}: {reason or error}") from error
    except (OSError, HTTPException) as error:
        raise ChildFailed(f"the server did not answer {path}: {error}") from error
    return answer
