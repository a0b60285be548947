"""What a server cannot be combined with is refused in a sentence that names the flag (no server is started here)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_ssd.algorithm import _check_server, _check_speculator
from sglang_ssd.config import VerifierConfig
from ssd_proto.errors import ConfigError


def server(**changes: object) -> SimpleNamespace:
    """Arguments of a server that SSD works with, but for ``changes``."""
    fitting = {
        "pp_size": 1,
        "enable_dp_attention": False,
        "attn_dp_size": 1,
        "page_size": None,
        "disaggregation_mode": "null",
        "speculative_adaptive": False,
        "speculative_eagle_topk": None,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "enable_return_hidden_states": False,
        "enable_watermark": False,
        "speculative_num_steps": None,
        "speculative_num_draft_tokens": None,
        "speculative_draft_model_path": None,
    }
    return SimpleNamespace(**{**fitting, **changes})


def test_a_fitting_server_passes() -> None:
    _check_server(server())
    _check_server(server(page_size=1, speculative_eagle_topk=1, attn_dp_size=None))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_dp_attention": True}, "DP attention"),
        ({"attn_dp_size": 2}, "--attn-dp-size"),
        ({"page_size": 16}, "--page-size 1, got 16"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk 4"),
        ({"speculative_accept_threshold_single": 0.9}, "--speculative-accept-threshold-single"),
        ({"speculative_accept_threshold_acc": 0.9}, "--speculative-accept-threshold"),
        ({"enable_return_hidden_states": True}, "--enable-return-hidden-states"),
        ({"enable_watermark": True}, "--enable-watermark"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _check_server(server(**change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speculative_num_steps": 0}, "between 1 and 16"),
        ({"speculative_num_steps": 17}, "between 1 and 16"),
        ({"speculative_num_draft_tokens": 9}, "--speculative-num-draft-tokens 9"),
        ({"speculative_num_steps": 3, "speculative_num_draft_tokens": 5}, "leave out"),
        ({}, "--speculative-draft-model-path"),
    ],
)
def test_what_the_speculator_cannot_do_is_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _check_speculator(server(**change), VerifierConfig())
