"""A speculator that is absent, killed, stuck or shared: generation goes on, exact, and speculation comes back."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ssd_proto.trace import read_trace
from tests.support.answers import Payload, greedy
from tests.support.pool import Oracle, ServerPool
from tests.support.processes import ended_at_exit, free_port, wait_until
from tests.support.service import Service
from tests.support.sglang_server import SGLangServer, ssd_flags, total

DEADLINE_S = 2.0
SLACK_S = 1.5
"""For a loaded machine."""
TRACED_WITHIN_S = 10.0

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def endpoint() -> str:
    """Where the service of these tests listens, if it runs."""
    return f"tcp://127.0.0.1:{free_port()}"


def trace_of(pool: ServerPool, channel: str) -> Path:
    """Where that server writes the trace of its rounds."""
    return pool.logs / f"rounds-external-{channel}.json"


def decoded(pool: ServerPool) -> Counter[str]:
    """Rows of all forwards that the trace of ``server`` shows so far, by span."""
    spans = [event for event in read_trace(trace_of(pool, "shm")) if event["name"] in ("decode", "verify")]
    return Counter({name: sum(s["args"]["batch"] for s in spans if s["name"] == name) for name in ("decode", "verify")})


def start(pool: ServerPool, endpoint: str, channel: str) -> SGLangServer:
    """A server that uses the service at ``endpoint``."""
    options = {"deadline_ms": 1000 * DEADLINE_S, "connect_timeout_s": 1, "channels": [channel]}
    options["trace"] = str(trace_of(pool, channel))
    flags = [*ssd_flags(options, draft=None), "--speculative-ssd-endpoint", endpoint]
    return SGLangServer("ssd-external", flags, pool.logs)


@pytest.fixture(scope="module")
def server(pool: ServerPool, endpoint: str) -> Iterator[SGLangServer]:
    """Started while nobody listens at the endpoint."""
    pool.end_ssd()
    external = start(pool, endpoint, "shm")
    with ended_at_exit(external.process):
        yield external


@pytest.fixture
def service(pool: ServerPool, endpoint: str) -> Iterator[Service]:
    """A service at the endpoint, for one test."""
    running = Service(endpoint, pool.logs, ["--no-rest"])
    with ended_at_exit(running.process):
        yield running


def hits(server: SGLangServer) -> float:
    metrics = server.metrics()
    return sum(total(metrics, "sglang_ssd:proposals_total", f'kind="{kind}"') for kind in ("hit", "short_hit"))


def assert_speculates(server: SGLangServer, oracle: Oracle, prompts: list[str]) -> None:
    before = hits(server)
    answers = oracle.assert_same(server, [greedy(prompt, 40) for prompt in prompts[:4]])
    assert sum(len(a.ids) for a in answers) > 1.5 * sum(a.rounds for a in answers)
    assert hits(server) > before


def test_no_service_at_start(pool: ServerPool, server: SGLangServer, oracle: Oracle, prompts: list[str]) -> None:
    """All rounds are plain decoding then."""
    answers = oracle.assert_same(server, [greedy(prompt, 40) for prompt in prompts[:4]])
    rounds = sum(answer.rounds for answer in answers)
    wait_until(lambda: decoded(pool)["decode"] >= rounds, TRACED_WITHIN_S, lambda: f"{decoded(pool)} of {rounds}")
    assert decoded(pool)["verify"] == 0
    assert not server.is_connected()
    assert hits(server) == 0
    assert "decoding goes on without speculation" in server.process.log_text()


def test_every_kind_of_request_without_a_service(server: SGLangServer, oracle: Oracle, prompts: list[str]) -> None:
    """Rounds then are plain decoding, or verify one token where that does less."""
    kinds: list[dict[str, Any]] = [
        {"frequency_penalty": 0.6, "min_new_tokens": 12},
        {"regex": r"( [a-z]{1,6}){1,30}"},
        {"logit_bias": {"300": 5.0}},
    ]
    exact = [greedy(prompt, 24, **kind) for prompt, kind in zip(prompts, kinds, strict=False)]
    exact.append(greedy(prompts[3], 24) | {"return_logprob": True, "top_logprobs_num": 2})
    for answer in oracle.assert_same(server, exact):
        assert len(answer.ids) in (answer.rounds, answer.rounds + 1)
    sampled = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
    filters = [{}, {"top_p": 0.8, "min_p": 0.01}, {"top_k": 20, "presence_penalty": 0.5}, {"sampling_seed": 5}]
    payloads = [{"text": prompts[0], "sampling_params": {**sampled, **kind}} for kind in (*filters, filters[-1])]
    answers = server.generate_all(payloads, concurrency=5)
    assert all(len(answer.ids) == 24 for answer in answers)
    assert answers[-1].ids == answers[-2].ids
    assert answers[0].ids != answers[1].ids


def test_plain_rounds_draw_what_verifications_draw(server: SGLangServer, prompts: list[str]) -> None:
    """With a seed, whether alone, beside others or where log-probabilities ask for a verification."""
    seeded = {"temperature": 0.9, "max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 5}
    others = [{"temperature": 1.2, "max_new_tokens": 24}, {"temperature": 0, "max_new_tokens": 24}]
    for filters in ({}, {"top_p": 0.8, "min_p": 0.01, "top_k": 40}):
        payload = {"text": prompts[0], "sampling_params": {**seeded, **filters}}
        alone = server.generate(payload)
        beside = [payload, *({"text": prompts[1], "sampling_params": params} for params in others)]
        verified = server.generate(payload | {"return_logprob": True})
        assert alone.ids == verified.ids
        assert alone.ids == server.generate_all(beside, concurrency=3)[0].ids


def test_attaches_when_a_service_appears(
    server: SGLangServer, service: Service, oracle: Oracle, prompts: list[str]
) -> None:
    server.wait_connected()
    assert_speculates(server, oracle, prompts)
    service.assert_empty()


def interrupted(
    server: SGLangServer, service: Service, payload: Payload, signals: dict[int, signal.Signals]
) -> tuple[list[int], list[float]]:
    """Stream ``payload`` and send the service signals at these chunks; the tokens, and the pauses between chunks."""
    tokens, times = [], []
    for position, chunk in enumerate(server.stream(payload)):
        tokens = chunk["output_ids"]
        times.append(time.monotonic())
        if position in signals:
            service.process.signal(signals[position])
    return tokens, [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stuck"])
def test_lost_in_mid_generation(
    server: SGLangServer, service: Service, oracle: Oracle, prompts: list[str], number: signal.Signals
) -> None:
    """The text is the same, and the one pause is as long as the deadline."""
    server.wait_connected()
    lost_before = total(server.metrics(), "sglang_ssd:connections_lost_total")
    payload = greedy(prompts[0], 300, ignore_eos=True)
    tokens, pauses = interrupted(server, service, payload, {8: number})
    assert tokens == list(oracle(payload).ids)
    assert max(pauses) < DEADLINE_S + SLACK_S, max(pauses)
    assert sum(pause > 0.8 * DEADLINE_S for pause in pauses) <= 1, sorted(pauses)[-3:]
    server.wait_connected(False)
    assert total(server.metrics(), "sglang_ssd:connections_lost_total") == lost_before + 1
    assert "is gone" in server.process.log_text()


def test_comes_back_in_mid_generation(
    server: SGLangServer, service: Service, oracle: Oracle, prompts: list[str]
) -> None:
    """A service that stops for a while and goes on: its answers are used again, in the same request."""
    server.wait_connected()
    payload = greedy(prompts[1], 300, ignore_eos=True)
    rounds_before = total(server.metrics(), "sglang_ssd:proposals_total")
    hits_before = hits(server)
    tokens, _ = interrupted(server, service, payload, {8: signal.SIGSTOP, 20: signal.SIGCONT})
    assert tokens == list(oracle(payload).ids)
    rounds = total(server.metrics(), "sglang_ssd:proposals_total") - rounds_before
    assert hits(server) - hits_before > 0.5 * (rounds - 20)
    assert_speculates(server, oracle, prompts)
    service.assert_empty()


def test_two_servers_share_a_service(
    pool: ServerPool, server: SGLangServer, service: Service, endpoint: str, oracle: Oracle, prompts: list[str]
) -> None:
    """Each gets its own speculations, one through shared memory, one through ZeroMQ; the service outlives either."""
    server.wait_connected()
    second = start(pool, endpoint, "zmq")
    with ended_at_exit(second.process):
        assert service.metric("verifiers") == 2
        payloads = [greedy(prompt, 30) for prompt in prompts[:8]]
        streams = [each.stream(greedy(prompts[9], 200, ignore_eos=True)) for each in (server, second)]
        for stream in streams:
            next(stream)
        for each in (server, second):
            oracle.assert_same(each, payloads)
        ends = [list(stream)[-1]["output_ids"] for stream in streams]
        assert ends == [list(oracle(greedy(prompts[9], 200, ignore_eos=True)).ids)] * 2
        service.assert_empty()
        assert_speculates(second, oracle, prompts)
        second.process.signal(signal.SIGKILL)
    wait_until(lambda: service.metric("verifiers") == 1, 60, "the ended server is still known to the service")
    assert_speculates(server, oracle, prompts)
    service.assert_empty()
