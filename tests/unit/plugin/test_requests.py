"""What SSD refuses per request, and what it must not refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ssd.requests import check_request, refusal


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -0.5}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_p": 0.1}, "min_p"),
        ({"min_p": 0.1, "temperature": 0.7}, "min_p"),
    ],
)
def test_refused(params: dict[str, Any], reason: str) -> None:
    assert reason in (refusal(params, SimpleNamespace()) or "")


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0, "min_p": 0.1},
        {"frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "min_p": 0.0},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "regex": "a+", "logit_bias": {"5": 1.0}},
    ],
)
def test_served(params: dict[str, Any]) -> None:
    assert refusal(params, SimpleNamespace()) is None


def test_custom_logit_processors_are_refused() -> None:
    assert refusal({}, SimpleNamespace(custom_logit_processor="code")) == "custom_logit_processor"


@pytest.mark.parametrize(("algorithm", "is_refused"), [("ssd", True), ("SSD", True), ("NGRAM", False), (None, False)])
def test_only_servers_with_ssd_refuse(algorithm: str | None, is_refused: bool) -> None:
    manager = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm=algorithm))
    request = SimpleNamespace(sampling_params={"presence_penalty": 1.0})
    called = []

    def validate(*args: Any) -> None:
        called.append(args)

    if is_refused:
        with pytest.raises(ValueError, match="presence_penalty is not supported"):
            check_request(validate, manager, request, [1])
    else:
        check_request(validate, manager, request, [1])
    assert called == [(manager, request, [1])]
