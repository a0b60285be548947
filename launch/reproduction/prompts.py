"""Prompts: those of the tests, or of a JSONL file as `launch/bench` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ssd_proto.errors import ConfigError

DEFAULT = Path(__file__).resolve().parents[2] / "tests" / "support" / "prompts.json"
LEAST = 2
"""Allocations are made from one half of the prompts and judged by the other."""


def read_prompts(path: Path | None, at_least: int = LEAST) -> list[str]:
    """The prompts of a file with a JSON object with a `prompt` in each line, or the tests' prompts.

    Raises:
        ConfigError: the file cannot be read, is not of this form, or has fewer than ``at_least`` prompts.
    """
    if path is None:
        prompts: list[str] = json.loads(DEFAULT.read_text())
        return prompts
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"The prompt file {path} cannot be read ({reason}): name a JSONL file.") from error
    prompts = [_prompt(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]
    if len(prompts) < at_least:
        raise ConfigError(
            f"The prompt file {path} has {len(prompts)} prompts: give at least {at_least}, one in each line."
        )
    return prompts


def _prompt(line: str, number: int, path: Path) -> str:
    try:
        value: Any = json.loads(line)
    except ValueError:
        value = None
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f'Line {number} of {path} must be a JSON object with a text: {{"prompt": "..."}}.')
    return prompt
