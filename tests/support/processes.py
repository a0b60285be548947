"""Server processes for tests: each in a session of its own, awaited with a deadline, ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import NamedTuple

_SERVER_PORTS = range(20_000, 32_000)
_POLL_S = 0.1
_TERMINATE_WITHIN_S = 15.0
_KILL_WITHIN_S = 10.0


class ServerFailed(AssertionError):
    """A server ended early or was not ready in time; the message holds the end of its log."""


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


def wait_until(condition: Callable[[], bool], within_s: float, what: str | Callable[[], object]) -> None:
    """Poll ``condition``; fails with ``what`` (a text, or what a call of it returns) when it is not met in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:.0f} s: {what() if callable(what) else what}")
        time.sleep(_POLL_S)


class Server:
    """A child process with a log file. It leads a session, so that all of its descendants can be found and ended."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the leader, which is also the id of the process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the leader runs."""
        return self._process.poll()

    def wait_healthy(self, url: str, within_s: float) -> None:
        """Wait until ``url`` answers 200. Raises `ServerFailed`; the server is ended then, as on an interrupt."""
        deadline = time.monotonic() + within_s
        try:
            while not answers(url):
                if self.exit_code is not None or time.monotonic() > deadline:
                    reason = "is not ready" if self.exit_code is None else f"ended with exit code {self.exit_code}"
                    raise ServerFailed(f"{self.name} {reason}; the end of its log:\n{self.log_end()}")
                time.sleep(_POLL_S)
        except BaseException:
            self.end()
            raise

    def signal(self, number: Signals) -> None:
        """Send a signal to the leader alone."""
        self._process.send_signal(number)

    def signal_descendant(self, pid: int, number: Signals) -> None:
        """Send a signal to one process of the session."""
        assert os.getsid(pid) == self.pid, f"{pid} is not a process of {self.name}"
        os.kill(pid, number)

    def signal_group(self, number: Signals) -> None:
        """Send a signal to every process of the session, as a terminal does with Ctrl-C."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def is_gone(self) -> bool:
        """Whether the leader and every process of its group have ended."""
        self._process.poll()  # reaps the leader, which would stay in the group as a zombie
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def group(self) -> dict[int, str]:
        """Command lines of the processes of the group, by process id."""
        return {pid: entry.command for pid, entry in processes().items() if entry.group == self.pid}

    def end(self) -> None:
        """End the leader politely, and kill what is left of its group then. May be called twice."""
        self._process.send_signal(signal.SIGTERM)  # nothing happens if it has ended
        self._process.send_signal(signal.SIGCONT)  # a stopped process would not notice
        self._wait_gone(_TERMINATE_WITHIN_S)
        self.signal_group(signal.SIGKILL)
        self._wait_gone(_KILL_WITHIN_S)

    def _wait_gone(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not self.is_gone() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def log_text(self) -> str:
        """Everything that the server has printed so far."""
        return self.log.read_text(errors="replace")

    def log_end(self, lines: int = 40) -> str:
        """The last lines of the log."""
        return "\n".join(self.log_text().rstrip().splitlines()[-lines:])


@contextlib.contextmanager
def ended_at_exit(server: Server) -> Iterator[Server]:
    """``with`` block at whose end the server ends."""
    try:
        yield server
    finally:
        server.end()


def answers(url: str) -> bool:
    """Whether a GET of ``url`` gives status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class Process(NamedTuple):
    """An entry of the process table."""

    parent: int
    group: int
    command: str


def processes() -> dict[int, Process]:
    """All processes, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(entry.name)] = Process(int(fields[1]), int(fields[2]), command)
    return found


def children(pid: int) -> dict[int, str]:
    """Command lines of the direct children of a process, by process id."""
    return {child: entry.command for child, entry in processes().items() if entry.parent == pid}
