"""What can be compared: ways of decoding, each a server of its own, with the flags in which they differ."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ssd_proto.errors import ConfigError

MAX_STEPS = 16

SSD_OPTIONS: dict[str, dict[str, Any]] = {
    "ssd": {},
    "ssd-no-table": {"service": {"fan_out": 0}},
    "ssd-fan-out-3": {"service": {"fan_out": 3}},
    "ssd-float32": {"service": {"dtype": "float32"}},
    "ssd-primary": {"service": {"backup": "primary"}},
    "ssd-suffix": {"service": {"backup": "suffix"}},
    "ssd-empty": {"service": {"backup": "empty"}},
    "ssd-shared-noise": {"verification": "shared_noise"},
    "ssd-no-lean": {"service": {"lean": False}},
    "ssd-no-service": {"endpoint": "ipc://@sglang-ssd-nobody-is-here", "connect_timeout_s": 0},
}
"""Modes of SSD, and the options of the verifier and its service in which they differ from the plain one."""

SPECULATIVE = ("standalone", "ngram", *SSD_OPTIONS)
PLAIN = ("ar", "ar-N-threads", "ar-torch-native")
NAMES = ", ".join((*PLAIN, *(f"{kind}[@K]" for kind in SPECULATIVE)))
"""What may be written, for messages."""

_THREADS = re.compile(r"ar-([1-9][0-9]*)-threads")
_DEADLINE_MS = 1000
"""Speeds are to be compared, not patience."""


class Mode(NamedTuple):
    """A way of decoding."""

    name: str
    """As written: ``ar``, ``ssd@6``."""
    kind: str
    """Without K."""
    lookahead: int
    """K; 0 without speculation."""
    num_threads: int
    """Of the target on a CPU, each on a core of its own."""

    @property
    def is_ssd(self) -> bool:
        """Whether the server runs the plugin."""
        return self.kind in SSD_OPTIONS

    @property
    def has_service(self) -> bool:
        """Whether there is a speculator service, too."""
        return self.is_ssd and "endpoint" not in SSD_OPTIONS[self.kind]

    @property
    def num_devices(self) -> int:
        """Devices it computes on; on a CPU a core is a device."""
        return self.num_threads + int(self.has_service)


def parse_mode(text: str, num_steps: int) -> Mode:
    """The mode that is called ``text``; ``num_steps`` is K where it names none.

    Raises:
        ConfigError: there is no such mode, or no such K.

    >>> parse_mode("ssd@6", 4)
    Mode(name='ssd@6', kind='ssd', lookahead=6, num_threads=1)
    >>> parse_mode("ar-2-threads", 4)
    Mode(name='ar-2-threads', kind='ar-2-threads', lookahead=0, num_threads=2)
    """
    kind, at, steps = text.partition("@")
    if kind in SPECULATIVE:
        if at and not steps.isdecimal():
            raise ConfigError(f"The mode {text!r} needs a number after the @: {kind}@4, for example.")
        lookahead = int(steps) if at else num_steps
        if not 1 <= lookahead <= MAX_STEPS:
            raise ConfigError(f"The mode {text!r} speculates {lookahead} tokens: choose K from 1 to {MAX_STEPS}.")
        return Mode(text, kind, lookahead, 1)
    threads = _THREADS.fullmatch(kind)
    if kind not in ("ar", "ar-torch-native") and threads is None:
        raise ConfigError(f"There is no mode {text!r}: choose from {NAMES}.")
    if at:
        raise ConfigError(f"The mode {kind!r} does not speculate: write it without @{steps}.")
    return Mode(text, kind, 0, int(threads[1]) if threads else 1)


def parse_modes(names: Sequence[str], num_steps: int, num_cores: int, device: str) -> tuple[Mode, ...]:
    """All modes of a run, in the order in which they are written.

    Raises:
        ConfigError: a mode is wrong, is named twice, or needs what this machine lacks.
    """
    modes = tuple(parse_mode(name, num_steps) for name in names)
    for number, mode in enumerate(modes):
        if mode.name in names[:number]:
            raise ConfigError(f"The mode {mode.name!r} is named twice: each is one server.")
        if mode.num_threads > num_cores:
            raise ConfigError(f"The mode {mode.name!r} needs {mode.num_threads} cores, and there are {num_cores} here.")
        if device != "cpu" and mode.kind in ("ar-torch-native", f"ar-{mode.num_threads}-threads"):
            raise ConfigError(f"The mode {mode.name!r} is for --device cpu.")
    return modes


def default_modes(num_cores: int, device: str) -> list[str]:
    """Plain decoding with one core and with two, STANDALONE with two K's, SSD with and without its table."""
    threads = ["ar-2-threads"] if num_cores > 1 and device == "cpu" else []
    return ["ar", *threads, "standalone@2", "standalone", "ssd", "ssd-no-table"]


def parse_fan_out(text: str) -> int | list[int] | str:
    """``3``, ``5,3,2,2,6`` or ``auto``.

    Raises:
        ConfigError: it is none of these.
    """
    if text == "auto":
        return text
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--fan-out is {text!r}: give a number, K + 1 numbers separated by commas, or auto.")
    numbers = [int(word) for word in words]
    return numbers[0] if len(numbers) == 1 else numbers


def speculation_flags(mode: Mode, draft: str, service: Mapping[str, Any], http_port: int) -> list[str]:
    """Flags of the server for the mode.

    Args:
        draft: model path.
        service: options of an embedded service, where the mode has none of the same name.
        http_port: where it shows its metrics.
    """
    steps = ["--speculative-num-steps", str(mode.lookahead)]
    width = ["--speculative-num-draft-tokens", str(mode.lookahead + 1)]
    if mode.kind == "standalone":
        flags = ["--speculative-algorithm", "STANDALONE", "--speculative-eagle-topk", "1"]
        return [*flags, *steps, *width, "--speculative-draft-model-path", draft]
    if mode.kind == "ngram":
        return ["--speculative-algorithm", "NGRAM", *width]
    if mode.is_ssd:
        options = {"deadline_ms": _DEADLINE_MS, **SSD_OPTIONS[mode.kind]}
        embedded = []
        if mode.has_service:
            options["service"] = {**service, "http_port": http_port, **options.get("service", {})}
            embedded = ["--speculative-draft-model-path", draft]
        flags = ["--speculative-algorithm", "SSD", "--speculative-ssd-config", json.dumps(options)]
        return [*flags, *steps, *embedded]
    return []


def attention_flags(mode: Mode, backend: str | None) -> list[str]:
    """Attention backend of the target: ``backend``, or what SGLang and the plugin take by default."""
    if mode.kind == "ar-torch-native":
        backend = "torch_native"
    return ["--attention-backend", backend] if backend is not None else []
