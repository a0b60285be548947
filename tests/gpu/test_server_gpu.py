"""A whole server on CUDA, target-verify graphs and pinned staging included, answers as plain decoding does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.answers import greedy
from tests.support.sglang_server import SGLangServer, read_metrics, ssd_flags, total

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.e2e,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the verifier's CUDA path not run"),
]

PROMPTS = json.loads((Path(__file__).parents[1] / "support" / "prompts.json").read_text())[:12]
ENVIRONMENT = {"NVIDIA_TF32_OVERRIDE": "0"}
FLAGS = ["--device", "cuda", "--mem-fraction-static", "0.2"]


def answers(name: str, flags: list[str], logs: Path) -> tuple[list[tuple[int, ...]], dict[str, float]]:
    server = SGLangServer(name, [*FLAGS, *flags], logs, ENVIRONMENT)
    try:
        payloads = [greedy(prompt, 64) for prompt in PROMPTS]
        one_by_one = [server.generate(payload).ids for payload in payloads[:4]]
        together = [answer.ids for answer in server.generate_all(payloads)]
        assert together[:4] == one_by_one
        return together, read_metrics(server.url)
    finally:
        server.process.end()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
def test_equals_plain_decoding_on_cuda(overlap: bool, tmp_path: Path) -> None:
    schedule = [] if overlap else ["--disable-overlap-schedule"]
    # A device of its own if there is one; on a machine with one GPU both share it, which shows the same code.
    device = f"cuda:{min(1, torch.cuda.device_count() - 1)}"
    options = {"deadline_ms": 2000, "service": {"device": device, "dtype": "float32"}}
    plain, _ = answers("plain-cuda", schedule, tmp_path)
    ssd, metrics = answers("ssd-cuda", [*schedule, *ssd_flags(options)], tmp_path)
    assert ssd == plain
    hits = total(metrics, "sglang_ssd:proposals_total", 'kind="hit"')
    rounds = total(metrics, "sglang_ssd:proposals_total")
    assert hits > 0.6 * rounds
