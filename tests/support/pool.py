"""The servers that tests share: one without speculation, and one with SSD in one configuration at a time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.answers import Answer, Payload
from tests.support.processes import ServerFailed, free_port
from tests.support.service import ServiceView
from tests.support.sglang_server import SGLangServer, ssd_flags

DEADLINE_MS = 5000
"""Long, so that how many tokens are accepted does not depend on the load of the machine."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """How a server with SSD is started."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ``--speculative-ssd-config``."""
    service: Mapping[str, Any] = field(default_factory=dict)
    """Of the embedded service."""
    environment: Mapping[str, str] = field(default_factory=dict)
    traced: bool = False
    """Whether it writes a trace of its rounds, see `SSDServer.trace`."""


_OVERLAP = {"overlap_on_cpu": True}
_RETRACT = {"SGLANG_TEST_RETRACT": "1"}
_FIXED = {"backup": "primary", "adapt_depth": False, "rest": False}
_PLANNED = {"fan_out": "auto", "downweight": "auto"}

CONFIGURATIONS = {
    "sync": Configuration(service=_FIXED),
    "overlap": Configuration(_OVERLAP, _FIXED),
    "sync-retract": Configuration(service=_PLANNED, environment=_RETRACT, traced=True),
    "overlap-retract": Configuration(_OVERLAP, _PLANNED, _RETRACT, traced=True),
}
"""In the order in which the tests use them: with a fixed plan, so that what is accepted does not depend on times, and
with everything left to measurements."""


class SSDServer(SGLangServer):
    """A server with an embedded speculator service that can be looked into."""

    def __init__(self, name: str, logs: Path, flags: Sequence[str] = ()) -> None:
        configuration = CONFIGURATIONS[name]
        http_port = free_port()
        # Rounded products differ a little with the size of the batch, and so would the rounds that tests compare.
        service = {"http_port": http_port, "dtype": "float32", **configuration.service}
        options = {"deadline_ms": DEADLINE_MS, "service": service, **configuration.options}
        if configuration.traced:
            self.trace = options["trace"] = str(logs / f"rounds-{name}.json")
        super().__init__(f"ssd-{name}", [*ssd_flags(options), *flags], logs, configuration.environment)
        self.service = ServiceView(http_port)
        self.service.note_capacity()


class ServerPool:
    """Starts servers when they are asked for and ends them as soon as another configuration is."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._plain: SGLangServer | None = None
        self._ssd: SSDServer | None = None
        self._ssd_name = ""
        self._failures: dict[str, ServerFailed] = {}

    def plain(self) -> SGLangServer:
        """The server without speculation."""
        if self._plain is None:
            # Overlap scheduling would show penalties an output that lags one token behind.
            self._plain = SGLangServer("plain", ["--disable-overlap-schedule"], self.logs)
        return self._plain

    def ssd(self, name: str) -> SSDServer:
        """The server with SSD in configuration ``name``; started anew if it has ended."""
        if self._ssd is not None and (self._ssd_name != name or self._ssd.process.exit_code is not None):
            self.end_ssd()
        if name in self._failures:
            raise self._failures[name]  # once is enough to know
        if self._ssd is None:
            try:
                self._ssd, self._ssd_name = SSDServer(name, self.logs), name
            except ServerFailed as failure:
                self._failures[name] = failure
                raise
        return self._ssd

    def end_ssd(self) -> None:
        """End the server with SSD, to make room for another one."""
        if self._ssd is not None:
            self._ssd.process.end()
            self._ssd = None

    def end(self) -> None:
        """End all servers."""
        with contextlib.ExitStack() as stack:
            if self._plain is not None:
                stack.callback(self._plain.process.end)
            stack.callback(self.end_ssd)


class Oracle:
    """The answers of the server without speculation, asked for once."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._answers: dict[str, Answer] = {}

    def __call__(self, payload: Payload) -> Answer:
        """The answer to one request."""
        return self.all([payload])[0]

    def all(self, payloads: Sequence[Payload]) -> list[Answer]:
        """The answers to several requests."""
        keys = [json.dumps(payload, sort_keys=True) for payload in payloads]
        new = {key: payload for key, payload in zip(keys, payloads, strict=True) if key not in self._answers}
        if new:
            self._answers.update(zip(new, self._pool.plain().generate_all(list(new.values())), strict=True))
        return [self._answers[key] for key in keys]

    def assert_same(self, server: SGLangServer, payloads: Sequence[Payload], concurrency: int = 12) -> list[Answer]:
        """Send ``payloads`` to ``server``; the answers must be those without speculation. Returns them."""
        expected = self.all(payloads)
        actual = server.generate_all(payloads, concurrency)
        different = [
            f"{payload}\n  plain: {want.essence}\n  SSD:   {have.essence}"
            for payload, want, have in zip(payloads, expected, actual, strict=True)
            if want.essence != have.essence
        ]
        assert not different, f"{len(different)} of {len(payloads)} differ:\n" + "\n".join(different[:5])
        return actual
