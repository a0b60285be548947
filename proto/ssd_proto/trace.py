"""A trace of rounds that Perfetto (ui.perfetto.dev) and chrome://tracing show: all processes on one time line.

Every process appends its spans to the same file, in Chrome's JSON array format, which needs no closing bracket.  Times
are those of the system's monotonic clock, which the processes of one host share.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from ssd_proto.errors import ConfigError

logger = logging.getLogger(__name__)

_WRITE_EVERY_S = 0.25


class Span(Protocol):
    """A stretch of time: that of a `with` block."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """The span ends, however the block was left."""


class Trace(Protocol):
    """Where spans go."""

    def span(self, name: str, **args: Any) -> Span:
        """A span with details that can be written as JSON; to be entered once."""

    def close(self) -> None:
        """Write what is left. May be called twice."""


class NoTrace:
    """Keeps nothing, at the cost of a call."""

    def span(self, name: str, **args: Any) -> Span:
        return _NOTHING

    def close(self) -> None:
        """Nothing to do."""


class FileTrace:
    """Writes the spans of this thread's work to ``path`` (created, or appended to), from a thread of its own.

    Args:
        path: the file, the same one in all processes.
        process: how to call this process.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | Path, process: str) -> None:
        self._file = _open(Path(path))
        self._pid = os.getpid()
        self._is_recording = True
        self._spans: deque[tuple[str, int, int, dict[str, Any]]] = deque()
        self._append([{"name": "process_name", "ph": "M", "pid": self._pid, "args": {"name": process}}])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_until_stopped, name="ssd-trace", daemon=True)
        self._thread.start()

    def span(self, name: str, **args: Any) -> Span:
        return _FileSpan(self._spans, name, args) if self._is_recording else _NOTHING

    def close(self) -> None:
        """Write what is left. May be called twice."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            os.close(self._file)

    def _write_until_stopped(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(_WRITE_EVERY_S)
            events = []
            with suppress(IndexError):  # other threads append meanwhile
                while True:
                    events.append(self._event(*self._spans.popleft()))
            try:
                self._append(events)
            except OSError as error:
                logger.warning("the trace ends: its file cannot be written any more (%s)", error.strerror)
                self._is_recording, is_last = False, True

    def _event(self, name: str, begin: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
        """A complete event; Chrome counts in microseconds."""
        times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
        return {"name": name, "ph": "X", "pid": self._pid, "tid": self._pid, **times, "args": args}

    def _append(self, events: list[dict[str, Any]]) -> None:
        if events:
            # One call: the system puts it behind whatever other processes have written.
            os.write(self._file, "".join(json.dumps(event) + ",\n" for event in events).encode())


class _NoSpan:
    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


_NOTHING = _NoSpan()
NO_TRACE = NoTrace()


class _FileSpan:
    __slots__ = ("_args", "_begin", "_name", "_spans")

    def __init__(self, spans: deque[tuple[str, int, int, dict[str, Any]]], name: str, args: dict[str, Any]) -> None:
        self._spans, self._name, self._args = spans, name, args

    def __enter__(self) -> Self:
        self._begin = time.monotonic_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._spans.append((self._name, self._begin, time.monotonic_ns(), self._args))


def open_trace(path: str | None, process: str) -> Trace:
    """The trace at ``path``, or one that keeps nothing. Raises: see `FileTrace`."""
    return FileTrace(path, process) if path is not None else NO_TRACE


def check_trace(path: str | None) -> None:
    """Raise `ConfigError` if the trace file cannot be written; it exists afterwards."""
    if path is not None:
        os.close(_open(Path(path)))


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """The events of a trace file. Raises `ValueError` if it is none."""
    events: list[dict[str, Any]] = json.loads(Path(path).read_text().rstrip().rstrip(",") + "]")
    return events


def _open(path: Path) -> int:
    """A descriptor that appends to ``path``. Raises: see `FileTrace`."""
    try:
        return _open_or_make(path)
    except OSError as error:
        raise ConfigError(f"the trace file {str(path)!r} cannot be written ({error.strerror}).") from error


def _open_or_make(path: Path) -> int:
    """Whoever makes the file writes its bracket before anybody sees it."""
    if path.exists() and path.stat().st_size == 0:
        path.unlink()
    if not path.exists():
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            os.write(handle, b"[\n")
            with suppress(FileExistsError):
                os.link(name, path)
        finally:
            os.close(handle)
            os.unlink(name)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
