"""The draft engine on CUDA (triton attention, decode graphs) equals Hugging Face on tiny models."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "draft"))
import draft_hf_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the draft engine's CUDA path not run"),
]


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Gemma3"])
def test_equals_hugging_face_on_cuda(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # else float32 products differ by more than the tolerance
    device = f"cuda:{torch.cuda.device_count() - 1}"
    path = str(draft_hf_cases.make_checkpoint(kind, tmp_path))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        job = pool.submit(draft_hf_cases.compare, path, "triton", 10, 0, device)
        compared, worst, spread, _ = job.result(timeout=400)
    assert compared > 300
    assert worst <= draft_hf_cases.TOLERANCE
    assert spread > 0.5
