"""Prompts from JSONL files and from data sets of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from reproduction import prompts as files

from ssd_proto.errors import ConfigError

_HUB = "hf:"
_COLUMN = "prompt"
_SPLITS = ("test", "validation", "train")
"""The first of these that there is; else any."""


def read_prompts(sources: Sequence[str], count: int) -> list[str]:
    """``count`` prompts, from each of the ``sources`` in turn; repeated if there are fewer.

    Args:
        sources: paths of JSONL files with a `prompt` in each line, or ``hf:NAME[:COLUMN]``; none: the tests' prompts.
        count: at least 1.

    Raises:
        ConfigError: a source cannot be read, is not of this form or holds no prompt.
    """
    lists = [_read(source, count) for source in sources] or [files.read_prompts(None)]
    mixed = [prompt for prompt in chain(*zip_longest(*lists)) if prompt is not None]
    return [mixed[number % len(mixed)] for number in range(count)]


def as_messages(prompts: Sequence[str], model_path: str) -> list[str]:
    """Each prompt as a user's message in the model's chat template, as text.

    Raises:
        ConfigError: the model has no chat template.
    """
    from jinja2 import TemplateError
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in messages]
    except (OSError, ValueError, TemplateError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"The model {model_path} has no chat template ({reason}): leave out --chat, or name a chat model."
        ) from error


def _read(source: str, count: int) -> list[str]:
    if source.startswith(_HUB):
        name, _, column = source.removeprefix(_HUB).partition(":")
        return _from_hub(name, column or _COLUMN, count)
    return files.read_prompts(Path(source), at_least=1)


def _from_hub(name: str, column: str, count: int) -> list[str]:
    """First prompts of a data set, which is ``OWNER/NAME`` or ``OWNER/NAME/CONFIGURATION``."""
    from datasets import load_dataset  # type: ignore[import-untyped]

    owner_and_name, configuration = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
    try:
        splits: dict[str, Any] = load_dataset(owner_and_name, configuration or None)
    except Exception as error:  # the network's, the hub's and the data set's own errors have no common class
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ConfigError(
            f"The data set {_HUB}{name} cannot be loaded ({reason}): check its name and the network, "
            "or give a JSONL file."
        ) from error
    split = next((name for name in _SPLITS if name in splits), next(iter(splits)))
    rows = splits[split]
    if column not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise ConfigError(
            f"The data set {_HUB}{name} has no column {column!r}: write {_HUB}{name}:COLUMN with one of {columns}."
        )
    prompts = [_first_text(value) for value in rows[:count][column]]
    if not prompts or not all(prompts):
        raise ConfigError(f"The column {column!r} of {_HUB}{name} does not hold texts: name another column.")
    return prompts


def _first_text(value: object) -> str:
    """A text; of a conversation its first turn; empty if it is neither."""
    while isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
