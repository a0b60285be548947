"""What cannot work ends the start with one sentence that says what to change, soon and without a traceback.

Mistakes in the options of SSD are in the unit tests of its configuration; one of them stands for all here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import ServerPool
from tests.support.processes import Server, ended_at_exit, free_port, wait_until
from tests.support.service import Service
from tests.support.sglang_server import DRAFT, ENVIRONMENT, LOOKAHEAD, launch_command

WITHIN_S = 90.0
"""Most of it is the import of SGLang, by two servers at a time on a loaded machine."""

SSD = ("--speculative-algorithm", "SSD")
WITH_DRAFT = (*SSD, "--speculative-draft-model-path", str(DRAFT))

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@dataclass(frozen=True, slots=True)
class BadStart:
    """Flags that cannot work, and words that the sentence must contain."""

    flags: tuple[str, ...]
    words: tuple[str, ...]


def with_config(text: str) -> tuple[str, ...]:
    return (*WITH_DRAFT, "--speculative-ssd-config", text)


STARTS = {
    "no draft and no endpoint": BadStart(SSD, ("--speculative-draft-model-path", "--speculative-ssd-endpoint")),
    "missing draft": BadStart((*SSD, "--speculative-draft-model-path", "/no/such/model"), ("/no/such/model",)),
    "pipeline": BadStart((*WITH_DRAFT, "--pp-size", "2"), ("pipeline",)),
    "bad JSON": BadStart(with_config('{"deadline_ms": '), ("--speculative-ssd-config",)),
    "bad fan-out": BadStart(with_config('{"service": {"fan_out": [1, 2]}}'), ("fan",)),
    "Saguaro's C": BadStart(with_config('{"service": {"downweight": 1.5}}'), ("downweight", "0 to 1", "1.5")),
    "backup": BadStart(with_config('{"service": {"backup": "fast"}}'), ("backup", "primary, suffix, empty")),
    "draft KV cells": BadStart(with_config('{"service": {"max_total_tokens": 5}}'), ("max_total_tokens", "at least")),
    "trace file": BadStart(with_config('{"trace": "/no/such/folder/trace.json"}'), ("trace", "cannot be written")),
    "probabilities per token": BadStart(with_config('{"num_kept": 5000}'), ("num_kept", "1024")),
    "endpoint scheme": BadStart((*SSD, "--speculative-ssd-endpoint", "http://127.0.0.1:1"), ("tcp://", "ipc://")),
    "Mamba draft": BadStart((*SSD, "--speculative-draft-model-path", "@mamba"), ("Mamba",)),
    "other vocabulary": BadStart((*SSD, "--speculative-draft-model-path", "@other-size"), ("1000", "2048")),
    "other tokenizer": BadStart((*SSD, "--speculative-draft-model-path", "@other-tokenizer"), ("tokenizer",)),
    "lookahead of the service": BadStart(
        (*SSD, "--speculative-num-steps", "3", "--speculative-ssd-endpoint", "@service"),
        (f"--speculative-num-steps {LOOKAHEAD}", "--lookahead 3"),
    ),
}


def write_drafts(folder: Path) -> dict[str, str]:
    """Draft models that do not fit the target; a config.json and a tokenizer are enough to know."""
    config = json.loads((DRAFT / "config.json").read_text())
    tokenizer = json.loads((DRAFT / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[400:402]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    changes: dict[str, dict[str, Any]] = {
        "mamba": {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16},
        "other-size": {"vocab_size": 1000},
        "other-tokenizer": {},
    }
    for name, change in changes.items():
        shutil.copytree(DRAFT, folder / name)
        (folder / name / "config.json").write_text(json.dumps({**config, **change}))
    (folder / "other-size" / "tokenizer.json").unlink()  # or the vocabulary might be the target's, padded otherwise
    (folder / "other-tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return {f"@{name}": str(folder / name) for name in changes}


@dataclass(frozen=True, slots=True)
class End:
    """How a start ended."""

    code: int | None
    output: str


def attempt(name: str, flags: list[str], logs: Path) -> End:
    """Start a server and wait for its end."""
    log = logs / f"{name.replace(' ', '-')}.log"
    server = Server(name, [*launch_command(*flags), "--port", str(free_port())], log, ENVIRONMENT)
    with ended_at_exit(server):
        wait_until(lambda: server.exit_code is not None, WITHIN_S, server.log_end)
        code = server.exit_code
        wait_until(server.is_gone, 10, lambda: f"left running: {server.group()}")
    return End(code, server.log_text())


@pytest.fixture(scope="module")
def ends(pool: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[End]]]:
    """All starts, two at a time; most of each is the import of SGLang."""
    pool.end_ssd()
    folder = tmp_path_factory.mktemp("bad")
    service = Service(f"tcp://127.0.0.1:{free_port()}", pool.logs)
    places = {**write_drafts(folder), "@service": service.endpoint}
    with ended_at_exit(service.process), ThreadPoolExecutor(2) as executor:
        yield {
            name: executor.submit(attempt, name, [places.get(flag, flag) for flag in bad.flags], folder)
            for name, bad in STARTS.items()
        }
        executor.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", STARTS)
def test_start_is_refused_with_one_sentence(ends: dict[str, Future[End]], name: str) -> None:
    end = ends[name].result(timeout=280)
    assert end.code not in (0, None)
    last = end.output.rstrip().splitlines()[-1]
    assert last.startswith("error: "), end.output[-2000:]
    assert end.output.count("\nerror: ") == 1
    assert "Traceback" not in end.output, end.output[-2000:]
    missing = [word for word in STARTS[name].words if word not in last]
    assert not missing, f"{missing} not in {last!r}"


def test_refused_before_weights_load(ends: dict[str, Future[End]]) -> None:
    loading = [name for name, end in ends.items() if "Load weight begin" in end.result(timeout=280).output]
    assert not loading
