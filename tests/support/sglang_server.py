"""A real SGLang server on the tiny pair, and its HTTP API."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.answers import Answer, Payload, greedy
from tests.support.processes import Server, free_port, wait_until

CHECKOUT = Path(__file__).resolve().parents[2]
TARGET = CHECKOUT / "tests" / "models" / "tiny-target"
DRAFT = CHECKOUT / "tests" / "models" / "tiny-draft"
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

LOOKAHEAD = 4
CHUNK = 64
"""``--chunked-prefill-size``: most prompts of the tests are longer."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}

_START_WITHIN_S = 180.0
_REQUEST_WITHIN_S = 180.0


class Refused(Exception):
    """An HTTP error status; ``body`` is what the server said."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status, self.body = status, body


def launch_command(*flags: str) -> list[str]:
    """Command line of a server on the tiny target."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(TARGET)]
    command += ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "20000", "--random-seed", "1"]
    command += ["--chunked-prefill-size", str(CHUNK), "--chat-template", str(CHAT_TEMPLATE)]
    command += ["--sleep-on-idle", "--skip-server-warmup", "--enable-metrics", "--enable-custom-logit-processor"]
    command += ["--constrained-json-disable-any-whitespace"]  # the tiny target would fill its answers with it
    return [*command, *flags]


def ssd_flags(config: Mapping[str, Any], draft: Path | None = DRAFT) -> list[str]:
    """Flags of SSD; without ``draft``, ``config`` names an endpoint."""
    flags = ["--speculative-algorithm", "SSD", "--speculative-num-steps", str(LOOKAHEAD)]
    flags += ["--speculative-ssd-config", json.dumps(config)]
    return [*flags, "--speculative-draft-model-path", str(draft)] if draft is not None else flags


class SGLangServer:
    """A server that is up. Requests raise `Refused` for an HTTP error status."""

    def __init__(
        self, name: str, flags: Sequence[str], logs: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [*launch_command(*flags), "--port", str(self.port)]
        self.process = Server(name, command, logs / f"{name}-{self.port}.log", {**ENVIRONMENT, **(environment or {})})
        self.process.wait_healthy(f"{self.url}/health", _START_WITHIN_S)

    def generate(self, payload: Payload) -> Answer:
        """One completion."""
        return Answer.of(self.post("/generate", payload))

    def generate_several(self, payload: Payload) -> list[Answer]:
        """The completions of a request with ``n`` or with a list of prompts."""
        return [Answer.of(body) for body in self.post("/generate", payload)]

    def generate_all(self, payloads: Sequence[Payload], concurrency: int = 12) -> list[Answer]:
        """Completions of many requests, ``concurrency`` at once."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(self.generate, payloads))

    def stream(self, payload: Payload) -> Generator[dict[str, Any], None, None]:
        """The chunks of a streamed completion; closing the iterator closes the connection."""
        with self._open("/generate", {**payload, "stream": True}) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[len(b"data: ") :])

    def post(self, path: str, payload: Payload | None = None) -> Any:
        """The JSON answer to a POST; the text if it is not JSON."""
        with self._open(path, payload or {}) as response:
            body = response.read().decode()
        return json.loads(body) if body.startswith(("{", "[")) else body

    def flush(self) -> None:
        """Empty the radix cache."""
        self.post("/flush_cache?timeout=30")

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name with labels."""
        return read_metrics(self.url)

    def is_connected(self) -> bool:
        """Whether a speculator is attached, as the server's metrics say."""
        return total(self.metrics(), "sglang_ssd:connected") == 1

    def wait_connected(self, expected: bool = True, within_s: float = 20.0) -> None:
        """Wait until a speculator is attached (or not), with requests: connections are taken over between rounds."""

        def reached() -> bool:
            self.generate(greedy("def f(x):", 4))
            return self.is_connected() is expected

        wait_until(reached, within_s, self.process.log_end)

    def _open(self, path: str, payload: Payload) -> Any:
        request = urllib.request.Request(
            self.url + path, data=json.dumps(payload).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=_REQUEST_WITHIN_S)
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(error.code, error.read().decode()) from error


def read_metrics(url: str) -> dict[str, float]:
    """Prometheus samples at ``url``/metrics, by name with labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def total(metrics: Mapping[str, float], name: str, *labels: str) -> float:
    """Sum of the samples of a metric whose labels contain all of ``labels``, like ``kind="hit"``."""
    return sum(
        value
        for sample, value in metrics.items()
        if sample.split("{", 1)[0] == name and all(label in sample for label in labels)
    )
