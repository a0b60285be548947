"""What a chat needs to know, from the command line of launch/quickstart, checked before anything starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.modes import MAX_STEPS
from benchmark.servers import other_cores
from children import say

from ssd_proto.errors import ConfigError

DEFAULTS: dict[str, Any] = {
    "model_path": None,
    "draft_model_path": None,
    "max_new_tokens": 256,
    "compare": False,
    "ask": [],
    "temperature": 0.0,
}
"""Of the flags whose default is another one without --chat, and of those that need --chat."""

_NEED_CHAT = ("compare", "ask", "temperature")


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked numbers and names."""

    target: str
    draft: str
    token_map: str | None
    """File that the server gets with --speculative-token-map."""
    is_own_pair: bool
    """Whether the models are the user's and not the pair that is made for this."""
    is_compared: bool
    questions: tuple[str, ...]
    """To ask instead of reading them."""
    temperature: float
    max_new_tokens: int
    num_steps: int
    max_total_tokens: int
    device: str
    draft_device: str
    dtype: str
    start_timeout_s: float
    cores: tuple[int, ...]
    """That this process may use, ascending."""
    num_threads: int
    """Of the target on a CPU, each on a core of its own if there is another one for the rest."""

    @property
    def is_on_cpu(self) -> bool:
        """Whether the target is."""
        return self.device == "cpu"

    @property
    def target_cores(self) -> tuple[int, ...]:
        """Of the target's scheduler on a CPU."""
        return self.cores[: self.num_threads]

    @property
    def other_cores(self) -> tuple[int, ...]:
        """Of everything else on a CPU."""
        return other_cores(self.num_threads, self.cores)

    @property
    def must_agree(self) -> bool:
        """Whether speculation must not change a single character."""
        return self.temperature == 0 and self.dtype == "float32" and self.is_on_cpu


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a chat, without defaults: those are in `DEFAULTS`."""
    group = parser.add_argument_group("chat")
    group.add_argument("--chat", action="store_true", help="talk to a chat model that speculates with SSD")
    add, absent = group.add_argument, argparse.SUPPRESS
    add("--compare", action="store_true", default=absent, help="generate each answer without speculation, too")
    add("--ask", action="append", default=absent, metavar="TEXT", help="ask this and end; may be repeated")
    add("--temperature", type=float, default=absent, help="of the answers (default: 0)")


def check_flags(given: Mapping[str, Any]) -> None:
    """Check what was ``given`` on the command line, without defaults.

    Raises:
        ConfigError: it does not go together, or a number is out of range; the message says what to change.
    """
    if not given["chat"]:
        if alone := [name for name in _NEED_CHAT if name in given]:
            raise ConfigError(f"--{alone[0]} belongs to a chat: give --chat as well.")
        return
    if ("model_path" in given) != ("draft_model_path" in given):
        there, lacks = ("model", "draft-model") if "model_path" in given else ("draft-model", "model")
        raise ConfigError(f"--{there}-path needs --{lacks}-path beside it: name both models of a chat, or none.")
    for name in ("model_path", "draft_model_path"):
        path = given.get(name, "")
        if path.startswith((".", "/", "~")) and not Path(path).is_dir():
            raise ConfigError(f"There is no model in {path}: name a folder, or a model of the Hugging Face hub.")
    for name, least, most in (
        ("temperature", 0, 10),
        ("max_new_tokens", 1, 65536),
        ("num_steps", 1, MAX_STEPS),
        ("max_total_tokens", 1, 2**31),
    ):
        if not least <= given.get(name, least) <= most:
            raise ConfigError(f"--{name.replace('_', '-')} is {given[name]:g}: choose from {least} to {most}.")


def make_settings(arguments: argparse.Namespace) -> Settings:
    """Settings of checked ``arguments``; makes the models if none are named.

    Raises:
        ConfigError: the models cannot be made.
    """
    is_own_pair = arguments.model_path is not None
    cores = tuple(sorted(os.sched_getaffinity(0)))
    target, draft, token_map = arguments.model_path, arguments.draft_model_path, None
    if not is_own_pair:
        from chat.pair import chat_pair  # imports more than a chat with other models needs

        target, draft, token_map = chat_pair(say)
    return Settings(
        target=target,
        draft=draft,
        token_map=token_map,
        is_own_pair=is_own_pair,
        is_compared=arguments.compare,
        questions=tuple(arguments.ask),
        temperature=arguments.temperature,
        max_new_tokens=arguments.max_new_tokens,
        num_steps=arguments.num_steps,
        max_total_tokens=arguments.max_total_tokens,
        device=arguments.device,
        draft_device=arguments.draft_device,
        dtype=arguments.dtype,
        start_timeout_s=arguments.start_timeout,
        cores=cores,
        num_threads=_num_threads(is_own_pair, len(cores)),
    )


def _num_threads(is_own_pair: bool, num_cores: int) -> int:
    """Threads of the target on a CPU: as the user says, else 1 for the small pair, which more only slow down."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdecimal() and int(said) > 0:
        return int(said)
    return max(1, num_cores - 1) if is_own_pair else 1
