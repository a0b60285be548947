"""launch/bench: modes, settings, prompts, and what wrong input is told before a server starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ssd_proto.errors import ConfigError

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
sys.path.append(str(LAUNCH))  # launch/ is not a package

from benchmark.modes import (  # noqa: E402
    SPECULATIVE,
    SSD_OPTIONS,
    Mode,
    attention_flags,
    default_modes,
    parse_fan_out,
    parse_mode,
    parse_modes,
    speculation_flags,
)
from benchmark.processes import SCHEDULER, Process  # noqa: E402
from benchmark.prompts import read_prompts  # noqa: E402
from benchmark.servers import cores_of  # noqa: E402
from benchmark.settings import Cell, make_settings, parse_arguments  # noqa: E402


def value_of(flags: list[str], flag: str) -> str:
    return flags[flags.index(flag) + 1]


class TestModes:
    @pytest.mark.parametrize("kind", SPECULATIVE)
    def test_speculation_has_its_own_number_of_steps_or_that_of_all(self, kind: str) -> None:
        assert parse_mode(kind, 3) == Mode(kind, kind, 3, 1)
        assert parse_mode(f"{kind}@6", 3) == Mode(f"{kind}@6", kind, 6, 1)

    def test_devices(self) -> None:
        names = ("ar", "ar-2-threads", "ar-torch-native", "standalone", "ngram", "ssd@2")
        assert [parse_mode(name, 4).num_devices for name in names] == [1, 2, 1, 1, 1, 2]

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("fast", "There is no mode 'fast': choose from ar,"),
            ("SSD", "There is no mode 'SSD'"),
            ("ar-0-threads", "There is no mode"),
            ("ar@4", "does not speculate"),
            ("ar-2-threads@4", "does not speculate"),
            ("ssd@", "needs a number after the @"),
            ("ssd@four", "needs a number after the @"),
            ("ssd@-1", "needs a number after the @"),
            ("ssd@0", "choose K from 1 to 16"),
            ("standalone@17", "choose K from 1 to 16"),
        ],
    )
    def test_wrong_names(self, name: str, words: str) -> None:
        with pytest.raises(ConfigError, match=r"^[^\n]*$") as failure:
            parse_mode(name, 4)
        assert words in str(failure.value)

    def test_what_the_machine_lacks(self) -> None:
        with pytest.raises(ConfigError, match="needs 3 cores, and there are 2"):
            parse_modes(["ar", "ar-3-threads"], 4, 2, "cpu")
        with pytest.raises(ConfigError, match="is for --device cpu"):
            parse_modes(["ar-torch-native"], 4, 2, "cuda")
        with pytest.raises(ConfigError, match="named twice"):
            parse_modes(["ssd", "ar", "ssd"], 4, 2, "cpu")

    @pytest.mark.parametrize(("cores", "device"), [(1, "cpu"), (2, "cpu"), (1, "cuda"), (16, "cuda")])
    def test_default_modes_can_be_measured(self, cores: int, device: str) -> None:
        names = default_modes(cores, device)
        assert [mode.name for mode in parse_modes(names, 4, cores, device)] == names
        assert ("ar-2-threads" in names) == (cores > 1 and device == "cpu")

    def test_flags(self) -> None:
        standalone = speculation_flags(parse_mode("standalone@2", 4), "draft", {"fan_out": 3}, 99)
        assert value_of(standalone, "--speculative-num-steps") == "2"
        assert value_of(standalone, "--speculative-num-draft-tokens") == "3"
        assert value_of(standalone, "--speculative-draft-model-path") == "draft"
        ngram = speculation_flags(parse_mode("ngram@5", 4), "draft", {"fan_out": 3}, 99)
        assert value_of(ngram, "--speculative-algorithm") == "NGRAM"
        assert speculation_flags(parse_mode("ar", 4), "draft", {"fan_out": 3}, 99) == []

    @pytest.mark.parametrize("kind", SSD_OPTIONS)
    def test_a_service_shows_its_metrics_whatever_its_options(self, kind: str) -> None:
        before = json.dumps(SSD_OPTIONS)
        mode = parse_mode(kind, 4)
        flags = speculation_flags(mode, "draft", {"fan_out": [1, 2]}, 99)
        config = json.loads(value_of(flags, "--speculative-ssd-config"))
        own = SSD_OPTIONS[kind].get("service", {})
        wanted = {"fan_out": [1, 2], "http_port": 99} | own if mode.has_service else None
        assert config.get("service") == wanted
        assert ("--speculative-draft-model-path" in flags) == mode.has_service == (mode.num_devices == 2)
        assert config.get("verification") == SSD_OPTIONS[kind].get("verification")
        assert json.dumps(SSD_OPTIONS) == before

    def test_attention_backends(self) -> None:
        assert attention_flags(parse_mode("ar", 4), None) == []
        assert attention_flags(parse_mode("ssd", 4), "intel_amx") == ["--attention-backend", "intel_amx"]
        assert attention_flags(parse_mode("ar-torch-native", 4), None) == ["--attention-backend", "torch_native"]

    def test_fan_outs(self) -> None:
        assert [parse_fan_out(text) for text in ("3", "5,3,2", "auto")] == [3, [5, 3, 2], "auto"]
        for wrong in ("", "many", "3,", "1.5", "-1"):
            with pytest.raises(ConfigError, match="--fan-out"):
                parse_fan_out(wrong)

    def test_target_and_everything_else_share_no_core(self) -> None:
        scheduler, other = Process(1, SCHEDULER), Process(2, "speculator")
        cores = (2, 3, 5)
        assert cores_of(scheduler, parse_mode("ssd", 4), cores) == (2,)
        assert cores_of(other, parse_mode("ssd", 4), cores) == (3, 5)
        assert cores_of(scheduler, parse_mode("ar-2-threads", 4), cores) == (2, 3)
        assert cores_of(other, parse_mode("ar-2-threads", 4), cores) == (5,)
        assert cores_of(other, parse_mode("ar-2-threads", 4), cores[:2]) == (2, 3)
        assert cores_of(other, parse_mode("ar", 4), (7,)) == (7,)


def test_settings_hold_every_temperature_at_every_batch_size() -> None:
    settings = make_settings(parse_arguments(None, ["--temperatures", "0", "0.7", "--batch-sizes", "1", "8"]))
    assert settings.cells == (Cell(0, 1), Cell(0, 8), Cell(0.7, 1), Cell(0.7, 8))
    assert settings.max_batch_size == 8
    assert (settings.repeats, settings.max_new_tokens) == (7, 256)
    assert settings.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert str(settings.cells[2]) == "temperature 0.7, batch size 1"


def write_jsonl(path: Path, prompts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt, "id": 1}) + "\n" for prompt in prompts))
    return str(path)


class Split:
    """What is used of a split of a data set."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns, self.column_names = columns, list(columns)

    def __getitem__(self, rows: slice) -> dict[str, list[Any]]:
        return {name: values[rows] for name, values in self.columns.items()}


class TestPrompts:
    def test_default_is_those_of_the_tests(self) -> None:
        texts = json.loads((LAUNCH.parent / "tests" / "support" / "prompts.json").read_text())
        assert read_prompts([], 3) == texts[:3]

    def test_every_file_gives_its_share(self, tmp_path: Path) -> None:
        one = write_jsonl(tmp_path / "one.jsonl", ["a", "b", "c"])
        two = write_jsonl(tmp_path / "two.jsonl", ["x"])
        assert read_prompts([one, two], 3) == ["a", "x", "b"]
        assert read_prompts([one, two], 6) == ["a", "x", "b", "c", "a", "x"]
        assert read_prompts([two], 2) == ["x", "x"]

    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        """Data sets that need no network; what was asked for is in the list."""
        asked: list[tuple[Any, ...]] = []
        turns = [["first", "second"], [{"role": "user", "content": "hello"}]]

        def load_dataset(*names: Any) -> dict[str, Split]:
            asked.append(names)
            if names[0] == "nobody/nothing":
                raise ConnectionError("Couldn't reach the Hub\nwith all details")
            return {"train": Split(prompt=["wrong"]), "test": Split(prompt=["p", "q", "r"], turns=turns, number=[1, 2])}

        module = ModuleType("datasets")
        module.load_dataset = load_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", module)
        return asked

    def test_data_set_of_the_hub(self, hub: list[tuple[Any, ...]]) -> None:
        assert read_prompts(["hf:owner/name"], 2) == ["p", "q"]
        assert read_prompts(["hf:owner/name/main:turns"], 2) == ["first", "hello"]
        assert read_prompts(["hf:name"], 1) == ["p"]
        assert hub == [("owner/name", None), ("owner/name", "main"), ("name", None)]

    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("hf:nobody/nothing", "cannot be loaded (Couldn't reach the Hub): check its name and the network"),
            ("hf:owner/name:question", "no column 'question': write hf:owner/name:COLUMN with one of prompt, turns"),
            ("hf:owner/name:number", "does not hold texts"),
        ],
    )
    def test_data_sets_that_cannot_be_used(self, hub: list[Any], source: str, words: str) -> None:
        with pytest.raises(ConfigError, match=r"^[^\n]*$") as failure:
            read_prompts([source], 2)
        assert words in str(failure.value)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command on a machine without a network."""
    return subprocess.run(
        [sys.executable, LAUNCH / "bench.py", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modes", "ar", "fast"], "There is no mode 'fast'"),
        (["--modes", "ssd@99"], "choose K from 1 to 16"),
        (["--modes", "ar-4096-threads"], "needs 4096 cores"),
        (["--num-steps", "0"], "--num-steps has 0: choose from 1 to 16"),
        (["--batch-sizes", "1", "0"], "--batch-sizes has 0"),
        (["--batch-sizes", "1", "1"], "--batch-sizes names a value twice"),
        (["--temperatures", "-1"], "--temperatures has -1"),
        (["--temperatures", "nan"], "--temperatures has nan"),
        (["--repeats", "0"], "--repeats has 0"),
        (["--max-new-tokens", "1"], "--max-new-tokens has 1"),
        (["--fan-out", "wide"], "--fan-out is 'wide'"),
        (["--model-path", "{}/nothing"], "There is no model in"),
        (["--prompts", "{}/none.jsonl"], "none.jsonl cannot be read"),
        (["--prompts", "{}/empty.jsonl"], "empty.jsonl has 0 prompts: give at least 1"),
        (["--prompts", "{}/good.jsonl", "{}/wrong.jsonl"], "Line 2 of"),
        (["--prompts", "{}/broken.jsonl"], "Line 1 of"),
        (["--prompts", "hf:nobody/nothing"], "check its name and the network"),
        (["--output", "{}/empty.jsonl/below"], "name another place"),
        (["--json", "{}/none/bench.json"], "name another place"),
    ],
)
def test_wrong_input_is_one_sentence(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    write_jsonl(tmp_path / "good.jsonl", ["a"])
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    (tmp_path / "broken.jsonl").write_text('{"prompt": \n')
    finished = command(*(argument.format(tmp_path) for argument in arguments))
    assert finished.returncode == 2, finished.stderr
    assert words in finished.stderr
    assert "Traceback" not in finished.stderr
    assert "starting" not in finished.stderr
    messages = [line for line in finished.stderr.splitlines() if line.startswith("launch/bench: ")]
    assert len(messages) == 1
