"""Many short requests, many at once, some of them abandoned: nothing is lost, mixed up or leaked."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.answers import Answer, Payload, greedy
from tests.support.pool import Oracle, SSDServer

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("ssd", ["sync", "overlap"], indirect=True)]

NUM_REQUESTS = 200
CONCURRENCY = 32
ABANDONED = 0.2


@pytest.mark.timeout(400)
def test_soak(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    chance = random.Random(7)
    payloads = [greedy(chance.choice(prompts)[: chance.randrange(20, 200)], chance.randrange(1, 24)) for _ in range(60)]
    expected = dict(zip(map(repr, payloads), oracle.all(payloads), strict=True))
    work = [(chance.choice(payloads), chance.random() < ABANDONED) for _ in range(NUM_REQUESTS)]

    def serve(payload: Payload, is_abandoned: bool) -> Answer | None:
        if not is_abandoned:
            return ssd.generate(payload)
        chunks = ssd.stream(payload)
        next(chunks, None)
        chunks.close()  # the client goes away after the first chunk
        return None

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(serve, *zip(*work, strict=True)))
    for (payload, is_abandoned), answer in zip(work, answers, strict=True):
        if not is_abandoned:
            assert answer is not None
            assert answer.essence == expected[repr(payload)].essence
