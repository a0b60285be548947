"""A server with SSD whose service, at an endpoint, is replaced by another one while the server runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.service import Service
from tests.support.sglang_server import SGLangServer, ssd_flags


class ExternalPair:
    """A server, and at most one service. To be ended with `end`.

    Args:
        name: of the server, and of its endpoint in ``logs``.
        lookahead: K.
        options: of ``--speculative-ssd-config``.
    """

    def __init__(self, name: str, lookahead: int, options: Mapping[str, Any], logs: Path) -> None:
        self._endpoint, self._logs = f"ipc://{logs}/{name}", logs
        self._lookahead = ["--lookahead", str(lookahead)]
        self._flags: Sequence[str] | None = None
        self._service: Service | None = None
        flags = [*ssd_flags({"connect_timeout_s": 0, **options}, draft=None), "--speculative-num-steps", str(lookahead)]
        self.server = SGLangServer(name, [*flags, "--speculative-ssd-endpoint", self._endpoint], logs)

    def service(self, *flags: str) -> Service:
        """A service with these flags, attached to the server; the one before it goes on if its flags are the same."""
        if self._service is None or self._flags != flags:
            self.end_service()
            self._service = Service(self._endpoint, self._logs, [*self._lookahead, *flags])
            self._flags = flags
            self.server.wait_connected()
        return self._service

    def end_service(self) -> None:
        """End the service, and wait until the server knows."""
        if self._service is not None:
            self._service.process.end()
            self._service = None
            self.server.wait_connected(False)

    def end(self) -> None:
        """End both."""
        try:
            if self._service is not None:
                self._service.process.end()
        finally:
            self.server.process.end()
