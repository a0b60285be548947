"""The trace file: readable whoever writes, complete after close, nothing when off."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Never

import pytest

from ssd_proto.errors import ConfigError
from ssd_proto.trace import NO_TRACE, FileTrace, check_trace, open_trace, read_trace

_WRITER = """
import sys
from ssd_proto.trace import FileTrace
trace = FileTrace(sys.argv[1], sys.argv[2])
for number in range(2000):
    with trace.span("step", number=number):
        pass
trace.close()
"""


def test_span_has_its_times_and_details(tmp_path: Path) -> None:
    trace = FileTrace(tmp_path / "trace.json", "verifier")
    before = time.monotonic_ns()
    with trace.span("round", batch=3), trace.span("wait"):
        time.sleep(0.01)
    after = time.monotonic_ns()
    trace.close()
    trace.close()
    name, wait, outer = read_trace(tmp_path / "trace.json")
    assert (name["ph"], name["args"]) == ("M", {"name": "verifier"})
    assert (outer["name"], outer["args"], wait["name"]) == ("round", {"batch": 3}, "wait")
    assert before / 1000 <= outer["ts"] <= wait["ts"]
    assert wait["ts"] + wait["dur"] <= outer["ts"] + outer["dur"] <= after / 1000
    assert wait["dur"] >= 10_000


def test_span_ends_with_an_error(tmp_path: Path) -> None:
    trace = FileTrace(tmp_path / "trace.json", "verifier")
    with pytest.raises(KeyError), trace.span("round"):
        raise KeyError
    trace.close()
    assert [event["name"] for event in read_trace(tmp_path / "trace.json")][1:] == ["round"]


def test_processes_share_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.json")
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, path, name]) for name in ("verifier", "speculator")]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]
    events = read_trace(path)
    for writer in writers:
        mine = [event["args"]["number"] for event in events if event["pid"] == writer.pid and event["ph"] == "X"]
        assert mine == list(range(2000))


def test_file_grows_while_the_trace_is_open(tmp_path: Path) -> None:
    """A process that is killed loses its last moments only."""
    trace = FileTrace(tmp_path / "trace.json", "verifier")
    with trace.span("round"):
        pass
    deadline = time.monotonic() + 10
    while len(read_trace(tmp_path / "trace.json")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    trace.close()


def test_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trace = FileTrace(tmp_path / "trace.json", "verifier")

    def write(*_: object) -> Never:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ssd_proto.trace.os.write", write)
    with trace.span("round"):
        pass
    trace._thread.join(10)
    monkeypatch.undo()
    with trace.span("later"):
        pass
    trace.close()
    assert "No space left" in caplog.text
    assert not trace._spans


def test_an_empty_file_becomes_a_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.json").touch()
    check_trace(str(tmp_path / "trace.json"))
    assert read_trace(tmp_path / "trace.json") == []


def test_off_keeps_nothing(tmp_path: Path) -> None:
    trace = open_trace(None, "verifier")
    assert trace is NO_TRACE
    with trace.span("round", batch=1) as span, span:
        pass
    trace.close()
    check_trace(None)
    assert list(tmp_path.iterdir()) == []


def test_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace file .* cannot be written \(No such file or directory\)"):
        check_trace(str(tmp_path / "absent" / "trace.json"))


def test_file_is_what_perfetto_reads(tmp_path: Path) -> None:
    """Chrome's array format: a bracket, then one event a line, each with a comma."""
    FileTrace(tmp_path / "trace.json", "verifier").close()
    first, *lines = (tmp_path / "trace.json").read_text().splitlines()
    assert first == "["
    assert all(line.endswith(",") and json.loads(line[:-1]) for line in lines)
