"""What SSD cannot serve exactly is refused with a reason; nothing is silently served differently."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.answers import greedy
from tests.support.pool import Oracle, SSDServer
from tests.support.sglang_server import Refused

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("ssd", ["sync"], indirect=True)]


@pytest.mark.parametrize(
    ("named", "sampling"),
    [
        ("min_p", {"min_p": 0.1, "temperature": 0.7}),
        ("frequency_penalty", {"frequency_penalty": 0.5}),
        ("presence_penalty", {"presence_penalty": -0.5}),
        ("repetition_penalty", {"repetition_penalty": 1.2}),
        ("min_new_tokens", {"min_new_tokens": 5}),
    ],
)
def test_sampling_parameter(ssd: SSDServer, prompts: list[str], named: str, sampling: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=named) as refusal:
        ssd.generate(greedy(prompts[0], 8, **sampling))
    assert refusal.value.status == 400
    assert "SSD" in refusal.value.body


def test_custom_logit_processor(ssd: SSDServer, prompts: list[str]) -> None:
    with pytest.raises(Refused) as refusal:
        ssd.generate({**greedy(prompts[0], 8), "custom_logit_processor": json.dumps({"callable": "00"})})
    assert refusal.value.status == 400


def test_one_refused_request_in_a_batch(ssd: SSDServer, prompts: list[str]) -> None:
    sampling = [{"temperature": 0, "max_new_tokens": 8}, {"temperature": 0, "max_new_tokens": 8, "presence_penalty": 1}]
    with pytest.raises(Refused, match="presence_penalty"):
        ssd.post("/generate", {"text": prompts[:2], "sampling_params": sampling})


def test_openai_api(ssd: SSDServer) -> None:
    body = {"model": "default", "prompt": "def f(", "max_tokens": 8, "temperature": 0, "frequency_penalty": 1.0}
    with pytest.raises(Refused, match="frequency_penalty") as refusal:
        ssd.post("/v1/completions", body)
    assert refusal.value.status == 400


def test_neutral_values_are_no_reason(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """Values that change nothing are served, and so are requests after a refusal."""
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0}
    assert ssd.generate(greedy(prompts[0], 20, **neutral)).essence == oracle(greedy(prompts[0], 20)).essence
