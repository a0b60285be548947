"""Temperature above 0 through SSD: really sampled, from the target's distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from scipy.stats import chi2_contingency

from tests.support.answers import Answer, Payload, greedy
from tests.support.pool import Oracle, SSDServer
from tests.support.sglang_server import SGLangServer

DRAWS = 600
PER_REQUEST = 50
SMALLEST_P = 1e-3
SMALLEST_CELL = 10

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("ssd", ["sync"], indirect=True)]


def sampled(prompt: str, max_new_tokens: int, **sampling: object) -> Payload:
    return greedy(prompt, max_new_tokens, **{"temperature": 1.0, **sampling})


def draw(server: SGLangServer, payload: Payload) -> list[Answer]:
    """Many completions of the same request."""
    payload["sampling_params"]["n"] = PER_REQUEST
    return [answer for _ in range(DRAWS // PER_REQUEST) for answer in server.generate_several(payload)]


def p_value(first: Iterable[object], second: Iterable[object]) -> float:
    """Chi-square test that two samples are of the same distribution; rare values count as one."""
    one, other = Counter(first), Counter(second)
    common = [value for value in one | other if one[value] + other[value] >= SMALLEST_CELL]
    table = [[counts[value] for value in common] for counts in (one, other)]
    for row, counts in zip(table, (one, other), strict=True):
        row.append(counts.total() - sum(row))
    columns = [column for column in zip(*table, strict=True) if sum(column)]
    assert len(columns) >= 5, "too few different values to tell anything"
    return float(chi2_contingency(list(zip(*columns, strict=True))).pvalue)


def test_the_test_can_tell_distributions_apart(ssd: SSDServer, plain: SGLangServer, prompts: list[str]) -> None:
    """Draws at another temperature fail it."""
    cold = draw(plain, sampled(prompts[5], 3, temperature=0.6, top_k=20))
    warm = draw(plain, sampled(prompts[5], 3, temperature=1.0, top_k=20))
    assert p_value([a.ids[0] for a in cold], [a.ids[0] for a in warm]) < SMALLEST_P


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_k": 12, "temperature": 1.2}, {"top_p": 0.8, "temperature": 1.2}],
    ids=["temperature", "top_k", "top_p"],
)
def test_distribution(ssd: SSDServer, plain: SGLangServer, prompts: list[str], sampling: dict[str, float]) -> None:
    """The first token comes from the prefill, the next two from the first round of verification."""
    payload = sampled(prompts[5], 3, ignore_eos=True, **sampling)
    expected, actual = draw(plain, payload), draw(ssd, payload)
    assert sum(answer.rounds for answer in actual) >= DRAWS
    for place in (0, 1, 2):
        assert p_value([a.ids[place] for a in actual], [a.ids[place] for a in expected]) > SMALLEST_P, place
    assert p_value([a.ids[:2] for a in actual], [a.ids[:2] for a in expected]) > SMALLEST_P


def test_not_greedy(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """Sampled answers differ from the greedy one and from each other."""
    answers = ssd.generate_all([sampled(prompts[i], 32) for i in (2, 2, 2, 2)])
    texts = {answer.ids for answer in answers}
    assert len(texts) == 4
    assert oracle(greedy(prompts[2], 32)).ids not in texts


def test_top_k_of_1_is_greedy(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    for prompt in prompts[3:6]:
        assert ssd.generate(sampled(prompt, 32, top_k=1)).essence == oracle(greedy(prompt, 32)).essence


def test_greedy_beside_sampled(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """A sampled request in the batch leaves greedy ones greedy."""
    payloads = [greedy(prompts[6], 40), sampled(prompts[7], 40), greedy(prompts[8], 40), sampled(prompts[9], 40)]
    answers = ssd.generate_all(payloads)
    assert [a.essence for a in answers[::2]] == [a.essence for a in oracle.all(payloads[::2])]
    assert answers[1].ids != oracle(greedy(prompts[7], 40)).ids
