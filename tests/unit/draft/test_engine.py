"""The draft engine equals Hugging Face on tiny models of several architectures, with free cells poisoned."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import draft_hf_cases
import numpy as np
import pytest
import torch

from speculator_service.draft.config import DraftConfig
from speculator_service.draft.engine import load_engine
from ssd_proto.errors import ConfigError

TINY_DRAFT = Path(__file__).resolve().parents[2] / "models" / "tiny-draft"
KINDS = ["Llama", "Qwen2", "Qwen3", "Gemma3"]


@pytest.fixture(scope="module")
def process() -> Iterator[Callable[..., object]]:
    """Runs a function in a fresh process; SGLang is imported once and every process is forked from there."""
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        context.set_forkserver_preload(["speculator_service.draft.runner", "transformers", "draft_hf_cases"])
        with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
            yield lambda function, *args: pool.submit(function, *args).result(timeout=240)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, process: Callable[..., object]) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind == "tiny-draft":
            return TINY_DRAFT
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            process(draft_hf_cases.make_checkpoint, kind, made[kind])
        return made[kind]

    return get


def load_refused(path: str, token_map: str | None = None) -> str:
    """In a process of its own: the sentence with which the model, or a token map for it, is refused."""
    with pytest.raises(ConfigError) as caught:
        load_engine(DraftConfig(path, max_slots=2, num_branches=4, lookahead=2, token_map=token_map))
    return str(caught.value)


def test_broken_model_is_refused_in_one_sentence(process: Callable[..., object], tmp_path: Path) -> None:
    config = json.loads((TINY_DRAFT / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    (tmp_path / "model.safetensors").symlink_to(TINY_DRAFT / "model.safetensors")
    said = process(load_refused, str(tmp_path))
    assert isinstance(said, str)
    assert said.startswith("SGLang cannot load the draft model")
    assert "\n" not in said


def test_missing_cuda_device_is_refused_before_sglang_is_imported() -> None:
    config = DraftConfig(str(TINY_DRAFT), max_slots=2, num_branches=4, lookahead=2, device="cuda:99")
    with pytest.raises(ConfigError, match="does not exist"):
        load_engine(config)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [(kind, "shared_trunk") for kind in [*KINDS, "tiny-draft"]]
    + [("Llama", "torch_native"), ("Gemma3", "torch_native")],
)
def test_equals_hugging_face(
    kind: str, backend: str, process: Callable[..., object], checkpoints: Callable[[str], Path]
) -> None:
    result = process(draft_hf_cases.compare, str(checkpoints(kind)), backend, 10)
    assert isinstance(result, tuple)
    compared, worst, spread, short_forward = result
    assert short_forward == (backend == "shared_trunk" and kind != "Gemma3")
    assert compared > 300
    assert worst <= draft_hf_cases.TOLERANCE
    assert spread > 0.5, "the reference's logits hardly differ: the comparison shows nothing"


def last_logits(path: str, token_map: str | None, lean: bool, dtype: str = "float32") -> list[float]:
    """In a process of its own: logits after three tokens, once as a prompt and once as a step."""
    config = DraftConfig(path, max_slots=1, num_branches=4, lookahead=2, token_map=token_map, lean=lean, dtype=dtype)
    engine = load_engine(config)
    assert engine.reserve(0, 4)
    prompt = engine.extend(0, 0, np.array([5, 9, 700]))
    step = engine.extend_one(np.array([0]), np.array([3]), np.array([31]))
    return [*prompt.tolist(), *step[0].tolist()]


@pytest.mark.parametrize("lean", [True, False], ids=["short forward", "SGLang's model"])
def test_a_token_map_leaves_its_columns(lean: bool, process: Callable[..., object], tmp_path: Path) -> None:
    tokens = [3, 1999, 7, 12, 40, 0, 2047]
    torch.save(tokens, tmp_path / "map.pt")
    everything = process(last_logits, str(TINY_DRAFT), None, lean)
    narrow = process(last_logits, str(TINY_DRAFT), str(tmp_path / "map.pt"), lean)
    assert isinstance(everything, list)
    chosen = [everything[row * 2048 + token] for row in range(2) for token in tokens]
    assert narrow == pytest.approx(chosen, abs=1e-4)


@pytest.mark.parametrize("tokens", [None, [3, 1999, 7, 12, 40, 0, 2047]], ids=["all tokens", "token map"])
def test_by_default_products_may_be_rounded(
    tokens: list[int] | None, process: Callable[..., object], tmp_path: Path
) -> None:
    path = None if tokens is None else str(tmp_path / "map.pt")
    torch.save(tokens, tmp_path / "map.pt")
    exact, rounded = (process(last_logits, str(TINY_DRAFT), path, True, dtype) for dtype in ("float32", "auto"))
    assert rounded == pytest.approx(exact, abs=0.25)


def test_a_model_whose_output_layer_cannot_be_reduced(
    process: Callable[..., object], checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """SGLang's Gemma 3 reads its embedding in place of the output layer it has."""
    torch.save(list(range(20)), tmp_path / "map.pt")
    reason = process(load_refused, str(checkpoints("Gemma3")), str(tmp_path / "map.pt"))
    assert "leave out the token map" in str(reason)
