"""launch/bench with servers that only look like real ones: whole runs, how they end, what the system says of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
LAUNCH = CHECKOUT / "launch"
sys.path.append(str(LAUNCH))  # launch/ is not a package

from benchmark import processes, servers  # noqa: E402
from benchmark.settings import make_settings, parse_arguments  # noqa: E402

from ssd_proto.errors import ConfigError  # noqa: E402

SERVER = Path(__file__).with_name("bench_server.py")
SCRIPT = f"""
import os, pathlib, sys
sys.path[:0] = [{str(LAUNCH)!r}]
import bench
import children
from benchmark import servers

children.TERMINATE_WITHIN_S = 1.0


def command(mode, settings, port, metrics_port):
    print(f"starting {{mode.name}}", flush=True)
    tag = {{"standalone": 7}}.get(mode.kind, 5) if mode.kind != os.environ.get("WRONG_MODE") else 6
    pace = "0.001" if mode.is_ssd else "0.005"
    port = 1 if mode.kind == os.environ.get("HANGING_MODE") else port
    program = [sys.executable, "-c", "import time; time.sleep(600)"] if port == 1 else [sys.executable, {str(SERVER)!r}]
    return [*program, str(port), str(metrics_port if mode.is_ssd else 0), pace, str(tag)]


servers._command = command
sys.argv[0] = "launch/bench"
sys.exit(bench.main())
"""


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'proto'}", "OMP_NUM_THREADS": "1", **environment},
    )


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    script = start(*arguments, **environment)
    try:
        output, errors = script.communicate(timeout=120)
    finally:
        script.kill()
        script.wait()
    return script.returncode, output, errors


def left() -> list[str]:
    """Command lines of the servers that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if str(SERVER) in words or "import time; time.sleep(600)" in words:
            found.append(" ".join(words))
    return found


SHORT = ("--modes", "ar", "standalone@2", "ssd", "--max-new-tokens", "16", "--batch-sizes", "1", "2")


def test_a_run(tmp_path: Path) -> None:
    code, output, errors = run(*SHORT, "--repeats", "2", "--temperatures", "0", "1", "--output", str(tmp_path))
    assert code == 0, errors
    assert "Traceback" not in errors
    assert left() == []
    content = json.loads((tmp_path / "bench.json").read_text())
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    cells = [(row["temperature"], row["batch"], row["mode"]) for row in content["rows"]]
    assert cells == [(t, b, mode) for t in (0, 1) for b in (1, 2) for mode in ("ar", "standalone@2", "ssd")]
    ssd = content["rows"][2]
    assert 1.2 < ssd["x_ar"] < 10
    assert ssd["tokens_per_round"] == 15 / 4
    assert ssd["same_tokens"]
    assert not content["rows"][1]["same_tokens"]
    # 4 prompts, twice, 4 rounds each; the warm-up is not counted.
    assert content["modes"][2]["runs"][0]["service"]["rounds"] == [4, 12]
    assert ssd["ssd"]["all_hit_rate"] == 0.75
    assert ssd["ssd"]["wait_ms"] == pytest.approx(0.25)
    assert ssd["itl_ms"]["p50"] > 0.5
    assert content["modes"][0]["runs"][0]["tokens"] == 64
    for mode in content["modes"]:
        assert mode["runs"][0]["memory_bytes"] > 1e6
        assert mode["placements"][0]["num_threads"] >= 1
    assert "Ratios of tok/s" in output
    assert "temperature 1, batch size 2" in output


def test_other_tokens_than_plain_decoding_are_told_by_the_exit_status() -> None:
    code, output, errors = run(*SHORT, "--repeats", "1", "--latency-repeats", "0", WRONG_MODE="ssd")
    assert code == 1
    assert "SSD's tokens are not those of plain decoding" in errors
    assert "others" in output


def test_refused_requests_are_told() -> None:
    code, _, errors = run("--modes", "ar", "--max-new-tokens", "1001", "--num-prompts", "1")
    assert code == 1
    assert 'launch/bench: the server refused a request to /generate: {"error": "longer than' in errors
    assert "Traceback" not in errors
    assert left() == []


@pytest.mark.parametrize("hanging", ["ssd", "none"])
def test_interrupt_ends_everything(hanging: str) -> None:
    """While one server starts and the others are stopped, and while one is measured."""
    script = start(*SHORT, "--repeats", "100", HANGING_MODE=hanging)
    try:
        assert script.stdout is not None
        assert script.stderr is not None
        while "starting ssd" not in script.stdout.readline():
            assert script.poll() is None
        while hanging == "none" and "run 1 of" not in script.stderr.readline():
            assert script.poll() is None
        time.sleep(0.3)
        assert len(left()) == 3
        script.send_signal(signal.SIGINT)
        _, errors = script.communicate(timeout=30)
    finally:
        script.kill()
        script.wait()
    assert script.returncode == 130
    assert "interrupted, everything is ended" in errors
    assert "Traceback" not in errors
    assert left() == []


def test_no_server_is_started_without_memory_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(servers, "available_memory_bytes", lambda: 1_200_000_000)
    settings = make_settings(parse_arguments(None, ["--modes", "ar"]))
    words = r"^The server of 'ar' needs about 2.5 GB and 1.2 GB are free beside the 0 before it: name fewer --modes.$"
    with pytest.raises(ConfigError, match=words), servers.servers(settings, tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


WORKER = """
import threading, time
def work():
    end = time.thread_time() + 0.4
    while time.thread_time() < end: pass
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("ready", flush=True); input(); work(); print("worked", flush=True); input()
"""


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", WORKER, "speculator_service"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        yield process
        process.kill()


def test_what_the_system_says_of_a_session(worker: subprocess.Popen[bytes]) -> None:
    assert worker.stdin is not None
    assert worker.stdout is not None
    core = min(os.sched_getaffinity(0))
    worker.stdout.readline()
    processes.pin(worker.pid, lambda process: (core,))
    before = processes.usage(worker.pid)
    worker.stdin.write(b"\n")
    worker.stdin.flush()
    worker.stdout.readline()
    after = processes.usage(worker.pid)
    assert processes.session(worker.pid) == [processes.Process(worker.pid, "speculator")]
    assert 0.3 <= after.seconds_since(before) <= 1.0
    (place,) = processes.placements(worker.pid, before, after, 1.0)
    assert (place.role, place.cores, place.num_threads, place.busy_threads) == ("speculator", (core,), 2, 1)
    assert 0.3 <= place.cores_used <= 1.0
    assert 1e6 < processes.memory_bytes(worker.pid) < 1e9
    assert processes.available_memory_bytes() > 1e6


def test_signals_reach_a_session(worker: subprocess.Popen[bytes]) -> None:
    processes.send(worker.pid, signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(worker.pid, os.WUNTRACED)[1])
    processes.send(worker.pid, signal.SIGKILL)
    worker.wait(10)
    assert processes.session(worker.pid) == []
