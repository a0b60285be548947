"""What is measured, from the command line, checked before anything starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chat.pair import Pair, chat_pair
from children import say

from benchmark.modes import MAX_STEPS, NAMES, Mode, default_modes, parse_fan_out, parse_modes
from ssd_proto.errors import ConfigError

MODELS = Path(__file__).resolve().parents[2] / "tests" / "models"


class Cell(NamedTuple):
    """What all modes are compared at."""

    temperature: float
    batch_size: int
    """Requests at once."""

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, batch size {self.batch_size}"


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked numbers and names."""

    modes: tuple[Mode, ...]
    cells: tuple[Cell, ...]
    num_prompts: int
    max_new_tokens: int
    repeats: int
    latency_repeats: int
    service: Mapping[str, Any]
    """Options of every embedded service."""
    model_path: str
    draft_model_path: str
    device: str
    dtype: str
    attention_backend: str | None
    max_total_tokens: int
    cores: tuple[int, ...]
    """That this process may use, ascending."""

    @property
    def max_batch_size(self) -> int:
        """The largest of all cells."""
        return max(cell.batch_size for cell in self.cells)


def parse_arguments(description: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as it is written."""
    parser = argparse.ArgumentParser(
        prog="launch/bench", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--modes",
        nargs="+",
        metavar="MODE",
        help=f"what to compare: {NAMES}; default: {' '.join(default_modes(2, 'cpu'))}",
    )
    add(
        "--prompts",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="JSONL files with a `prompt` in each line, or hf:NAME[:COLUMN], a data set of the Hugging Face hub; "
        "of several each gives its share; default: the tests' prompts",
    )
    add("--batch-sizes", nargs="+", type=int, default=[1, 4], metavar="N", help="requests at once (1 4)")
    add("--temperatures", nargs="+", type=float, default=[0.0], metavar="T", help="of all requests (0)")
    add("--num-prompts", type=int, default=4, help="per run (%(default)s); at least the batch size is used")
    add("--max-new-tokens", type=int, default=256, help="per prompt, exactly (%(default)s)")
    add("--repeats", type=int, default=7, help="throughput runs of each mode, paired (%(default)s)")
    add("--latency-repeats", type=int, default=1, help="streaming runs of each mode, after these (%(default)s)")
    add("--num-steps", type=int, default=4, help="K of modes without @K (%(default)s)")
    add("--fan-out", default="auto", help="of the speculator service (%(default)s)")
    add("--model-path", help="target (default: tests/models/tiny-target)")
    add("--draft-model-path", help="draft (default: tests/models/tiny-draft)")
    add("--token-map", metavar="FILE", help="tokens that SSD's draft may propose (default: all)")
    add("--chat", action="store_true", help="prompts are a user's messages in the chat template of the target; without "
        "--model-path and --draft-model-path the models are the pair of launch/quickstart --chat")  # fmt: skip
    add("--device", default="cpu", help="of the target (%(default)s)")
    add("--dtype", default="float32", help="of the models (%(default)s); on a CPU SSD's draft has its own")
    add("--attention-backend", help="of the target in every mode but ar-torch-native; default: the fastest one, "
        "which on a CPU is the plugin's torch_cpu")  # fmt: skip
    add("--max-total-tokens", type=int, default=20000, help="KV cache of each server (%(default)s)")
    add("--output", type=Path, metavar="DIR", help="folder for bench.json and bench.png")
    add("--json", type=Path, metavar="FILE", help="write the JSON to this file")
    return parser.parse_args(argv)


def make_settings(arguments: argparse.Namespace) -> Settings:
    """Check a command line.

    Raises:
        ConfigError: something cannot be measured in this way; the message says what to change.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    _check_numbers(arguments)
    pair = _pair(arguments)
    service: dict[str, Any] = {"fan_out": parse_fan_out(arguments.fan_out)}
    if pair.token_map is not None:
        service["token_map"] = pair.token_map
    names = arguments.modes or default_modes(len(cores), arguments.device)
    return Settings(
        modes=parse_modes(names, arguments.num_steps, len(cores), arguments.device),
        cells=tuple(Cell(t, size) for t in arguments.temperatures for size in arguments.batch_sizes),
        num_prompts=arguments.num_prompts,
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
        latency_repeats=arguments.latency_repeats,
        service=service,
        model_path=pair.target,
        draft_model_path=pair.draft,
        device=arguments.device,
        dtype=arguments.dtype,
        attention_backend=arguments.attention_backend,
        max_total_tokens=arguments.max_total_tokens,
        cores=cores,
    )


def _pair(arguments: argparse.Namespace) -> Pair:
    """Models and token map that are named, or those that are meant."""
    target, draft = arguments.model_path, arguments.draft_model_path
    if arguments.chat and not target and not draft:
        pair = chat_pair(say)
        return pair._replace(token_map=arguments.token_map or pair.token_map)
    if arguments.chat and not (target and draft):
        raise ConfigError("With --chat give both --model-path and --draft-model-path, or neither of them.")
    pair = Pair(target or str(MODELS / "tiny-target"), draft or str(MODELS / "tiny-draft"), arguments.token_map)
    for path in (pair.target, pair.draft):
        if path.startswith((".", "/", "~")) and not Path(path).is_dir():
            raise ConfigError(f"There is no model in {path}: name a folder, or a model of the Hugging Face hub.")
    return pair


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name, least, most in (
        ("batch_sizes", 1, 256),
        ("temperatures", 0, 10),
        ("num_prompts", 1, 65536),
        ("max_new_tokens", 2, 65536),
        ("repeats", 1, 1000),
        ("latency_repeats", 0, 1000),
        ("num_steps", 1, MAX_STEPS),
        ("max_total_tokens", 1, 2**31),
    ):
        given = getattr(arguments, name)
        values = given if isinstance(given, list) else [given]
        flag = f"--{name.replace('_', '-')}"
        for value in values:
            if not least <= value <= most:
                raise ConfigError(f"{flag} has {value:g}: choose from {least} to {most}.")
        if len(set(values)) < len(values):
            raise ConfigError(f"{flag} names a value twice.")
