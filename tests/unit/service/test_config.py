from __future__ import annotations

from pathlib import Path

import pytest

from speculator_service.__main__ import main, parse_arguments
from speculator_service.config import SpeculatorConfig
from ssd_proto.errors import ConfigError

MODEL = str(Path(__file__).parents[2] / "models" / "tiny-draft")


def test_flags() -> None:
    config = parse_arguments(
        ["--model-path", "m", "--lookahead", "2", "--fan-out", "5,3,2", "--expiry-s", "7", "--exit-with-stdin"]
    )
    assert config.layout.counts == (5, 3, 2)
    assert config.expiry_s == 7.0
    assert config.exit_with_stdin
    assert not config.announce
    assert parse_arguments(["--model-path", "m", "--fan-out", "2"]).layout.counts == (2,) * 5


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", 'model-path = "m"\nfan_out = [1, 2, 3]\nlookahead = 2\nexpiry_s = 5\n'),
        ("c.json", '{"model_path": "m", "fan-out": [1, 2, 3], "lookahead": 2, "expiry_s": 5, "revision": null}'),
    ],
)
def test_file_and_flags_that_override_it(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    config = parse_arguments(["--config", str(file), "--expiry-s", "9"])
    assert config == SpeculatorConfig(model_path="m", fan_out=(1, 2, 3), lookahead=2, expiry_s=9.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lookahead = 'four'", "lookahead must be of type int"),
        ("lookahead = true", "lookahead must be of type int"),
        ("announce = 1", "announce must be of type bool"),
        ("frobnicate = 1", "there is no setting 'frobnicate'"),
        ("lookahead = ", "cannot be read"),
        ("fan_out = [1, 'x']", "fan_out"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        parse_arguments(["--config", str(file), "--model-path", "m"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lookahead", 0),
        ("max_sequences", 0),
        ("prefill_chunk", 0),
        ("spin_us", -1),
        ("http_port", 70000),
        ("expiry_s", 0.0),
        ("threads", 0),
        ("log_level", "loud"),
        ("endpoint", "127.0.0.1:1"),
        ("data_endpoint", "x"),
    ],
)
def test_ranges_name_the_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        SpeculatorConfig(model_path="m", **{field: value})  # type: ignore[arg-type]


def test_draft_config_is_capped_to_the_largest_step() -> None:
    draft = SpeculatorConfig(model_path=MODEL, max_sequences=4096, max_total_tokens=100_000).draft_config()
    assert draft.max_slots == 512
    assert draft.num_branches == 15
    assert draft.context_length == 1024


def test_data_endpoint_follows_the_control_endpoint() -> None:
    assert SpeculatorConfig(model_path="m", endpoint="tcp://0.0.0.0:7").data_address() == "tcp://0.0.0.0:0"
    assert SpeculatorConfig(model_path="m", endpoint="ipc:///x").data_address().startswith("ipc://@")
    assert SpeculatorConfig(model_path="m", data_endpoint="tcp://h:1").data_address() == "tcp://h:1"


def test_every_flag_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--model-path", "--fan-out", "--exit-with-stdin", "--http-port", "--trust-remote-code", "--config"):
        assert flag in text
