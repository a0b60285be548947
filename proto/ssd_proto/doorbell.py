"""Wake-up between processes of one host: the speculator sleeps on its doorbell, verifiers ring it.

A datagram socket in the abstract namespace: no file is left behind, however the owner ends.  A ring
carries no data and may be lost (full queue, owner restarted, race with falling asleep): that is
harmless, because every sleep is bounded and the sleeper looks at its channels when it wakes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
from types import TracebackType

_DRAIN_LIMIT = 256
"""Rings taken at most in one go, so that nobody can keep the owner busy by ringing."""


class Doorbell:
    """The owner's end. Used by one thread."""

    def __init__(self) -> None:
        self.address = f"sglang_ssd_bell_{os.getpid()}_{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind(_abstract(self.address))
        except OSError:
            self._socket.close()
            raise
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)

    def fileno(self) -> int:
        """Readable when somebody has rung; for poll loops that wait for other things as well."""
        return self._socket.fileno()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until somebody rings, at most ``timeout_s`` seconds; whether somebody did. Drains."""
        rung = bool(self._poller.poll(max(0.0, timeout_s * 1000)))
        if rung:
            self.drain()
        return rung

    def drain(self) -> None:
        """Forget the rings so far."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_DRAIN_LIMIT):
                self._socket.recv(1)

    def close(self) -> None:
        """Release the socket. May be called twice."""
        self._socket.close()

    def __enter__(self) -> Doorbell:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Bell:
    """The other end of a `Doorbell`. Used by one thread."""

    def __init__(self, address: str) -> None:
        self._address = _abstract(address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def ring(self) -> None:
        """Wake the owner. Never blocks, never raises."""
        # A full queue means that it is ringing already; any other error that nobody is at home.
        with contextlib.suppress(OSError):
            self._socket.sendto(b"!", self._address)

    def close(self) -> None:
        """Release the socket. May be called twice."""
        self._socket.close()


def _abstract(address: str) -> bytes:
    return b"\0" + address.encode("ascii")
