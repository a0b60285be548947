"""Request features that change what is sampled, token by token as in plain decoding, alone and mixed in a batch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.answers import Payload, greedy
from tests.support.pool import Oracle, SSDServer

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("ssd", ["sync", "overlap"], indirect=True)]

FEATURES: dict[str, dict[str, Any]] = {
    "frequency_penalty": {"frequency_penalty": 0.8},
    "presence_penalty": {"presence_penalty": 0.7},
    "negative_penalty": {"presence_penalty": -0.5, "frequency_penalty": -0.2},
    "repetition_penalty": {"repetition_penalty": 1.3},
    # Not with repetition_penalty: the oracle's order of adding and multiplying is another one in every process.
    "additive_penalties": {"frequency_penalty": 0.3, "presence_penalty": 0.2, "min_new_tokens": 12},
    "min_new_tokens": {"min_new_tokens": 30, "stop_token_ids": [16, 263, 296]},
    "logit_bias": {"logit_bias": {"263": -5.0, "524": 3.0}},
    "min_p": {"min_p": 0.3},
    "penalty_and_regex": {"frequency_penalty": 0.6, "regex": r"( [a-z]{1,6}){1,30}"},
}
"""Sampling parameters; at temperature 0 all of them leave one right answer."""

BAN_LAST_TOKEN = '''
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

class BanLastToken(CustomLogitProcessor):
    """Never the same token twice in a row: the law depends on the request's own output."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            output = params["__req__"].output_ids
            if len(output):
                row[output[-1]] = float("-inf")
        return logits
'''


def payload(prompt: str, sampling: dict[str, Any], length: int = 48) -> Payload:
    return greedy(prompt, length, **sampling)


@pytest.mark.parametrize("feature", FEATURES)
def test_alone(ssd: SSDServer, oracle: Oracle, prompts: list[str], feature: str) -> None:
    oracle.assert_same(ssd, [payload(prompt, FEATURES[feature]) for prompt in prompts[:4]], concurrency=1)


def test_mixed_in_a_batch(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """Every feature beside every other and beside requests without any."""
    payloads = [payload(prompts[i % 12], sampling, 32 + i) for i, sampling in enumerate([*FEATURES.values(), {}, {}])]
    oracle.assert_same(ssd, payloads)


def test_penalised_requests_still_speculate(ssd: SSDServer, prompts: list[str]) -> None:
    answers = ssd.generate_all([payload(prompt, FEATURES["presence_penalty"]) for prompt in prompts[:4]])
    assert sum(len(answer.ids) - 1 for answer in answers) > 1.5 * sum(answer.rounds for answer in answers)


def test_custom_logit_processor(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """Arbitrary code that looks at its request: such a request decodes a token per round, the others speculate."""
    if "overlap" in ssd.process.name:
        pytest.skip("with overlap scheduling plain decoding itself shows a processor an output that lags behind")
    scope: dict[str, Any] = {"__name__": "__main__"}  # so that the processor travels by value
    exec(BAN_LAST_TOKEN, scope)
    processor = scope["BanLastToken"].to_str()
    banned = [{**greedy(prompt, 24), "custom_logit_processor": processor} for prompt in prompts[:3]]
    for one in banned:
        one["sampling_params"]["custom_params"] = {}
    answers = oracle.assert_same(ssd, [*banned, greedy(prompts[3], 40)])
    for answer in answers[:3]:
        assert all(a != b for a, b in zip(answer.ids, answer.ids[1:], strict=False))
    assert answers[3].rounds < 39
