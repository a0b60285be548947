"""Requests that run into the end of the context, with the widest speculation."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.answers import Payload, greedy
from tests.support.pool import Oracle, ServerPool
from tests.support.processes import ended_at_exit
from tests.support.sglang_server import DRAFT, SGLangServer

LOOKAHEAD = 16
CONTEXT = 1024

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(pool: ServerPool) -> Iterator[SGLangServer]:
    pool.end_ssd()
    options = json.dumps({"deadline_ms": 5000, "overlap_on_cpu": True, "service": {"fan_out": 1}})
    flags = ["--speculative-algorithm", "SSD", "--speculative-draft-model-path", str(DRAFT)]
    flags += ["--speculative-num-steps", str(LOOKAHEAD), "--speculative-ssd-config", options]
    wide = SGLangServer("ssd-wide", flags, pool.logs)
    with ended_at_exit(wide.process):
        yield wide


def long_request(length: int, max_new_tokens: int) -> Payload:
    tokens = [3 + (7 * i + i * i // 50) % 2000 for i in range(length)]
    return greedy(tokens, max_new_tokens, ignore_eos=True)


def test_up_to_the_last_token(server: SGLangServer, oracle: Oracle) -> None:
    """Prompts that leave room for less than a round, exactly one, several, and the longest possible output."""
    lengths = [1017, 1010, 1000, 990, 960, 900]
    payloads = [long_request(length, CONTEXT - 6 - length) for length in lengths]
    answers = oracle.assert_same(server, payloads, concurrency=3)
    assert [len(answer.ids) for answer in answers] == [CONTEXT - 6 - length for length in lengths]


def test_served_afterwards(server: SGLangServer, oracle: Oracle, prompts: list[str]) -> None:
    answers = oracle.assert_same(server, [greedy(prompt, 48) for prompt in prompts[:6]])
    assert sum(len(a.ids) - 1 for a in answers) > 1.5 * sum(a.rounds for a in answers)
