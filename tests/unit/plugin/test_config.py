"""Options of the verifier: sources, their order, and one sentence for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ssd.config import CONFIG_VARIABLE, ENDPOINT_VARIABLE, VerifierConfig
from ssd_proto.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDPOINT_VARIABLE, raising=False)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


def test_defaults_mean_an_embedded_service() -> None:
    config = VerifierConfig.load(None, None)
    assert config.endpoint is None
    assert config == VerifierConfig()


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT_VARIABLE, "tcp://127.0.0.1:1")
    monkeypatch.setenv(CONFIG_VARIABLE, '{"deadline_ms": 7}')
    assert VerifierConfig.load(None, None).endpoint == "tcp://127.0.0.1:1"
    assert VerifierConfig.load("tcp://127.0.0.1:2", None).endpoint == "tcp://127.0.0.1:2"
    assert VerifierConfig.load(None, None).deadline_ms == 7
    assert VerifierConfig.load(None, '{"deadline_ms": 8}').deadline_ms == 8


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_file_may_be_json_or_toml(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"ssd.{suffix}"
    text = {"json": json.dumps({"deadline_ms": 9, "service": {"fan_out": 2}})}.get(
        suffix, "deadline_ms = 9\n[service]\nfan_out = 2\n"
    )
    file.write_text(text)
    config = VerifierConfig.load(None, str(file))
    assert (config.deadline_ms, config.service) == (9, {"fan_out": 2})


@pytest.mark.parametrize(
    ("endpoint", "source", "says"),
    [
        ("localhost:5757", None, "tcp://"),
        (None, '{"deadline": 5}', "deadline_ms"),
        (None, '{"deadline_ms": -1}', "between 0 and 60000"),
        (None, '{"deadline_ms": true}', "between"),
        (None, '{"deadline_ms"', "cannot be read"),
        (None, "/no/such/file.json", "no file"),
        (None, '{"channels": ["pigeon"]}', "shm"),
        (None, '{"channels": []}', "shm"),
        (None, '{"channels": 5}', "a list"),
        (None, '{"service": null}', "an object"),
        (None, '{"endpoint": 7}', "a string"),
        (None, '{"overlap_on_cpu": "no"}', "true or false"),
        (None, '{"verification": "greedy"}', "shared_noise"),
        (None, '{"num_kept": 1025}', "between 0 and 1024"),
        (None, '{"num_kept": 1.5}', "a whole number"),
        (None, '{"num_kept": 8, "service": {"num_kept": 9}}', "beside 'service'"),
        (None, '{"service": {"fanout": 3}}', "fan_out"),
        ("ipc:///x", '{"service": {"fan_out": 3}}', "embedded"),
    ],
)
def test_mistakes_are_named(endpoint: str | None, source: str | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        VerifierConfig.load(endpoint, source)
    assert "\n" not in str(caught.value)
