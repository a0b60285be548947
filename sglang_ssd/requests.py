"""Requests that cannot be honoured exactly are refused (HTTP 400), never served differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def check_request(original: Callable[..., None], manager: Any, request: Any, input_ids: list[int]) -> None:
    """Hook around ``TokenizerManager._validate_one_request``; ValueError becomes HTTP 400."""
    original(manager, request, input_ids)
    if manager.server_args.speculative_algorithm is None or manager.server_args.speculative_algorithm.upper() != "SSD":
        return
    reason = refusal(getattr(request, "sampling_params", None) or {}, request)
    if reason is not None:
        raise ValueError(f"{reason} is not supported with --speculative-algorithm SSD")


def refusal(sampling_params: dict[str, Any], request: Any) -> str | None:
    """What in the request SGLang's verification would leave out or apply per round instead of per token."""
    for name in ("frequency_penalty", "presence_penalty", "min_new_tokens"):
        if sampling_params.get(name):
            return name
    if sampling_params.get("repetition_penalty", 1.0) not in (None, 1.0):
        return "repetition_penalty"
    if sampling_params.get("min_p") and sampling_params.get("temperature") != 0:
        return "min_p at a temperature above 0"
    if getattr(request, "custom_logit_processor", None):
        return "custom_logit_processor"
    return None
