"""Processes of a server as /proc shows them: CPU time, memory, cores, threads. A server leads a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_SESSION, _USER_TIME = 3, 11
"""Fields of /proc/PID/stat after the command's name; the time in the system follows that in user mode."""
_ROLES = (
    ("sglang::scheduler", "target's scheduler"),
    ("sglang::detokenizer", "detokenizer"),
    ("speculator_service", "speculator"),
    ("launch_server", "HTTP, tokenizer"),
    ("resource_tracker", "resource tracker"),
)
SCHEDULER = _ROLES[0][1]
_BUSY_SHARE = 0.02
"""Of one core: what a thread that does no work needs less than."""


class Process(NamedTuple):
    """One process of a session."""

    pid: int
    role: str
    """What it is in a server; the start of its command line if it is none of these."""


class Placement(NamedTuple):
    """Where a process ran, read back from the system."""

    role: str
    cores: tuple[int, ...]
    """That its threads may use."""
    num_threads: int
    busy_threads: int
    """Those that used more than `_BUSY_SHARE` of a core."""
    cores_used: float
    """CPU seconds per second."""


class Usage(NamedTuple):
    """CPU seconds since their start."""

    processes: dict[int, float]
    threads: dict[tuple[int, int], float]
    """By process and thread."""

    def seconds_since(self, before: Usage) -> float:
        """CPU seconds of all processes together since ``before``."""
        return sum(seconds - before.processes.get(pid, 0.0) for pid, seconds in self.processes.items())


def session(leader: int) -> list[Process]:
    """Living processes of the session that ``leader`` leads."""
    found = []
    for pid in (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal()):
        with _gone_is_no_error():
            if int(_stat(_PROC / str(pid))[_SESSION]) == leader:
                found.append(Process(pid, _role((_PROC / str(pid) / "cmdline").read_text())))
    return sorted(found)


def send(leader: int, number: signal.Signals) -> None:
    """Send a signal to every process of a session."""
    for process in session(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def pin(leader: int, cores_of: Callable[[Process], Sequence[int]]) -> None:
    """Give all threads of a session's processes the cores that ``cores_of`` names."""
    for process in session(leader):
        with _gone_is_no_error():
            for thread in os.listdir(_PROC / str(process.pid) / "task"):
                os.sched_setaffinity(int(thread), cores_of(process))


def usage(leader: int) -> Usage:
    """CPU seconds that the processes of a session, and their threads, have used."""
    processes, threads = {}, {}
    for process in session(leader):
        folder = _PROC / str(process.pid)
        with _gone_is_no_error():
            processes[process.pid] = _cpu_seconds(folder)
            for task in (folder / "task").iterdir():
                threads[process.pid, int(task.name)] = _cpu_seconds(task)
    return Usage(processes, threads)


def placements(leader: int, before: Usage, after: Usage, seconds: float) -> list[Placement]:
    """Where the processes of a session ran in the ``seconds`` between two measurements."""
    found = []
    for pid, role in session(leader):
        used = {key: total - before.threads.get(key, 0.0) for key, total in after.threads.items() if key[0] == pid}
        with _gone_is_no_error():
            cores = {core for _, thread in used for core in os.sched_getaffinity(thread)}
            busy = sum(share > _BUSY_SHARE * seconds for share in used.values())
            found.append(Placement(role, tuple(sorted(cores)), len(used), busy, sum(used.values()) / seconds))
    return found


def memory_bytes(leader: int) -> int:
    """Memory of a session's processes; what several processes share counts in parts (proportional set size)."""
    total = 0
    for process in session(leader):
        with _gone_is_no_error():
            lines = (_PROC / str(process.pid) / "smaps_rollup").read_text().splitlines()
            total += next(_kilobytes(line) for line in lines if line.startswith("Pss:"))
    return total


def available_memory_bytes() -> int:
    """What new processes may use without swapping."""
    lines = (_PROC / "meminfo").read_text().splitlines()
    return next(_kilobytes(line) for line in lines if line.startswith("MemAvailable:"))


def _role(command_line: str) -> str:
    words = command_line.replace("\0", " ").strip()
    return next((role for sign, role in _ROLES if sign in words), words[:40])


def _cpu_seconds(folder: Path) -> float:
    fields = _stat(folder)
    return (int(fields[_USER_TIME]) + int(fields[_USER_TIME + 1])) / _TICKS


def _stat(folder: Path) -> list[str]:
    return (folder / "stat").read_text().rpartition(")")[2].split()


def _kilobytes(line: str) -> int:
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def _gone_is_no_error() -> Iterator[None]:
    """A process may end while it is being looked at."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        yield
