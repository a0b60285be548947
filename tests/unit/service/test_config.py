from __future__ import annotations

from pathlib import Path
from typing import Never

import pytest

from speculator_service.__main__ import main, parse_arguments
from speculator_service.config import SpeculatorConfig
from speculator_service.planner_settings import PlannerSettings
from ssd_proto.errors import ConfigError

MODEL = str(Path(__file__).parents[2] / "models" / "tiny-draft")


def test_flags() -> None:
    config = parse_arguments(
        ["--model-path", "m", "--lookahead", "2", "--fan-out", "5,3,2", "--expiry-s", "7", "--exit-with-stdin"]
    )
    assert config.fan_out == (5, 3, 2)
    assert config.expiry_s == 7.0
    assert config.exit_with_stdin
    assert not config.announce
    assert parse_arguments(["--model-path", "m", "--fan-out", "2"]).fan_out == 2
    assert not parse_arguments(["--model-path", "m", "--no-adapt-depth"]).adapt_depth


def test_flags_of_the_planner() -> None:
    flags = {
        "--fan-out": "auto",
        "--fan-out-after-miss": "4,0,0",
        "--branch-budget": "9",
        "--backup": "suffix",
        "--downweight": "0.5",
        "--lookahead": "2",
        "--num-kept": "0",
        "--draft-temperature": "2",
    }
    config = parse_arguments(["--model-path", "m", *(word for flag in flags.items() for word in flag)])
    assert config.planner_settings() == PlannerSettings(
        fan_out="auto",
        fan_out_after_miss=(4, 0, 0),
        branch_budget=9,
        backup="suffix",
        downweight=0.5,
        adapt_depth=True,
    )
    assert (config.num_kept, config.draft_temperature) == (0, 2.0)
    assert parse_arguments(["--model-path", "m", "--downweight", "auto"]).downweight == "auto"


def test_defaults_of_the_planner() -> None:
    assert SpeculatorConfig(model_path="m").planner_settings() == PlannerSettings()


def test_options_of_the_planner_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('fan_out = "auto"\nfan_out_after_miss = [9, 0, 0, 0, 0]\ndownweight = 1\nadapt_depth = false\n')
    config = parse_arguments(["--config", str(file), "--model-path", "m"])
    assert (config.fan_out, config.fan_out_after_miss) == ("auto", (9, 0, 0, 0, 0))
    assert (config.downweight, config.adapt_depth) == (1.0, False)
    assert parse_arguments(["--config", str(file), "--model-path", "m", "--adapt-depth"]).adapt_depth


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
        ("fan_out = 'x'", "fan_out must be auto, a number, or numbers separated by commas"),
        ("fan_out_after_miss = '1,x'", "fan_out_after_miss must be auto, a number, or numbers separated by commas"),
        ("fan_out_after_miss = 1.5", "fan_out_after_miss must be of type"),
        ("fan_out_after_miss = [1, 2]", r"fan_out_after_miss must have lookahead \+ 1"),
        ("downweight = 'x'", "downweight must be auto or a number"),
        ("adapt_depth = 'yes'", "adapt_depth must be of type bool"),
        ("fan_out = 3\nbranch_budget = 4", "branch_budget is for fan_out auto"),
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
        ("fan_out", -1),
        ("fan_out", (1, 2)),
        ("fan_out_after_miss", 1000),
        ("branch_budget", 1025),
        ("backup", "none"),
        ("downweight", -0.1),
        ("num_kept", -1),
        ("num_kept", 1025),
        ("draft_temperature", 0.0),
        ("draft_temperature", 21.0),
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


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        ([], 0, ""),
        (["--max-total-tokens", "5"], 2, "max_total_tokens is 5"),
        (["--backup", "fast"], 2, "backup must be one of"),
    ],
)
def test_check_ends_without_loading(
    capsys: pytest.CaptureFixture[str], flags: list[str], code: int, sentence: str
) -> None:
    def load(config: object) -> Never:
        raise AssertionError("the model is loaded")

    assert main(["--model-path", MODEL, "--check", *flags], load) == code
    assert sentence in capsys.readouterr().err
