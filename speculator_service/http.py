"""/health, /info and /metrics over HTTP, in threads of their own."""

from __future__ import annotations

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from ssd_proto.errors import ConfigError

logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 10.0


class Status(Protocol):
    """What the pages show. Called from any thread."""

    def is_healthy(self) -> bool:
        """Whether the service serves."""

    def info(self) -> dict[str, Any]:
        """Something that can be written as JSON."""


class HttpServer:
    """Listens from construction on, answers from `start` on. Owns its socket and threads.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, status: Status, registry: CollectorRegistry) -> None:
        pages = _Pages(status, registry)

        class Handler(_Handler):
            site = pages

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on http://{host}:{port} ({error.strerror}): give another --http-port."
            ) from error
        self._server.daemon_threads = True
        self.address = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http", daemon=True)

    def start(self) -> None:
        """Answer requests from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(_REQUEST_TIMEOUT_S)
        self._server.server_close()


class _Pages:
    def __init__(self, status: Status, registry: CollectorRegistry) -> None:
        self._status, self._registry = status, registry

    def get(self, path: str) -> tuple[int, str, bytes]:
        """Status code, content type and body of a page."""
        if path == "/health":
            healthy = self._status.is_healthy()
            return (200, "text/plain", b"ok\n") if healthy else (503, "text/plain", b"the model thread does not move\n")
        if path == "/info":
            return 200, "application/json", json.dumps(self._status.info()).encode()
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        return 404, "text/plain", b"pages: /health /info /metrics\n"


class _Handler(BaseHTTPRequestHandler):
    site: _Pages
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        code, content_type, body = self.site.get(self.path.partition("?")[0])
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
