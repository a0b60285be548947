"""Server processes for the launch scripts: started in a session of their own, awaited, and ended on every way out."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

_SERVER_PORTS = range(20_000, 32_000)
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
REPORT_EVERY_S = 10.0
TERMINATE_WITHIN_S = 15.0
KILL_WITHIN_S = 5.0


class ChildFailed(Exception):
    """A server ended early or was not ready in time; the message holds the end of its log."""


def say(message: str) -> None:
    """Progress, apart from the results on stdout."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def free_port() -> int:
    """A TCP port of the loopback interface that is free now.

    It is below those that systems give to clients, any of which could take it while a server starts.

    Raises:
        OSError: there is none.
    """
    for port in secrets.SystemRandom().sample(_SERVER_PORTS, len(_SERVER_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def end_on_signals() -> None:
    """Turn SIGTERM and SIGHUP into an exception, as SIGINT is: then `running` ends its children."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)


@contextlib.contextmanager
def running(
    name: str,
    arguments: Sequence[str],
    *,
    log: Path,
    health: str,
    ready_within_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server as a child for the length of the `with` block.

    Args:
        name: What to call it in messages.
        arguments: Its command line.
        log: File that receives its stdout and stderr.
        health: URL that answers 200 when it is ready.
        ready_within_s: Deadline of that, seconds.
        environment: Its environment variables; None for ours.

    Raises:
        ChildFailed: It ended or was not ready in time.
    """
    with log.open("wb") as output:
        child = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        _wait_until_ready(name, child, log, health, ready_within_s)
        yield child
    finally:
        end(child)


def end(child: subprocess.Popen[bytes]) -> None:
    """End the child and every process of its session: politely, then not. Interrupts wait until that is done."""
    with _uninterrupted():
        for number, within_s in ((signal.SIGTERM, TERMINATE_WITHIN_S), (signal.SIGKILL, KILL_WITHIN_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            deadline = time.monotonic() + within_s
            while _group_is_alive(child) and time.monotonic() < deadline:
                time.sleep(0.05)
            if not _group_is_alive(child):
                break


def log_end(log: Path, lines: int = 25) -> str:
    """The last lines of a child's log."""
    return "\n".join(log.read_text(errors="replace").rstrip().splitlines()[-lines:])


def _end_with_parent() -> None:
    """In the child, before it runs: SIGTERM when the parent dies, however that happens."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_ready(name: str, child: subprocess.Popen[bytes], log: Path, health: str, within_s: float) -> None:
    started = reported = time.monotonic()
    say(f"{name}: starting")
    while not _is_healthy(health):
        now = time.monotonic()
        if child.poll() is not None:
            raise ChildFailed(f"{name} ended with exit status {child.returncode}:\n{log_end(log)}")
        if now - started > within_s:
            raise ChildFailed(f"{name} was not ready within {within_s:.0f} s:\n{log_end(log)}")
        if now - reported >= REPORT_EVERY_S:
            reported = now
            say(f"{name}: starting, {now - started:.0f} s")
        time.sleep(0.2)
    say(f"{name}: ready after {time.monotonic() - started:.0f} s")


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _group_is_alive(child: subprocess.Popen[bytes]) -> bool:
    child.poll()  # reaps the child itself, which would stay in the group as a zombie
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
