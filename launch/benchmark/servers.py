"""The servers of all modes: resident for the whole run, stopped (SIGSTOP) but for the one that is measured."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from children import free_port, running

from benchmark.client import HOST
from benchmark.modes import Mode, attention_flags, speculation_flags
from benchmark.processes import SCHEDULER, Process, available_memory_bytes, pin, send
from benchmark.settings import Settings
from ssd_proto.errors import ConfigError

_READY_WITHIN_S = 600.0
_LEAST_MEMORY = 2_500_000_000
"""Bytes that a server of the smallest models needs."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that can be measured. Stopped, except in `awake`."""

    mode: Mode
    port: int
    metrics_port: int
    """Of the embedded service's pages; not in use where there is none."""
    leader: int
    """Process id; all its processes are in one session."""

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let the server run for the length of the `with` block."""
        send(self.leader, signal.SIGCONT)
        try:
            yield
        finally:
            send(self.leader, signal.SIGSTOP)


@contextlib.contextmanager
def servers(settings: Settings, logs: Path) -> Iterator[list[Server]]:
    """All modes' servers, started one by one; they end with the `with` block.

    Raises:
        ConfigError: there is not enough memory for the next one.
        ChildFailed: a server does not start.
    """
    with contextlib.ExitStack() as stack:
        started: list[Server] = []
        needed = _LEAST_MEMORY
        for mode in settings.modes:
            before = available_memory_bytes()
            _check_memory(mode, before, needed, len(started))
            started.append(stack.enter_context(_running(mode, settings, logs)))
            needed = max(needed, before - available_memory_bytes())
        yield started


@contextlib.contextmanager
def _running(mode: Mode, settings: Settings, logs: Path) -> Iterator[Server]:
    port, metrics_port = free_port(), free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": str(mode.num_threads), "TOKENIZERS_PARALLELISM": "false"}
    health = f"http://{HOST}:{port}/health"
    with running(
        mode.name,
        _command(mode, settings, port, metrics_port),
        log=logs / f"{mode.name}.log",
        health=health,
        ready_within_s=_READY_WITHIN_S,
        environment=environment,
    ) as child:
        if settings.device == "cpu":
            pin(child.pid, lambda process: cores_of(process, mode, settings.cores))
        send(child.pid, signal.SIGSTOP)
        try:
            yield Server(mode, port, metrics_port, child.pid)
        finally:
            send(child.pid, signal.SIGCONT)  # a stopped process does not end


def cores_of(process: Process, mode: Mode, cores: tuple[int, ...]) -> tuple[int, ...]:
    """The target's scheduler has the first core, or as many as threads; everything else has the others."""
    return cores[: mode.num_threads] if process.role == SCHEDULER else other_cores(mode.num_threads, cores)


def other_cores(num_threads: int, cores: tuple[int, ...]) -> tuple[int, ...]:
    """The cores that a target with so many threads leaves; all if it leaves none."""
    return cores[num_threads:] or cores


def _command(mode: Mode, settings: Settings, port: int, metrics_port: int) -> list[str]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", settings.model_path]
    command += ["--host", HOST, "--port", str(port), "--device", settings.device, "--dtype", settings.dtype]
    command += ["--max-total-tokens", str(settings.max_total_tokens)]
    command += ["--max-running-requests", str(settings.max_batch_size)]
    command += attention_flags(mode, settings.attention_backend)
    return [*command, *speculation_flags(mode, settings.draft_model_path, settings.service, metrics_port)]


def _check_memory(mode: Mode, available: int, needed: int, num_started: int) -> None:
    if available < needed:
        raise ConfigError(
            f"The server of {mode.name!r} needs about {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are free "
            f"beside the {num_started} before it: name fewer --modes."
        )
