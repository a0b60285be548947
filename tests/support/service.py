"""A speculator service as seen from outside: its HTTP pages, and what it must have given back."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.processes import Server, free_port, processes, wait_until
from tests.support.sglang_server import DRAFT, ENVIRONMENT, LOOKAHEAD, read_metrics, total

_START_WITHIN_S = 120.0
_EMPTY_WITHIN_S = 10.0
_SHARED_MEMORY = Path("/dev/shm")

_PREFIX = "sglang_ssd_speculator_"
_USED = ("sequences", "sequences_waiting", "engine_slots_used")
"""Metrics that are 0 when nothing is open."""


class ServiceView:
    """The HTTP side of a service that runs and that no sequence has been opened at yet."""

    def __init__(self, http_port: int) -> None:
        self.url = f"http://127.0.0.1:{http_port}"
        self._free_cells: float | None = None

    def note_capacity(self) -> None:
        """Remember how many KV cells are free: so many must be free again whenever nothing is open."""
        self.assert_empty()  # a server's own first request may just have ended
        self._free_cells = self.metric("kv_free_tokens")

    def info(self) -> dict[str, Any]:
        """What the service says of itself."""
        with urllib.request.urlopen(f"{self.url}/info", timeout=10) as response:
            return json.load(response)

    def metric(self, name: str, *labels: str) -> float:
        """A metric of the service, without its prefix; the sum over the samples that have ``labels``."""
        metrics = read_metrics(self.url)
        assert any(sample.split("{")[0] == _PREFIX + name for sample in metrics), f"no metric {name}"
        return total(metrics, _PREFIX + name, *labels)

    def outcomes(self, *kinds: str) -> float:
        """Outcomes so far, of these kinds (``hit``, ``short_hit``, ...) or of all."""
        if not kinds:
            return self.metric("outcomes_total")
        return sum(self.metric("outcomes_total", f'kind="{kind}"') for kind in kinds)

    def assert_empty(self) -> None:
        """No open sequence and no used row or KV cell, within a short time."""

        def used() -> dict[str, float]:
            held = {name: self.metric(name) for name in _USED}
            if self._free_cells is not None:
                held["KV cells"] = self._free_cells - self.metric("kv_free_tokens")
            return {name: count for name, count in held.items() if count}

        wait_until(lambda: not used(), _EMPTY_WITHIN_S, lambda: f"the service still holds {used()}")


class Service(ServiceView):
    """A speculator service that the test starts itself."""

    def __init__(self, endpoint: str, logs: Path, flags: Sequence[str] = ()) -> None:
        http_port = free_port()
        super().__init__(http_port)
        self.endpoint = endpoint
        command = [sys.executable, "-m", "speculator_service", "--model-path", str(DRAFT), "--endpoint", endpoint]
        command += ["--lookahead", str(LOOKAHEAD), "--device", "cpu", "--dtype", "float32"]
        command += ["--http-port", str(http_port), *flags]
        self.process = Server("speculator", command, logs / f"speculator-{http_port}.log", ENVIRONMENT)
        self.process.wait_healthy(f"{self.url}/health", _START_WITHIN_S)
        self.note_capacity()


def shared_memory() -> list[str]:
    """Names of our shared memory in the system."""
    return sorted(path.name for path in _SHARED_MEMORY.glob("sglang_ssd_*"))


def assert_no_shared_memory(but: Sequence[str] = ()) -> None:
    """Nothing of ours is left in ``/dev/shm``, within a short time (it has a name while a verifier attaches).

    ``but``: what was there before and may be somebody else's.
    """

    def left() -> list[str]:
        return [name for name in shared_memory() if name not in but and not _is_foreign(name)]

    wait_until(lambda: not left(), _EMPTY_WITHIN_S, lambda: f"left in {_SHARED_MEMORY}: {left()}")


def _is_foreign(name: str) -> bool:
    """Whether a process made it that lives and is none of this test run's (its servers lead sessions of their own)."""
    try:
        leader = processes()[os.getsid(int(name.split("_")[2]))]
    except (ProcessLookupError, KeyError):
        return False
    return leader.parent != os.getpid()
