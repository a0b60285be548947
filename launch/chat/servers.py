"""The servers of a chat: one that speculates and, to compare with, one that does not.

On a CPU the target's scheduler has cores of its own, everything else has the others, and each server is stopped
(SIGSTOP) while the other one answers, since an idle SGLang scheduler polls.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from benchmark.client import HOST
from benchmark.processes import SCHEDULER, available_memory_bytes, memory_bytes, pin, send
from children import free_port, running

from chat.settings import Settings
from ssd_proto.errors import ConfigError

_DEADLINE_MS = 1000
"""A laptop may be busy with other things."""
_MAX_RUNNING = 8
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Server(NamedTuple):
    """A running server."""

    port: int
    metrics_port: int | None
    """Of the embedded speculator service's pages; None without speculation."""
    leader: int
    """Process id; all its processes are in one session."""


class Servers(NamedTuple):
    """Those of one chat."""

    ssd: Server
    plain: Server | None
    """Without speculation; None if nothing is compared."""
    take_turns: bool
    """Whether one is stopped while the other answers."""

    @property
    def all(self) -> list[Server]:
        """One or two."""
        return [self.ssd] if self.plain is None else [self.ssd, self.plain]

    @contextlib.contextmanager
    def alone(self, server: Server) -> Iterator[None]:
        """Stop the other server for the length of the `with` block."""
        with contextlib.ExitStack() as stack:
            for other in self.all:
                if self.take_turns and other is not server:
                    stack.enter_context(_stopped(other))
            yield


@contextlib.contextmanager
def servers(settings: Settings, logs: Path) -> Iterator[Servers]:
    """Start the servers one by one; they end with the `with` block. This process leaves the target's cores.

    Raises:
        ConfigError: there is not enough memory for the second one.
        ChildFailed: one does not start.
    """
    with contextlib.ExitStack() as stack:
        ssd = stack.enter_context(_running("SGLang with --speculative-algorithm SSD", settings, logs / "ssd.log", True))
        plain = None
        if settings.is_compared:
            _check_memory(ssd)
            with _stopped(ssd) if settings.is_on_cpu else contextlib.nullcontext():
                one = _running("SGLang without speculation", settings, logs / "plain.log", False)
                plain = stack.enter_context(one)
        if settings.is_on_cpu:
            os.sched_setaffinity(0, settings.other_cores)
        yield Servers(ssd, plain, take_turns=settings.is_on_cpu)


@contextlib.contextmanager
def _running(name: str, settings: Settings, log: Path, has_service: bool) -> Iterator[Server]:
    port, metrics_port = free_port(), free_port() if has_service else None
    with running(
        name,
        _command(settings, port, metrics_port),
        log=log,
        health=f"http://{HOST}:{port}/health",
        ready_within_s=settings.start_timeout_s,
        environment=_environment(settings),
    ) as child:
        if settings.is_on_cpu:
            of_target, of_others = settings.target_cores, settings.other_cores
            pin(child.pid, lambda process: of_target if process.role == SCHEDULER else of_others)
        try:
            yield Server(port, metrics_port, child.pid)
        finally:
            _send(child.pid, signal.SIGCONT)  # a stopped process does not end; as a rule it runs already


def _command(settings: Settings, port: int, metrics_port: int | None) -> list[str]:
    """Command line of a server; with a port for its metrics it has an embedded service."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", settings.target]
    command += ["--host", HOST, "--port", str(port), "--device", settings.device, "--dtype", settings.dtype]
    command += ["--max-total-tokens", str(settings.max_total_tokens), "--max-running-requests", str(_MAX_RUNNING)]
    if metrics_port is None:
        return command
    command += ["--speculative-algorithm", "SSD", "--speculative-num-steps", str(settings.num_steps)]
    command += ["--speculative-draft-model-path", settings.draft]
    if settings.token_map is not None:
        command += ["--speculative-token-map", settings.token_map]
    options = {"deadline_ms": _DEADLINE_MS, "service": _service_options(settings, metrics_port)}
    return [*command, "--speculative-ssd-config", json.dumps(options)]


def _service_options(settings: Settings, metrics_port: int) -> dict[str, Any]:
    options = {"http_port": metrics_port, "max_total_tokens": settings.max_total_tokens}
    if settings.draft_device != "cpu":
        return {**options, "device": settings.draft_device}
    return {**options, "device": "cpu", "threads": min(settings.num_threads, len(settings.other_cores))}


def _environment(settings: Settings) -> dict[str, str]:
    environment = dict(os.environ, TOKENIZERS_PARALLELISM="false")
    if settings.is_on_cpu or not settings.is_own_pair:
        environment.setdefault("OMP_NUM_THREADS", str(settings.num_threads))
    return environment


def _check_memory(first: Server) -> None:
    """A second server needs about as much as the first one, which has a draft model, too."""
    needed, available = memory_bytes(first.leader), available_memory_bytes()
    if available < needed:
        raise ConfigError(
            f"The server without speculation needs up to {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are free: "
            "leave --compare out, or lower --max-total-tokens."
        )


@contextlib.contextmanager
def _stopped(server: Server) -> Iterator[None]:
    try:
        _send(server.leader, signal.SIGSTOP)
        yield
    finally:
        _send(server.leader, signal.SIGCONT)


def _send(leader: int, number: signal.Signals) -> None:
    with _undisturbed():
        send(leader, number)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Interrupts wait for the end of the `with` block: a server must not stay stopped halfway."""
    caught: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, keep) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in caught:
        signal.raise_signal(late)
