"""Servers started by the launch scripts end with the script, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "launch"

# A server with a helper process; both ignore SIGTERM unless told otherwise.
SERVER = """
import http.server, os, pathlib, signal, subprocess, sys
signal.signal(signal.SIGTERM, {on_terminate})
code = "import signal, time; signal.signal(15, {on_terminate}); time.sleep(99)"
helper = subprocess.Popen([sys.executable, "-c", code])
pathlib.Path("pids").write_text(f"{{os.getpid()}} {{helper.pid}}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
SCRIPT = """
import pathlib, sys, time
sys.path.insert(0, {launch!r})
import children
children.TERMINATE_WITHIN_S = 0.5
children.end_on_signals()
port = children.free_port()
command = [sys.executable, "-c", {server!r}, str(port)]
health = f"http://127.0.0.1:{{port}}/"
with children.running("server", command, log=pathlib.Path("log"), health=health, ready_within_s=20):
    pathlib.Path("ready").touch()
    {body}
"""


def start(folder: Path, body: str, on_terminate: str) -> subprocess.Popen[bytes]:
    server = SERVER.format(on_terminate=on_terminate)
    script = SCRIPT.format(launch=str(LAUNCH), server=server, body=body)
    return subprocess.Popen([sys.executable, "-c", script], cwd=folder, stderr=subprocess.PIPE)


def wait_until_gone(folder: Path, within_s: float = 10.0) -> None:
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_ready(folder: Path, script: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while not (folder / "ready").exists():
        assert time.monotonic() < deadline
        assert script.poll() is None, script.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize("on_terminate", ["signal.SIG_DFL", "signal.SIG_IGN"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_children_end_with_an_interrupted_script(tmp_path: Path, number: signal.Signals, on_terminate: str) -> None:
    script = start(tmp_path, "time.sleep(99)", on_terminate)
    try:
        wait_until_ready(tmp_path, script)
        script.send_signal(number)
        script.communicate(timeout=30)
    finally:
        script.kill()
        script.wait()
    assert script.returncode != 0
    wait_until_gone(tmp_path, 1.0)


def test_children_end_with_the_block(tmp_path: Path) -> None:
    script = start(tmp_path, "pass", "signal.SIG_DFL")
    _, messages = script.communicate(timeout=60)
    assert script.returncode == 0, messages
    wait_until_gone(tmp_path, 1.0)


def test_server_ends_when_the_script_is_killed(tmp_path: Path) -> None:
    """Nothing can run after SIGKILL; the kernel tells the server."""
    script = start(tmp_path, "time.sleep(99)", "lambda *_: (helper.kill(), sys.exit())")
    try:
        wait_until_ready(tmp_path, script)
    finally:
        script.kill()
        script.wait()
    wait_until_gone(tmp_path)


def test_early_end_shows_the_log(tmp_path: Path) -> None:
    script = f"""
import pathlib, sys
sys.path.insert(0, {str(LAUNCH)!r})
import children
command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
with children.running("server", command, log=pathlib.Path("log"), health="http://127.0.0.1:9/", ready_within_s=20):
    pass
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    assert "ChildFailed: server ended with exit status 3:\nno such model" in ended.stderr
