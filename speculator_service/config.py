"""Settings of the speculator service. Each field is a flag and a key of the configuration file."""

from __future__ import annotations

import json
import logging
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from speculator_service.draft.config import MAX_ROWS, DraftConfig
from speculator_service.planner_settings import AUTO, AVERAGE_FAN_OUT, FanOutOption, PlannerSettings
from ssd_proto.channel import MAX_KEPT, MAX_LOOKAHEAD, MAX_OUTCOMES
from ssd_proto.errors import ConfigError

logger = logging.getLogger(__name__)

NO_HTTP = -1
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 0.05, 20.0
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorConfig:
    """Everything that a service can be told.

    Raises:
        ConfigError: a value is not allowed; names the field and the allowed range.
    """

    model_path: str = field(metadata={"help": "draft model: a directory, or a name on the Hugging Face hub"})
    revision: str | None = _option(None, "branch, tag or commit of a draft model on the hub")
    endpoint: str = _option(
        "tcp://127.0.0.1:5757",
        "where verifiers connect: tcp://HOST:PORT (port 0: any free one; host 0.0.0.0: from other machines, there is "
        "no authentication) or ipc://PATH",
    )
    data_endpoint: str | None = _option(
        None, "where verifiers without shared memory send outcomes; default: any free port beside --endpoint"
    )
    token_map: str | None = _option(
        None,
        "file with the tokens that may be drafted, a list of ids saved by torch.save, or OWNER/NAME/FILE on the hub: "
        "less work for the output layer of a small draft on a CPU; default: all tokens",
    )
    device: str = _option("cpu", "device of the draft model: cpu, cuda or cuda:N; it must not be the target's")
    dtype: str = _option(
        "auto", "auto (the model's own; on a CPU float32, products rounded if faster), float32, float16 or bfloat16"
    )
    attention_backend: str | None = _option(
        None, "shared_trunk (CPU only, default there) or a decode backend of SGLang (default on CUDA: triton)"
    )
    lookahead: int = _option(
        4, f"K: tokens per speculation, 1 to {MAX_LOOKAHEAD}; must be the verifier's --speculative-num-steps"
    )
    fan_out: int | tuple[int, ...] | str = _option(
        AUTO,
        "bonus tokens prepared for each number k of accepted tokens: one number, or K + 1 numbers for k = 0..K "
        f"separated by commas, or {AUTO}: those that hit most often, as many as there is time for, as measured; "
        "0 prepares nothing and only answers just in time",
    )
    fan_out_after_miss: int | tuple[int, ...] | str | None = _option(
        None, "the same for the round after a miss; default: as fan_out"
    )
    branch_budget: int | None = _option(
        None,
        f"outcomes prepared per sequence at most if a fan-out is {AUTO}, 0 to {MAX_OUTCOMES}; default: "
        f"{AVERAGE_FAN_OUT} (K + 1)",
    )
    backup: str = _option(
        AUTO,
        "what answers a miss: primary (the draft model, just in time), suffix (what followed the last tokens before), "
        f"empty (nothing), or {AUTO}: the fastest for the batch size, as measured",
    )
    num_kept: int = _option(
        32,
        "m: most likely tokens of the draft that are sampled from and sent with their probabilities, at temperatures "
        f"above 0; 0 to {MAX_KEPT}, 0: drafts are always greedy",
    )
    downweight: float | str = _option(
        1.0,
        "Saguaro's C: factor on the draft's probability of the tokens that are prepared, 0 to 1; lower ones hit more "
        f"often and are accepted less often; 1: none, {AUTO}: by experiment",
    )
    draft_temperature: float = _option(
        1.0, f"factor on the request's temperature for sampled drafts, {_LEAST_TEMPERATURE} to {_MOST_TEMPERATURE:g}"
    )
    adapt_depth: bool = _option(True, "draft fewer than K tokens where the measured times say that more are too slow")
    rest: bool = _option(
        True, "do without tables, or without drafts, where that turns out to be faster; now and then all is tried"
    )
    max_sequences: int = _option(32, "sequences served at once; others get no speculation until there is room")
    context_length: int | None = _option(None, "longest sequence speculated for, in tokens; default: the model's own")
    max_total_tokens: int | None = _option(None, "KV cells in all; default: enough for max_sequences of 4096 tokens")
    prefill_chunk: int = _option(256, "prompt tokens computed at a time; waiting sequences are served in between")
    spin_us: int = _option(200, "microseconds of polling before the service sleeps when it has nothing to do")
    lean: bool = _option(
        True, "on a CPU, compute draft models of Llama's kind by a short forward; --no-lean: all through SGLang's model"
    )
    threads: int | None = _option(None, "CPU threads of the draft model; default: OMP_NUM_THREADS, else 1")
    http_host: str = _option("127.0.0.1", "address of /health, /info and /metrics")
    http_port: int = _option(5758, f"port of these; 0: any free one, {NO_HTTP}: none")
    expiry_s: float = _option(30.0, "a verifier that is silent for so many seconds is forgotten")
    trace: str | None = _option(None, "file that receives a trace of all rounds, for ui.perfetto.dev")
    log_level: str = _option("info", f"one of {', '.join(_LOG_LEVELS)}; logs go to stderr")
    exit_with_stdin: bool = _option(False, "end when stdin does: for a parent that must not outlive its service")
    check: bool = _option(False, "check the settings, without loading the model, and end")
    announce: bool = _option(False, "when ready, print one line on stdout: ready ENDPOINT HTTP_ADDRESS (or -)")
    trust_remote_code: bool = _option(False, "allow the draft model to bring code of its own")

    def __post_init__(self) -> None:
        _check_range("lookahead", self.lookahead, 1, MAX_LOOKAHEAD)
        _check_range("max_sequences", self.max_sequences, 1, 65536)
        _check_range("prefill_chunk", self.prefill_chunk, 1, 65536)
        _check_range("spin_us", self.spin_us, 0, 1_000_000)
        _check_range("http_port", self.http_port, NO_HTTP, 65535)
        _check_range("expiry_s", self.expiry_s, 1, 86400)
        if self.threads is not None:
            _check_range("threads", self.threads, 1, 1024)
        if self.log_level.lower() not in _LOG_LEVELS:
            raise ConfigError(f"log_level must be one of {', '.join(_LOG_LEVELS)}, got {self.log_level!r}.")
        for name, endpoint in (("endpoint", self.endpoint), ("data_endpoint", self.data_endpoint)):
            if endpoint is not None and not endpoint.startswith(("tcp://", "ipc://")):
                raise ConfigError(f"{name} must be tcp://HOST:PORT or ipc://PATH, got {endpoint!r}.")
        _check_range("num_kept", self.num_kept, 0, MAX_KEPT)
        _check_range("draft_temperature", self.draft_temperature, _LEAST_TEMPERATURE, _MOST_TEMPERATURE)
        self.planner_settings().num_outcomes(self.lookahead)

    def planner_settings(self) -> PlannerSettings:
        """What of this is about planning."""
        return PlannerSettings(
            fan_out=self.fan_out,
            fan_out_after_miss=self.fan_out_after_miss,
            branch_budget=self.branch_budget,
            backup=self.backup,
            downweight=self.downweight,
            adapt_depth=self.adapt_depth,
            rest=self.rest,
        )

    def draft_config(self) -> DraftConfig:
        """What the draft engine is to be. Serves fewer sequences than asked for if its steps would get too large.

        Raises:
            ConfigError: see `DraftConfig.resolved`.
        """
        num_branches = self.planner_settings().num_outcomes(self.lookahead)
        max_slots = min(self.max_sequences, MAX_ROWS // (1 + num_branches))
        if max_slots < self.max_sequences:
            logger.warning(
                "serving %d sequences at once: more do not fit into one step; lower fan_out or branch_budget", max_slots
            )
        return DraftConfig(
            self.model_path,
            max_slots,
            num_branches,
            self.lookahead,
            device=self.device,
            dtype=self.dtype,
            context_length=self.context_length,
            max_total_tokens=self.max_total_tokens,
            attention_backend=self.attention_backend,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            num_threads=self.threads,
            token_map=self.token_map,
            lean=self.lean,
        ).resolved()

    def data_address(self) -> str:
        """Where the data channels without shared memory listen."""
        if self.data_endpoint is not None:
            return self.data_endpoint
        if self.endpoint.startswith("tcp://"):
            return self.endpoint.rpartition(":")[0] + ":0"
        return f"ipc://@sglang-ssd-data-{os.getpid()}-{os.urandom(4).hex()}"


def from_mapping(values: Mapping[str, Any]) -> SpeculatorConfig:
    """The configuration that has these values (keys: field names, with - or _).

    Raises:
        ConfigError: an unknown key, a value of the wrong type, no model_path, or see `SpeculatorConfig`.
    """
    known = {item.name: str(item.type) for item in fields(SpeculatorConfig)}
    given: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"there is no setting {key!r}; the settings are {', '.join(known)}.")
        given[name] = _converted(name, known[name], value)
    if "model_path" not in given:
        raise ConfigError("model_path is missing: give --model-path DRAFT_MODEL.")
    return SpeculatorConfig(**given)


def read_file(path: str) -> dict[str, Any]:
    """Settings of a TOML or JSON (``*.json``) file.

    Raises:
        ConfigError: the file cannot be read or does not hold a table.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration file {path!r} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the configuration file {path!r} must hold a table of settings.")
    return values


def parse_fan_out(name: str, text: str) -> FanOutOption:
    """``3`` or ``5,3,2,2,6`` or ``auto``.  Raises `ConfigError` on anything else."""
    if text == AUTO:
        return text
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} must be {AUTO}, a number, or numbers separated by commas, got {text!r}.") from None
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def parse_downweight(name: str, text: str) -> float | str:
    """A number or ``auto``.  Raises `ConfigError` on anything else."""
    try:
        return text if text == AUTO else float(text)
    except ValueError:
        raise ConfigError(f"{name} must be {AUTO} or a number from 0 to 1, got {text!r}.") from None


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "fan_out": parse_fan_out,
    "fan_out_after_miss": parse_fan_out,
    "downweight": parse_downweight,
}
"""Of options that are more than a string where a string is given."""


def _converted(name: str, kind: str, value: Any) -> Any:
    if isinstance(value, str) and name in _PARSERS:
        return _PARSERS[name](name, value)
    if "tuple[int, ...]" in kind and isinstance(value, list | tuple) and all(type(item) is int for item in value):
        return tuple(value)
    allowed = {word.strip() for word in kind.replace("tuple[int, ...]", "").split("|")}
    if value is None and "None" in allowed:
        return None
    if type(value) is int and "float" in allowed:
        return float(value)
    if type(value).__name__ not in allowed:
        raise ConfigError(f"{name} must be of type {kind}, got {value!r}.")
    return value


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} must be {least} to {most}, got {value}.")
