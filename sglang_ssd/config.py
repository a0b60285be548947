"""Options of the verifier side, from flags, environment or a file, checked once at start."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ssd_proto.channel import MAX_KEPT
from ssd_proto.channels import CHANNEL_KINDS
from ssd_proto.errors import ConfigError

ENDPOINT_VARIABLE = "SGLANG_SSD_ENDPOINT"
CONFIG_VARIABLE = "SGLANG_SSD_CONFIG"

SERVICE_OPTIONS = frozenset(
    {
        "adapt_depth",
        "attention_backend",
        "backup",
        "branch_budget",
        "context_length",
        "device",
        "downweight",
        "draft_temperature",
        "dtype",
        "expiry_s",
        "fan_out",
        "fan_out_after_miss",
        "http_host",
        "http_port",
        "lean",
        "log_level",
        "max_sequences",
        "max_total_tokens",
        "num_kept",
        "prefill_chunk",
        "rest",
        "spin_us",
        "threads",
        "token_map",
        "trust_remote_code",
    }
)
"""Flags of the speculator service that may be set for the embedded one (``service`` in the config)."""

VERIFICATIONS = ("ratio", "shared_noise")

_IN_JSON = {
    tuple: "a list",
    dict: "an object",
    str: "a string",
    int: "a whole number",
    bool: "true or false",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """How the verifier uses its speculator. Errors are `ConfigError`."""

    endpoint: str | None = None
    """Control endpoint of a running service; None starts an embedded one."""
    deadline_ms: float = 100.0
    """Longest wait for a missing speculation in one round; then the row does a plain decode step."""
    connect_timeout_s: float = 5.0
    """How long the server's start waits for a service at ``endpoint`` before it goes on without."""
    channels: tuple[str, ...] = CHANNEL_KINDS
    """Acceptable data channels, best first."""
    verification: str = "ratio"
    """What decides about drafts of sampled requests: ``ratio`` of target and draft probabilities, or ``shared_noise``
    (target and draft draw with the same noise; a draft is accepted if both drew the same token)."""
    num_kept: int = 32
    """m: probabilities that the speculator sends with every sampled token; must be the service's."""
    trace: str | None = None
    """File that receives a trace of all rounds (`ssd_proto.trace`), by the embedded service, too."""
    overlap_on_cpu: bool = False
    """Keep SGLang's overlap scheduling on a CPU (SGLang turns it off there for all speculation)."""
    service: Mapping[str, Any] = field(default_factory=dict)
    """Options of the embedded service, named like its flags (``fan_out``, ``device``, ...)."""

    def __post_init__(self) -> None:
        _check_range("deadline_ms", self.deadline_ms, 0, 60_000)
        _check_range("connect_timeout_s", self.connect_timeout_s, 0, 600)
        _check_type("endpoint", self.endpoint, str, type(None))
        _check_type("trace", self.trace, str, type(None))
        _check_type("channels", self.channels, tuple)
        _check_type("overlap_on_cpu", self.overlap_on_cpu, bool)
        if self.verification not in VERIFICATIONS:
            raise ConfigError(f"SSD config: verification must be one of {VERIFICATIONS}, got {self.verification!r}")
        _check_type("num_kept", self.num_kept, int)
        _check_range("num_kept", self.num_kept, 0, MAX_KEPT)
        _check_type("service", self.service, dict)
        if self.endpoint is not None and not self.endpoint.startswith(("tcp://", "ipc://")):
            raise ConfigError(
                f"--speculative-ssd-endpoint {self.endpoint!r} must begin with tcp:// or ipc://, "
                "for example tcp://127.0.0.1:5757"
            )
        if not self.channels or any(kind not in CHANNEL_KINDS for kind in self.channels):
            raise ConfigError(f"SSD config: channels must be chosen from {list(CHANNEL_KINDS)}, got {self.channels}")
        unknown = sorted(set(self.service) - SERVICE_OPTIONS)
        if unknown:
            raise ConfigError(f"SSD config: unknown service options {unknown}; known are {sorted(SERVICE_OPTIONS)}")
        if self.service.get("num_kept", self.num_kept) != self.num_kept:
            raise ConfigError("SSD config: give num_kept beside 'service', not in it: server and service need the same")
        if self.endpoint is not None and self.service:
            raise ConfigError(
                "SSD config: 'service' describes the embedded speculator; leave it out when an endpoint is given"
            )

    def embedded_at(self, endpoint: str) -> VerifierConfig:
        """The same options, with the embedded service that was started at ``endpoint``."""
        return replace(self, endpoint=endpoint, service={})

    @staticmethod
    def load(endpoint: str | None, config: str | None) -> VerifierConfig:
        """Build the configuration; None falls back to the environment (for `sglang.Engine`).

        Args:
            endpoint: Value of ``--speculative-ssd-endpoint``.
            config: Value of ``--speculative-ssd-config``: a path of a JSON or TOML file, or JSON itself.
        """
        endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE) or None
        options = _read_options(config or os.environ.get(CONFIG_VARIABLE) or "{}")
        known = {f.name for f in fields(VerifierConfig)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"SSD config: unknown options {unknown}; known are {sorted(known)}")
        if endpoint is not None:
            options["endpoint"] = endpoint
        if isinstance(options.get("channels"), list):
            options["channels"] = tuple(options["channels"])
        return VerifierConfig(**options)


def _read_options(source: str) -> dict[str, Any]:
    parse: Callable[[str], Any] = json.loads
    path, text = Path(source), None
    if source.lstrip().startswith("{"):
        text = source
    else:
        if not path.is_file():
            raise ConfigError(f"--speculative-ssd-config: there is no file {source!r}")
        if path.suffix == ".toml":
            parse = tomllib.loads
    try:
        options = parse(text if text is not None else path.read_text())
    except (ValueError, OSError) as error:
        raise ConfigError(f"--speculative-ssd-config {source!r} cannot be read: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError("--speculative-ssd-config must hold an object of options")
    return options


def _check_range(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"SSD config: {name} must be between {low} and {high}, got {value!r}")


def _check_type(name: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        allowed = " or ".join(_IN_JSON[kind] for kind in kinds)
        raise ConfigError(f"SSD config: {name} must be {allowed}, got {value!r}")
