from __future__ import annotations

import json
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closed_loop import Models, ScriptedVerifier
from service_process import (
    MODELS,
    REAL,
    TABULAR,
    Connection,
    ServiceProcess,
    eventually,
    hello,
    refusal,
    running,
)
from tabular_service import CONTEXT, tabular_draft

from ssd_proto import PROTOCOL_VERSION
from ssd_proto.control import ControlClient
from ssd_proto.host import new_incarnation
from ssd_proto.messages import Bye, Info, InfoRequest, ModelFingerprint, Ping, Pong

kinds = pytest.mark.parametrize("kind", ["shm", "zmq"])


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running(TABULAR, "--expiry-s", "2", "--backup", "primary", "--no-adapt-depth", "--no-rest") as process:
        yield process


def shared_memory(service: ServiceProcess) -> set[str]:
    """Names of the memory that this service has made."""
    return {path.name for path in Path("/dev/shm").glob(f"sglang_ssd_{service.process.pid}_*")}


def get(service: ServiceProcess, page: str) -> str:
    with urllib.request.urlopen(service.http + page, timeout=10) as answer:
        return answer.read().decode()


def metric(service: ServiceProcess, name: str) -> float:
    lines = [
        line for line in get(service, "/metrics").splitlines() if line.startswith(f"sglang_ssd_speculator_{name} ")
    ]
    return float(lines[0].split()[-1])


def info(service: ServiceProcess) -> dict[str, Any]:
    return json.loads(get(service, "/info"))


def speculate(connection: Connection, models: Models, prompts: list[list[int]], wanted: int) -> ScriptedVerifier:
    """Run sequences to their end; proposals and text are checked on the way."""
    rng = np.random.default_rng(1)
    verifier = ScriptedVerifier(connection.channel, models, rng, lambda: time.sleep(0.002), CONTEXT)
    verifier.steps_while_verifying = 10
    for slot, prompt in enumerate(prompts):
        verifier.open(slot, prompt, wanted)
    while verifier.sequences:
        verifier.round()
        for slot, sequence in list(verifier.sequences.items()):
            if sequence.finished:
                count = len(sequence.text) - len(sequence.prompt)
                assert verifier.close(slot).text == models.autoregressive(sequence.prompt, count)
    return verifier


@kinds
def test_rounds_through_a_real_process(service: ServiceProcess, kind: str) -> None:
    opened = metric(service, "sequences_opened_total")
    with Connection(service.endpoint, kind) as connection:
        eventually(lambda: info(service)["num_verifiers"] == 1)
        eventually(lambda: not shared_memory(service))  # the name is gone as soon as both have mapped it
        models = Models(tabular_draft(1, 0, 4))
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 2048, length).tolist() for length in (5, 30, 77, 12)]
        verifier = speculate(connection, models, prompts, wanted=40)
        assert sum(verifier.kinds.values()) > 40
        eventually(lambda: metric(service, "sequences_opened_total") == opened + 4)
        eventually(lambda: metric(service, "engine_slots_used") == 0)
    eventually(lambda: info(service)["num_verifiers"] == 0)
    eventually(lambda: metric(service, "verifiers") == 0)


def test_pages(service: ServiceProcess) -> None:
    assert get(service, "/health") == "ok\n"
    page = info(service)
    assert page["state"] == "ready"
    assert page["lookahead"] == 4
    assert sum(page["fan_out"]) == 3 * 5  # by default a budget of three for every k, planned
    assert page["draft"]["vocab_size"] == 2048
    names = get(service, "/metrics")
    for name in ('outcomes_total{kind="hit"}', 'steps_total{kind="table"}', 'accepted_total{k="4"}', "kv_free_tokens"):
        assert "sglang_ssd_speculator_" + name in names
    with pytest.raises(urllib.error.HTTPError):
        get(service, "/nothing")


def test_refusals_say_what_to_change(service: ServiceProcess) -> None:
    assert "--lookahead 3" in refusal(service.endpoint, lookahead=3)
    assert "another tokenizer" in refusal(service.endpoint, target=ModelFingerprint("t", "LlamaForCausalLM", 2048, "x"))
    assert "2000" in refusal(service.endpoint, target=ModelFingerprint("t", "LlamaForCausalLM", 2000, ""))
    assert "--max-running-requests" in refusal(service.endpoint, max_slots=0)
    assert "--max-running-requests" in refusal(service.endpoint, max_slots=1 << 17)
    assert "zmq" in refusal(service.endpoint, host="elsewhere")
    assert "zmq" in refusal(service.endpoint, channels=["pigeon"])
    assert "version" in refusal(service.endpoint, version=999)


def test_silent_verifier_expires(service: ServiceProcess) -> None:
    with Connection(service.endpoint, "shm") as connection:
        connection.channel.open_sequence(0, 1, np.arange(5))
        eventually(lambda: metric(service, "engine_slots_used") == 1)
        assert connection.control.request(Ping(connection.incarnation), 5.0) == Pong(connection.incarnation, True)
        eventually(lambda: metric(service, "engine_slots_used") == 0, timeout_s=10.0)
        assert connection.control.request(Ping(connection.incarnation), 5.0) == Pong(connection.incarnation, False)


def test_pings_keep_a_verifier(service: ServiceProcess) -> None:
    with Connection(service.endpoint, "zmq") as connection:
        end = time.monotonic() + 3.0  # longer than the expiry
        while time.monotonic() < end:
            assert connection.control.request(Ping(connection.incarnation), 5.0) == Pong(connection.incarnation, True)
            time.sleep(0.2)


def test_unknown_incarnations_and_info(service: ServiceProcess) -> None:
    with ControlClient(service.endpoint) as control:
        assert control.request(Ping(12345), 5.0) == Pong(12345, False)
        control.send(Bye(new_incarnation()))
        answer = control.request(InfoRequest(PROTOCOL_VERSION), 5.0)
    assert isinstance(answer, Info)
    assert answer.channels == ["shm", "zmq"]


def test_verifier_that_never_attaches_leaves_no_memory(service: ServiceProcess) -> None:
    with ControlClient(service.endpoint) as control:
        control.request(hello(new_incarnation()), 10.0)
    assert len(shared_memory(service)) == 1
    eventually(lambda: not shared_memory(service), timeout_s=10.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_cleanly(number: signal.Signals) -> None:
    with running(TABULAR) as service, Connection(service.endpoint, "shm") as connection:
        connection.channel.open_sequence(0, 1, np.arange(5))
        began = time.monotonic()
        service.process.send_signal(number)
        code, output, errors = service.end()
        assert time.monotonic() - began < 5.0
        assert (code, output) == (0, "")
        assert "Traceback" not in errors
        assert not shared_memory(service)


def test_it_ends_with_stdin() -> None:
    with running(TABULAR, "--exit-with-stdin") as service:
        assert service.process.stdin is not None
        service.process.stdin.close()
        service.process.stdin = None
        assert service.end()[0] == 0


def test_it_leaves_nothing_when_killed() -> None:
    with running(TABULAR) as service, Connection(service.endpoint, "shm"):
        eventually(lambda: info(service)["num_verifiers"] == 1)
        eventually(lambda: not shared_memory(service))
        service.process.kill()
        service.process.wait(10.0)
        assert not shared_memory(service)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model-path", "/does/not/exist"], "/does/not/exist"),
        (["--lookahead", "17"], "lookahead must be 1 to 16"),
        (["--fan-out", "1,2"], "5 entries"),
        (["--fan-out", "many"], "fan_out"),
        (["--fan-out", "300"], "1024"),
        (["--endpoint", "http://x"], "endpoint"),
        (["--device", "abacus"], "abacus"),
        (["--max-sequences", "0"], "max_sequences"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--config", "/does/not/exist.toml"], "exist.toml"),
        (["--endpoint", "tcp://127.0.0.1:TAKEN"], "address already in use"),
        (["--http-port", "TAKEN"], "--http-port"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], words: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        service = ServiceProcess(
            REAL,
            "--endpoint",
            "tcp://127.0.0.1:0",
            "--http-port",
            "0",
            *(flag.replace("TAKEN", port) for flag in flags),
        )
        code, output, errors = service.end(60.0)
    assert code == 2
    assert output == ""
    assert words in errors
    assert errors.count("\n") == 1
    assert errors.startswith("sglang-ssd-speculator: error: ")


def test_fault_is_exit_code_1() -> None:
    service = ServiceProcess(TABULAR, "--fail", "--endpoint", "tcp://127.0.0.1:0", "--http-port", "-1")
    code, output, errors = service.end(60.0)
    assert (code, output) == (1, "")
    assert "the engine cannot be made" in errors


def test_a_termination_that_is_swallowed_while_loading_ends_it_after_loading() -> None:
    service = ServiceProcess(TABULAR, "--terminated", "--endpoint", "tcp://127.0.0.1:0", "--http-port", "-1")
    code, output, errors = service.end(60.0)
    assert (code, output) == (0, "")
    assert "Traceback" not in errors


@pytest.mark.e2e
def test_the_real_draft_model() -> None:
    oracle = HuggingFaceModels()
    flags = ("--device", "cpu", "--dtype", "float32", "--max-sequences", "4", "--max-total-tokens", "8192")
    with running(REAL, *flags, timeout_s=180.0) as service:
        for kind in ("shm", "zmq"):
            prompts = [oracle.encode(text) for text in ("def add(a, b):\n    return", "import os\n\n", "class A:\n")]
            with Connection(service.endpoint, kind) as connection:
                verifier = speculate(connection, oracle, prompts, wanted=24)  # type: ignore[arg-type]
            assert sum(verifier.kinds.values()) > 10
        eventually(lambda: metric(service, "engine_slots_used") == 0)
        service.process.send_signal(signal.SIGTERM)
        assert service.end(30.0)[0] == 0


class HuggingFaceModels:
    """The oracle of the tiny pair, without KV cache."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        self._target, self.draft = (
            AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
            for name in ("tiny-target", "tiny-draft")
        )
        self.draft.vocab_size = 2048
        self._tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-target")

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def _next(self, model: Any, text: list[int]) -> int:
        with self._torch.inference_mode():
            return int(model(self._torch.tensor([text])).logits[0, -1].argmax())

    def target(self, text: list[int]) -> int:
        return self._next(self._target, text)

    def continuation(self, text: list[int], count: int) -> list[int]:
        chain: list[int] = []
        for _ in range(count):
            chain.append(self._next(self.draft, [*text, *chain]))
        return chain

    def autoregressive(self, prompt: list[int], count: int) -> list[int]:
        text = list(prompt)
        for _ in range(count):
            text.append(self.target(text))
        return text
