"""Two ranks on the CPU over gloo: only the first talks to the speculator, both verify the same."""

from __future__ import annotations

import pytest

from tests.support.answers import Answer, Payload, greedy
from tests.support.pool import DEADLINE_MS, ServerPool
from tests.support.processes import ended_at_exit, free_port
from tests.support.service import ServiceView
from tests.support.sglang_server import SGLangServer, ssd_flags

TWO_RANKS = ["--tp-size", "2"]

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def payloads(prompts: list[str]) -> list[Payload]:
    """Plain ones, chunked ones, stops, grammars."""
    requests = [greedy(prompt, 12 + 4 * i) for i, prompt in enumerate(prompts[:8])]
    requests += [greedy("".join(prompts[8:12]), 30), greedy(prompts[12], 40, stop=["\n\n", "class"])]
    requests += [greedy(prompts[13], 40, regex=r"[a-z]{3,8}\([a-z]{1,8}\)")]
    return requests


@pytest.fixture(scope="module")
def expected(pool: ServerPool, payloads: list[Payload]) -> list[Answer]:
    """Answers of two ranks without speculation."""
    pool.end_ssd()
    server = SGLangServer("plain-tp2", TWO_RANKS, pool.logs)
    with ended_at_exit(server.process):
        return server.generate_all(payloads)


@pytest.mark.timeout(600)
def test_two_ranks(pool: ServerPool, payloads: list[Payload], expected: list[Answer]) -> None:
    http_port = free_port()
    options = {"deadline_ms": DEADLINE_MS, "service": {"http_port": http_port}}
    server = SGLangServer("ssd-tp2", [*ssd_flags(options), *TWO_RANKS], pool.logs)
    with ended_at_exit(server.process):
        service = ServiceView(http_port)
        service.note_capacity()
        for concurrency in (12, 1):
            answers = server.generate_all(payloads, concurrency)
            assert [answer.essence for answer in answers] == [answer.essence for answer in expected]
        assert sum(len(a.ids) - 1 for a in answers) > 1.5 * sum(a.rounds for a in answers)
        assert service.metric("verifiers") == 1
        service.assert_empty()
    assert server.process.is_gone()
