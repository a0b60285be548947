"""What all ZeroMQ sockets of this project have in common."""

from __future__ import annotations

import errno
import socket
from typing import Final

import zmq

from ssd_proto.errors import ConfigError

_HEARTBEAT_MS: Final = 5_000
_SLOWEST_RECONNECT_MS: Final = 1_000


def configure(endpoint: zmq.Socket[bytes], queued_messages: int, max_message_bytes: int) -> None:
    """Options of every socket. ``queued_messages``: for each peer and direction."""
    endpoint.setsockopt(zmq.LINGER, 0)
    endpoint.setsockopt(zmq.SNDHWM, queued_messages)
    endpoint.setsockopt(zmq.RCVHWM, queued_messages)
    endpoint.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    # A connection to a host that vanished is given up and made anew.
    endpoint.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    endpoint.setsockopt(zmq.RECONNECT_IVL_MAX, _SLOWEST_RECONNECT_MS)
    # Without this, messages to an absent service pile up and reach it all at once, long stale.
    endpoint.setsockopt(zmq.IMMEDIATE, 1)


def bind(router: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind, or raise a `ConfigError` that says what to change."""
    if _is_served(endpoint):
        raise ConfigError(f"cannot listen on {endpoint}: address already in use; give another --endpoint")
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        reason = "address already in use" if error.errno == errno.EADDRINUSE else str(error).lower()
        raise ConfigError(f"cannot listen on {endpoint}: {reason}; give another --endpoint") from error


def connect(dealer: zmq.Socket[bytes], endpoint: str) -> None:
    """Start connecting, or raise a `ConfigError` if ``endpoint`` is none."""
    try:
        dealer.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{endpoint!r} is not an endpoint ({str(error).lower()}); give tcp://host:port or ipc://path"
        ) from error


def reachable(offered: str, control_endpoint: str) -> str:
    """``offered`` as seen from a verifier that reached the service at ``control_endpoint``.

    A service that listens on all interfaces cannot know by which of its names the verifier knows it.
    """
    for wildcard in ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:"):
        if offered.startswith(wildcard) and control_endpoint.startswith("tcp://"):
            return f"{control_endpoint.rpartition(':')[0]}:{offered.rpartition(':')[2]}"
    return offered


def _is_served(endpoint: str) -> bool:
    """Whether somebody listens on an ``ipc://`` path: ZeroMQ would take the path from them without a word."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith(("@", "*")):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def readable(endpoint: zmq.Socket[bytes]) -> bool:
    """Whether a message has arrived; cheaper than to try and catch."""
    return bool(int(endpoint.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
