"""launch/quickstart --chat with the real pair: SmolLM2-135M-Instruct from PyPI and the draft distilled for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = (
    "Write a Python function that reverses a string.",
    "What is it good for?",
    "/new",
    "A train leaves at 9 and arrives at 12. How long does it take?",
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_a_conversation_with_and_without_speculation(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "launch" / "quickstart.py"), "--chat", "--compare", "--max-new-tokens", "64"]
    for question in QUESTIONS:
        command += ["--ask", question]
    finished = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    text = finished.stdout
    assert re.search(r"def \w+\(.*\):\n +return \w+\[::-1\]", text), text
    assert text.count("without speculation: same text") == 3, text
    hits = [int(percent) for percent in re.findall(r"cache hit rate (\d+)%", text)]
    tokens = [float(number) for number in re.findall(r"([0-9.]+) tokens per round", text)]
    assert len(hits) == len(tokens) == 3, text
    assert sum(hits) / 3 > 8, text  # rounds in which nothing is prepared included
    assert sum(tokens) / 3 > 1.15, text
