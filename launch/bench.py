"""Paired speed comparison of real servers: AR, STANDALONE, NGRAM, SSD, and SSD with single options changed.

All servers are up for the whole run; the one that is measured runs, the others are stopped (SIGSTOP), since an
idle SGLang scheduler polls.  A repetition measures every mode once, in alternating order, and speeds are compared
within a repetition only: absolute speeds drift, ratios of neighbours do not.  Target and client side get fixed
cores: on a machine with two, the scheduler has the first and the speculator shares the second with everything else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from children import ChildFailed, end_on_signals, free_port, running, say

CHECKOUT = Path(__file__).resolve().parent.parent
TARGET = CHECKOUT / "tests" / "models" / "tiny-target"
DRAFT = CHECKOUT / "tests" / "models" / "tiny-draft"
HOST = "127.0.0.1"
SSD_OPTIONS: dict[str, dict] = {
    "ssd": {},
    "ssd-no-table": {"service": {"fan_out": 0}},
    "ssd-auto-fan-out": {"service": {"fan_out": "auto"}},
    "ssd-primary": {"service": {"backup": "primary"}},
    "ssd-suffix": {"service": {"backup": "suffix"}},
    "ssd-empty": {"service": {"backup": "empty"}},
    "ssd-shared-noise": {"verification": "shared_noise"},
}
"""Modes of SSD, and the options of the verifier and its service in which they differ from the plain one."""
MODES = ("ar", "standalone", "ngram", *SSD_OPTIONS)
REQUEST_WITHIN_S = 600.0


@dataclass(frozen=True, slots=True)
class Run:
    """One mode on all prompts, ``batch_size`` at once."""

    tokens: int
    seconds: float
    rounds: int
    ids: tuple[tuple[int, ...], ...]

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class Mode:
    """A server that can be measured, and its runs by batch size."""

    name: str
    port: int
    child: subprocess.Popen[bytes]
    runs: dict[int, list[Run]] = field(default_factory=dict)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch/bench", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, help="JSONL with a `prompt` in each line; default: the tests' prompts")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["ar", "standalone", "ssd", "ssd-no-table"], help="what to compare"
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4], help="requests at once")
    parser.add_argument("--num-prompts", type=int, default=4, help="prompts per run; at least the batch size is used")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="per prompt, exactly")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions, each with every mode once")
    parser.add_argument("--num-steps", type=int, default=4, help="K of all speculation")
    parser.add_argument("--fan-out", default="3", help="of the speculator service")
    parser.add_argument("--temperature", type=float, default=0.0, help="of all requests")
    parser.add_argument("--model-path", default=str(TARGET), help="target")
    parser.add_argument("--draft-model-path", default=str(DRAFT), help="draft")
    parser.add_argument("--device", default="cpu", help="of the target")
    parser.add_argument("--dtype", default="float32", help="of both models")
    parser.add_argument("--max-total-tokens", type=int, default=20000, help="KV cache of each server")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


def flags(name: str, arguments: argparse.Namespace) -> list[str]:
    """Speculation flags of a mode."""
    steps = ["--speculative-num-steps", str(arguments.num_steps)]
    draft = ["--speculative-draft-model-path", arguments.draft_model_path]
    if name == "standalone":
        width = ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(arguments.num_steps + 1)]
        return ["--speculative-algorithm", "STANDALONE", *draft, *steps, *width]
    if name == "ngram":
        return ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(arguments.num_steps + 1)]
    if name in SSD_OPTIONS:
        options = dict(SSD_OPTIONS[name])
        service = {"fan_out": fan_out(arguments.fan_out), **options.pop("service", {})}
        config = json.dumps({"deadline_ms": 1000, "service": service, **options})
        return ["--speculative-algorithm", "SSD", *draft, *steps, "--speculative-ssd-config", config]
    return []


def fan_out(text: str) -> int | list[int] | str:
    """``3``, ``5,3,2,2,6`` or ``auto``."""
    if text == "auto":
        return text
    numbers = [int(word) for word in text.split(",")]
    return numbers[0] if len(numbers) == 1 else numbers


@contextlib.contextmanager
def servers(arguments: argparse.Namespace, logs: Path) -> Iterator[list[Mode]]:
    """All modes' servers, started one by one and stopped as soon as they are ready."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    batch = str(max(arguments.batch_sizes))
    with contextlib.ExitStack() as stack:
        modes = []
        for name in arguments.modes:
            port = free_port()
            command = [sys.executable, "-m", "sglang.launch_server", "--model-path", arguments.model_path]
            command += ["--host", HOST, "--port", str(port), "--device", arguments.device, "--dtype", arguments.dtype]
            command += ["--max-total-tokens", str(arguments.max_total_tokens), "--max-running-requests", batch]
            child = stack.enter_context(
                running(
                    name,
                    [*command, *flags(name, arguments)],
                    log=logs / f"{name}.log",
                    health=f"http://{HOST}:{port}/health",
                    ready_within_s=600,
                    environment=environment,
                )
            )
            pin(child)
            modes.append(Mode(name, port, child))
            signal_tree(child, signal.SIGSTOP)
        try:
            yield modes
        finally:
            for mode in modes:
                signal_tree(mode.child, signal.SIGCONT)


def session(child: subprocess.Popen[bytes]) -> list[tuple[int, str]]:
    """Processes (id, title) of the child's session."""
    listing = subprocess.run(["ps", "-eo", "pid=,sess=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()]
    return [(int(row[0]), row[2]) for row in rows if len(row) == 3 and int(row[1]) == child.pid]


def signal_tree(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to every process of the child's session."""
    for pid, _ in session(child):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def pin(child: subprocess.Popen[bytes]) -> None:
    """Schedulers on the first core, everything else on the others."""
    first, *others = sorted(os.sched_getaffinity(0))
    for pid, title in session(child):
        cores = [first] if "scheduler" in title else (others or [first])
        with contextlib.suppress(ProcessLookupError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), cores)


def measure(mode: Mode, prompts: Sequence[str], batch_size: int, arguments: argparse.Namespace) -> Run:
    """Run all prompts, ``batch_size`` at once, while the other servers are stopped."""
    signal_tree(mode.child, signal.SIGCONT)
    try:
        generate(mode.port, prompts[0], 8, arguments.temperature)
        flush(mode.port)
        with ThreadPoolExecutor(batch_size) as pool:
            started = time.perf_counter()
            answers = list(
                pool.map(lambda p: generate(mode.port, p, arguments.max_new_tokens, arguments.temperature), prompts)
            )
            seconds = time.perf_counter() - started
    finally:
        signal_tree(mode.child, signal.SIGSTOP)
    ids = tuple(tuple(answer["output_ids"]) for answer in answers)
    rounds = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    return Run(sum(map(len, ids)), seconds, rounds, ids)


def generate(port: int, prompt: str, length: int, temperature: float) -> dict:
    """One completion of exactly ``length`` tokens."""
    sampling = {"temperature": temperature, "max_new_tokens": length, "ignore_eos": True}
    body = json.dumps({"text": prompt, "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"http://{HOST}:{port}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_WITHIN_S) as answer:
        return json.load(answer)


def flush(port: int) -> None:
    """Empty the radix cache, so that every run prefills its prompts."""
    request = urllib.request.Request(f"http://{HOST}:{port}/flush_cache", b"{}", {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=REQUEST_WITHIN_S).close()


def run_all(modes: list[Mode], prompts: list[str], arguments: argparse.Namespace) -> None:
    """All repetitions; the order of the modes turns round from one to the next."""
    for batch_size in arguments.batch_sizes:
        chosen = [prompts[i % len(prompts)] for i in range(max(batch_size, arguments.num_prompts))]
        for repeat in range(arguments.repeats):
            for mode in modes if repeat % 2 == 0 else reversed(modes):
                mode.runs.setdefault(batch_size, []).append(measure(mode, chosen, batch_size, arguments))
            speeds = "  ".join(f"{mode.name} {mode.runs[batch_size][-1].speed:.0f}" for mode in modes)
            say(f"batch {batch_size}, repetition {repeat + 1} of {arguments.repeats}, tok/s: {speeds}")


def report(modes: list[Mode], arguments: argparse.Namespace) -> list[dict]:
    """Print the table; returns its rows."""
    rows = []
    first = modes[0]
    print(
        f"{'batch':>5}  {'mode':<14}{'tok/s':>8}{'tokens/round':>14}" + "".join(f"{'x ' + m.name:>15}" for m in modes)
    )
    for batch_size in arguments.batch_sizes:
        for mode in modes:
            runs = mode.runs[batch_size]
            row = {"batch": batch_size, "mode": mode.name, "tok_s": statistics.median(run.speed for run in runs)}
            prompts = len(runs[0].ids)
            accepted = [(run.tokens - prompts) / run.rounds for run in runs if run.rounds]
            row["tokens_per_round"] = statistics.median(accepted) if accepted else 1.0
            for other in modes:
                pairs = zip(runs, other.runs[batch_size], strict=True)
                row[f"x_{other.name}"] = statistics.median(mine.speed / theirs.speed for mine, theirs in pairs)
            row["same_tokens"] = all(run.ids == first.runs[batch_size][0].ids for run in runs)
            rows.append(row)
            ratios = "".join(f"{row['x_' + other.name]:>15.2f}" for other in modes)
            note = "" if row["same_tokens"] or arguments.temperature > 0 else f"  tokens differ from {first.name}"
            print(f"{batch_size:>5}  {mode.name:<14}{row['tok_s']:>8.0f}{row['tokens_per_round']:>14.2f}{ratios}{note}")
    return rows


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a JSONL file, or those of the tests."""
    if path is None:
        return json.loads((CHECKOUT / "tests" / "support" / "prompts.json").read_text())
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines() if line.strip()]


def main() -> int:
    arguments = parse_arguments()
    end_on_signals()
    try:
        prompts = read_prompts(arguments.prompts)
        with tempfile.TemporaryDirectory(prefix="sglang-ssd-") as folder, servers(arguments, Path(folder)) as modes:
            run_all(modes, prompts, arguments)
    except (ChildFailed, OSError, HTTPException, KeyError, ValueError) as error:
        say(f"launch/bench: {error!r}")
        return 1
    except KeyboardInterrupt:
        say("\nlaunch/bench: interrupted, everything is ended")
        return 130
    rows = report(modes, arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"arguments": vars(arguments), "rows": rows}, default=str, indent=1))
    same = arguments.temperature > 0 or arguments.dtype != "float32" or all(row["same_tokens"] for row in rows)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
