"""Runs: all prompts once through one mode, or streamed, while the other servers are stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmark.client import Completion, Stream, complete_all, flush, stream_all
from benchmark.processes import Placement, memory_bytes, placements, usage
from benchmark.servers import Server
from benchmark.service_counts import ServiceCounts, counts_between, read_samples
from benchmark.settings import Cell, Settings

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Run:
    """One mode on all prompts."""

    seconds: float
    """From the first request to the last answer."""
    answers: tuple[Completion, ...]
    cpu_seconds: float
    """Of all processes of the server."""
    memory_bytes: int
    """Of all processes of the server, after the run."""
    service: ServiceCounts | None
    """None where there is no speculator."""

    @property
    def num_tokens(self) -> int:
        """Of all answers, counted by the server."""
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def num_decoded(self) -> int:
        """Tokens that were not the prefill's."""
        return self.num_tokens - len(self.answers)

    @property
    def num_rounds(self) -> int:
        """Of all sequences; steps without speculation."""
        return sum(answer.num_rounds for answer in self.answers)

    @property
    def speed(self) -> float:
        """Tokens per second, end to end."""
        return self.num_tokens / self.seconds


@dataclass(slots=True)
class Measurements:
    """Of one mode."""

    runs: dict[Cell, list[Run]] = field(default_factory=dict)
    streams: dict[Cell, list[Stream]] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)
    """Of its last run at the largest batch size so far."""


def measure_all(
    servers: Sequence[Server], prompts: Sequence[str], settings: Settings, advance: Callable[[Cell, str], None]
) -> list[Measurements]:
    """All runs of all modes: within a repetition one after the other, in turning order.

    Args:
        prompts: enough for the largest batch.
        advance: called before each run with what is going to be measured.

    Returns:
        Of each server, in their order.
    """
    found = {server.mode.name: Measurements() for server in servers}
    for cell in settings.cells:
        chosen = prompts[: max(settings.num_prompts, cell.batch_size)]
        for repeat in range(settings.repeats):
            for server in servers if repeat % 2 == 0 else reversed(servers):
                advance(cell, server.mode.name)
                _measure(server, cell, chosen, settings, found[server.mode.name])
        for _ in range(settings.latency_repeats):
            for server in servers:
                advance(cell, server.mode.name)
                streams = _measure_latency(server, cell, chosen, settings)
                found[server.mode.name].streams.setdefault(cell, []).extend(streams)
    return [found[server.mode.name] for server in servers]


def _measure(server: Server, cell: Cell, prompts: Sequence[str], settings: Settings, into: Measurements) -> None:
    with server.awake():
        _warm_up(server, prompts[0], cell)
        counted = read_samples(server.metrics_port) if server.mode.has_service else {}
        used, began = usage(server.leader), time.perf_counter()
        answers, seconds = complete_all(
            server.port, prompts, cell.batch_size, settings.max_new_tokens, cell.temperature
        )
        after, elapsed = usage(server.leader), time.perf_counter() - began
        service = counts_between(counted, read_samples(server.metrics_port)) if server.mode.has_service else None
    into.placements = placements(server.leader, used, after, elapsed)
    memory = memory_bytes(server.leader)
    run = Run(seconds, tuple(answers), after.seconds_since(used), memory, service)
    into.runs.setdefault(cell, []).append(run)


def _measure_latency(server: Server, cell: Cell, prompts: Sequence[str], settings: Settings) -> list[Stream]:
    with server.awake():
        _warm_up(server, prompts[0], cell)
        return stream_all(server.port, prompts, cell.batch_size, settings.max_new_tokens, cell.temperature)


def _warm_up(server: Server, prompt: str, cell: Cell) -> None:
    complete_all(server.port, [prompt], 1, _WARM_UP_TOKENS, cell.temperature)
    flush(server.port)


def leave_first_core(settings: Settings) -> None:
    """Keep this process, which is the client, off the cores of a target with one thread."""
    if settings.device == "cpu":
        os.sched_setaffinity(0, settings.cores[1:] or settings.cores)
