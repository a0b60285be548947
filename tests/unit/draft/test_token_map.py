"""Token maps: what is read, and the sentences for what cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speculator_service.draft.config import DraftConfig
from speculator_service.draft.token_map import read_token_map
from ssd_proto.errors import ConfigError

TINY_DRAFT = Path(__file__).resolve().parents[2] / "models" / "tiny-draft"
TOKENS = [7, 3, 2047, 0, 5, 11, 12]


def saved(folder: Path, content: Any) -> str:
    path = folder / "map.pt"
    torch.save(content, path)
    return str(path)


@pytest.mark.parametrize("content", [TOKENS, torch.tensor(TOKENS), torch.tensor(TOKENS, dtype=torch.int32)])
def test_the_order_of_the_file_is_kept(tmp_path: Path, content: Any) -> None:
    assert read_token_map(saved(tmp_path, content), 2048, 6).tolist() == TOKENS


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (TOKENS[:-2], "6 are needed"),
        ([*TOKENS, 2048], "outside of 0 to 2047"),
        ([*TOKENS, -1], "outside of 0 to 2047"),
        ([*TOKENS, 7], "names a token twice"),
        ([0.5, 1.5], "does not hold a list of token ids"),
        ([[1, 2], [3, 4]], "does not hold a list of token ids"),
        ({"a": 1}, "cannot be read"),
    ],
)
def test_unusable_maps(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_token_map(saved(tmp_path, content), 2048, 6)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "map.pt").write_text("[1, 2, 3]")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token_map(str(tmp_path / "map.pt"), 2048, 1)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no token map"):
        read_token_map(str(tmp_path / "map.pt"), 2048, 1)


@pytest.mark.parametrize(
    ("changes", "words"), [({"num_branches": 60}, "62 are needed"), ({"device": "cuda:1"}, "for drafts on a CPU")]
)
def test_refused_before_the_model_is_loaded(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    settings = {"max_slots": 2, "num_branches": 4, "lookahead": 2, "token_map": saved(tmp_path, list(range(30)))}
    with pytest.raises(ConfigError, match=words):
        DraftConfig(str(TINY_DRAFT), **(settings | changes)).resolved()
