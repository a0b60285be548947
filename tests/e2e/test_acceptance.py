"""How many tokens a round yields: as many as the draft can give, and no fewer than SGLang's own STANDALONE.

A wrong KV cache of the draft shows here and nowhere else: the text stays right whatever is proposed.
Accepted length = tokens after the first one / rounds, so that it includes the bonus token of each round.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from transformers import AutoTokenizer

from tests.support.answers import Answer, Payload, greedy
from tests.support.offline import IdealSpeculation
from tests.support.pool import Oracle, ServerPool, SSDServer
from tests.support.processes import ended_at_exit
from tests.support.sglang_server import DRAFT, LOOKAHEAD, TARGET, SGLangServer

NUM_PROMPTS = 12
NUM_TOKENS = 64
OF_IDEAL = 0.99

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def payloads(prompts: list[str]) -> list[Payload]:
    return [greedy(prompt, NUM_TOKENS, ignore_eos=True) for prompt in prompts[:NUM_PROMPTS]]


def accepted_length(answers: Sequence[Answer]) -> float:
    return sum(len(answer.ids) - 1 for answer in answers) / sum(answer.rounds for answer in answers)


@pytest.fixture(scope="module")
def ideal(oracle: Oracle, prompts: list[str], payloads: list[Payload]) -> float:
    """Accepted length of the offline ideal."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    speculation = IdealSpeculation(LOOKAHEAD)
    outputs = [answer.ids for answer in oracle.all(payloads)]
    prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts[:NUM_PROMPTS]]
    rounds = [speculation.rounds(*pair) for pair in zip(prompt_ids, outputs, strict=True)]
    return NUM_PROMPTS * (NUM_TOKENS - 1) / sum(rounds)


@pytest.fixture(scope="module")
def standalone(pool: ServerPool, oracle: Oracle, payloads: list[Payload]) -> float:
    """Accepted length of SGLang's own speculation with the same draft in the server's process."""
    flags = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(DRAFT)]
    flags += ["--speculative-num-steps", str(LOOKAHEAD), "--speculative-eagle-topk", "1"]
    flags += ["--speculative-num-draft-tokens", str(LOOKAHEAD + 1)]
    server = SGLangServer("standalone", flags, pool.logs)
    with ended_at_exit(server.process):
        return accepted_length(oracle.assert_same(server, payloads, concurrency=1))


@pytest.mark.parametrize("ssd", ["sync", "overlap"], indirect=True)
@pytest.mark.parametrize("concurrency", [1, 6])
def test_accepted_length_is_the_ideal(
    ssd: SSDServer, oracle: Oracle, payloads: list[Payload], ideal: float, concurrency: int
) -> None:
    actual = accepted_length(oracle.assert_same(ssd, payloads, concurrency))
    assert actual >= OF_IDEAL * ideal, f"{actual:.3f} tokens per round, ideal {ideal:.3f}"


@pytest.mark.parametrize("ssd", ["sync"], indirect=True)
def test_not_below_standalone(ssd: SSDServer, oracle: Oracle, payloads: list[Payload], standalone: float) -> None:
    actual = accepted_length(oracle.assert_same(ssd, payloads, concurrency=1))
    assert actual >= standalone, f"{actual:.3f} tokens per round, STANDALONE {standalone:.3f}"


@pytest.mark.parametrize("ssd", ["sync", "overlap"], indirect=True)
def test_most_outcomes_are_prepared(ssd: SSDServer, oracle: Oracle, payloads: list[Payload]) -> None:
    """Speculation on outcomes is at work: most rounds find their speculation in the table."""

    def counts() -> tuple[float, float]:
        return ssd.service.outcomes("hit", "short_hit"), ssd.service.outcomes()

    hits_before, outcomes_before = counts()
    answers = oracle.assert_same(ssd, payloads, concurrency=1)
    hits, outcomes = (after - before for after, before in zip(counts(), (hits_before, outcomes_before), strict=True))
    assert outcomes >= sum(answer.rounds for answer in answers) - len(answers)
    assert hits / outcomes > 0.6, f"{hits:.0f} of {outcomes:.0f}"
