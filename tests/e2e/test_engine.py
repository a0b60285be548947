"""`sglang.Engine` offline: SSD by keyword arguments, its own options by the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers import Answer, greedy
from tests.support.pool import DEADLINE_MS, Oracle, ServerPool
from tests.support.processes import processes
from tests.support.sglang_server import CHECKOUT, CHUNK, DRAFT, ENVIRONMENT, LOOKAHEAD, TARGET

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ENGINE = {
    "model_path": str(TARGET),
    "device": "cpu",
    "dtype": "float32",
    "max_total_tokens": 20000,
    "chunked_prefill_size": CHUNK,
    "random_seed": 1,
    "log_level": "warning",
    "speculative_algorithm": "SSD",
    "speculative_draft_model_path": str(DRAFT),
    "speculative_num_steps": LOOKAHEAD,
}


@pytest.fixture(scope="module")
def run(pool: ServerPool, prompts: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program got, and how it ended."""
    pool.end_ssd()
    output = tmp_path_factory.mktemp("engine") / "answers.json"
    work = {"engine": ENGINE, "prompts": prompts[:6], "sampling": greedy("", 30)["sampling_params"]}
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.engine_program", str(output)],
        input=json.dumps(work),
        cwd=CHECKOUT,
        env={**os.environ, **ENVIRONMENT, "SGLANG_SSD_CONFIG": json.dumps({"deadline_ms": DEADLINE_MS})},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(Path(output).read_text())


def test_batch(run: dict[str, Any], oracle: Oracle, prompts: list[str]) -> None:
    answers = [Answer.of(body) for body in run["batch"]]
    assert [a.essence for a in answers] == [a.essence for a in oracle.all([greedy(p, 30) for p in prompts[:6]])]
    assert sum(len(a.ids) - 1 for a in answers) > 1.5 * sum(a.rounds for a in answers)


def test_stream(run: dict[str, Any], oracle: Oracle, prompts: list[str]) -> None:
    assert Answer.of(run["stream"][-1]).essence == oracle(greedy(prompts[0], 30)).essence
    assert 1 < len(run["stream"]) < 30


def test_async(run: dict[str, Any], oracle: Oracle, prompts: list[str]) -> None:
    expected = oracle.all([greedy(prompt, 30) for prompt in prompts[:6]])
    assert [Answer.of(body).essence for body in run["async"]] == [answer.essence for answer in expected]


def test_nothing_is_left_running(run: dict[str, Any]) -> None:
    """The embedded service has ended with the program."""
    left = [entry for entry in processes().values() if entry.parent == 1 and "--exit-with-stdin" in entry.command]
    assert not left
