"""launch/quickstart --chat with servers that only look like real ones: talks, how they end, what is shown and sent."""

from __future__ import annotations

import argparse
import contextlib
import doctest
import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
LAUNCH = CHECKOUT / "launch"
sys.path.append(str(LAUNCH))  # launch/ is not a package

from chat import servers, terminal  # noqa: E402
from chat.settings import DEFAULTS, Settings, make_settings  # noqa: E402

SERVER = Path(__file__).with_name("chat_server.py")
SCRIPT = f"""
import os, sys, types
sys.path[:0] = [{str(LAUNCH)!r}]
import quickstart
from chat import servers

def chat_pair(say):
    say("making the pair")
    return "the-target", "the-draft", "the-map"

def command(settings, port, metrics_port):
    if metrics_port is None and "NO_PLAIN" in os.environ:
        return [sys.executable, "-c", "print('no second server'); raise SystemExit(3)"]
    words = real(settings, port, metrics_port)
    assert ("the-target" in words, "the-draft" in words) == (True, metrics_port is not None)
    return [sys.executable, {str(SERVER)!r}, str(port), str(metrics_port or 0), "sglang::scheduler"]

sys.modules["chat.pair"] = types.SimpleNamespace(chat_pair=chat_pair)
real, servers._command = servers._command, command
sys.argv[0] = "launch/quickstart"
sys.exit(quickstart.main())
"""
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def start(log: Path, *arguments: str, mode: tuple[str, ...] = ("--chat",), **options: Any) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'proto'}", "CHAT_LOG": str(log), "TERM": "dumb"}
    environment |= options.pop("environment", {})
    command = [sys.executable, "-c", SCRIPT, *mode, "--device", "cpu", *arguments]
    return subprocess.Popen(command, env=environment, **options)


def run(
    log: Path, *arguments: str, said: str = "", mode: tuple[str, ...] = ("--chat",), **environment: str
) -> tuple[int, str, str]:
    with ended(start(log, *arguments, mode=mode, environment=environment, **PIPES)) as script:
        output, errors = script.communicate(said.encode(errors="surrogateescape"), timeout=60)
    assert b"Traceback" not in errors, errors.decode()
    assert left() == []
    return script.returncode, output.decode(), errors.decode()


@contextlib.contextmanager
def ended(script: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield script
    finally:
        script.kill()
        script.wait()


def left() -> list[int]:
    """Servers that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(SERVER) in (folder / "cmdline").read_text().split("\0"):
                found.append(int(folder.name))
    return found


def seen(log: Path) -> list[dict[str, Any]]:
    """What the servers saw after their warm-up."""
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return [entry for entry in entries if entry.get("request", {}).get("messages", [{}])[-1].get("content") != "Hello"]


def conversations(log: Path) -> list[list[str]]:
    """The messages of each request."""
    return [[m["content"] for m in entry["request"]["messages"]] for entry in seen(log) if "request" in entry]


def wait_for(condition: Any, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class TestTalk:
    def test_questions_of_the_command_line(self, log: Path) -> None:
        code, output, errors = run(log, "--ask", "a b c d", "--ask", " e f ", "--temperature", "0.5")
        assert code == 0, errors
        assert "making the pair" in errors
        assert "> a b c d\n1 messages, the last: a b c d\n--- " in output
        assert "> e f\n3 messages, the last: e f\n--- " in output
        # 7 tokens with the stop token: 2 rounds after the first token, of which one hit; the end is no miss.
        pattern = r"--- 7 tokens, the first after \d+\.\d\d s, then \d+\.\d tok/s; cache hit rate 50%, 3.00 tokens"
        assert re.search(pattern, output)
        assert "--- 5 tokens, " in output
        assert conversations(log) == [["a b c d"], ["a b c d", "1 messages, the last: a b c d", "e f"]]
        request = seen(log)[0]["request"]
        assert request["messages"] == [{"role": "user", "content": "a b c d"}]
        assert (request["temperature"], request["max_tokens"], request["stream"]) == (0.5, 256, True)
        assert request["stream_options"] == {"include_usage": True}

    def test_lines_of_stdin(self, log: Path) -> None:
        code, output, _ = run(log, said="one\n\n  \n/new\ntwo\n/quit\nthree\n")
        assert code == 0
        assert conversations(log) == [["one"], ["two"]]
        assert "--- a new conversation\n" in output
        assert "three" not in output

    def test_the_last_line_needs_no_newline(self, log: Path) -> None:
        assert run(log, said="one\ntwö")[0] == 0
        assert conversations(log)[1][2] == "twö"

    def test_bytes_that_are_no_text_are_replaced(self, log: Path) -> None:
        assert run(log, "--ask", "a\udcff", said="")[0] == 0
        assert run(log, said="b\udcff")[0] == 0
        assert [talk[-1] for talk in conversations(log)] == ["a?", "b\ufffd"]

    def test_cut_answers(self, log: Path) -> None:
        _, output, _ = run(log, "--max-new-tokens", "4", "--ask", "a b c d")
        assert "last: a b\n--- 4 tokens (cut at --max-new-tokens), " in output
        assert "cache hit rate 0%, 3.00 tokens per round" in output

    def test_a_speculator_that_does_not_answer_ends_nothing(self, log: Path) -> None:
        code, output, _ = run(log, "--ask", "a b c d", NO_METRICS="")
        assert code == 0
        assert "tok/s; the speculator's counts are not to be had, 3.00 tokens per round" in output


class TestComparison:
    def test_same_text(self, log: Path) -> None:
        code, output, errors = run(log, "--compare", "--ask", "a b c d e f g", "--ask", "h")
        assert code == 0, errors
        assert len(re.findall(r"--- without speculation: same text, \d+\.\d tok/s, ratio \d\.\d\d\n", output)) == 2
        assert output.count("1 messages, the last: a b") == 1
        ratio = float(re.findall(r"ratio (\S+)", output)[0])
        assert 1.3 < ratio < 6  # rounds take as long as steps, and yield three tokens
        entries = seen(log)
        assert [entry["who"] for entry in entries] == ["ssd", "plain"] * 2
        assert entries[0]["request"] == entries[1]["request"]
        assert entries[2]["request"] == entries[3]["request"]
        assert {entry["other"] for entry in entries} == {"T"}

    def test_another_text_is_an_error_at_temperature_0(self, log: Path) -> None:
        code, output, errors = run(log, "--compare", "--ask", "a", OTHER_TEXT="")
        assert code == 1
        assert "--- without speculation: another text from character 24 on, " in output
        assert "\n1 messages, the last: a or not\n" in output
        assert "1 of 1 answers have another text without speculation, although" in errors

    def test_and_none_above(self, log: Path) -> None:
        code, output, _ = run(log, "--compare", "--temperature", "1", "--ask", "a", OTHER_TEXT="")
        assert code == 0
        assert "another text, drawn anew, " in output

    @pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
    def test_the_target_has_a_core_of_its_own(self, log: Path) -> None:
        run(log, "--compare", "--ask", "a")
        first, *others = sorted(os.sched_getaffinity(0))
        for entry in seen(log):
            assert entry["cores"] == [first]
            assert entry["client_cores"] == others

    def test_a_second_server_that_does_not_start(self, log: Path) -> None:
        """The first one is stopped then, and ends all the same."""
        code, _, errors = run(log, "--compare", "--ask", "a", NO_PLAIN="")
        assert code == 1
        assert "launch/quickstart: SGLang without speculation ended with exit status 3:\nno second server" in errors


class TestTrouble:
    @pytest.mark.parametrize("question", ["too long", "late"])
    def test_a_refused_question_is_told_and_the_talk_goes_on(self, log: Path, question: str) -> None:
        code, output, _ = run(log, said=f"one\n{question}\n/new\ntwo\n")
        assert code == 2
        reason = "The input (9000 tokens) is longer than the model's context length (8192 tokens)"
        assert f"--- The server refuses this ({reason}): say /new to begin a new conversation.\n" in output
        assert conversations(log)[-1] == ["two"]

    def test_a_refused_question_is_no_part_of_the_talk(self, log: Path) -> None:
        run(log, said="one\ntoo long\ntwo\n")
        assert conversations(log)[-1] == ["one", "1 messages, the last: one", "two"]

    @pytest.mark.parametrize(
        ("question", "words"),
        [
            ("fail", "launch/quickstart: the server failed to answer: no memory"),
            ("break off", "launch/quickstart: the server ended within an answer"),
            ("die", "launch/quickstart: the server ended within an answer"),
        ],
    )
    def test_failing_servers(self, log: Path, question: str, words: str) -> None:
        code, output, errors = run(log, said=f"one\n{question}\ntwo\n")
        assert code == 1
        assert words in errors
        assert "> two" not in output

    def test_a_server_that_is_gone(self, log: Path) -> None:
        with ended(start(log, **PIPES)) as script:
            assert script.stdin is not None
            script.stdin.write(b"one\n")
            script.stdin.flush()
            wait_for(lambda: log.exists() and seen(log))
            os.kill(int(log.with_suffix(".ssd").read_text()), signal.SIGKILL)
            wait_for(lambda: left() == [])
            _, errors = script.communicate(b"two\n", timeout=30)
        assert script.returncode == 1
        assert re.search(b"launch/quickstart: (a server does not answer any more|the server ended within)", errors)
        assert b"Traceback" not in errors

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signals_end_everything(self, log: Path, number: signal.Signals) -> None:
        """One server is stopped at that time."""
        with ended(start(log, "--compare", "--max-new-tokens", "3000", "--ask", "endless", **PIPES)) as script:
            wait_for(lambda: log.exists() and seen(log))
            assert len(left()) == 2
            script.send_signal(number)
            _, errors = script.communicate(timeout=30)
        assert script.returncode == (130 if number == signal.SIGINT else 143)
        assert b"Traceback" not in errors
        assert left() == []

    def test_flags_of_a_chat_need_one(self, log: Path) -> None:
        code, output, errors = run(log, "--ask", "a", mode=())
        assert (code, output, errors) == (2, "", "launch/quickstart: --ask belongs to a chat: give --chat as well.\n")

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--model-path", "a"], "--model-path needs --draft-model-path beside it: name both"),
            (["--draft-model-path", "a"], "--draft-model-path needs --model-path beside it: name both"),
            (["--model-path", "./nowhere", "--draft-model-path", "a"], "There is no model in ./nowhere: name a folder"),
            (["--num-steps", "17"], "--num-steps is 17: choose from 1 to 16."),
            (["--temperature", "-1"], "--temperature is -1: choose from 0 to 10."),
            (["--max-new-tokens", "0"], "--max-new-tokens is 0: choose from 1 to"),
        ],
    )
    def test_wrong_flags(self, log: Path, flags: list[str], words: str) -> None:
        code, output, errors = run(log, "--ask", "a", *flags)
        assert code == 2
        assert errors.startswith(f"launch/quickstart: {words}")
        assert errors.count("\n") == 1
        assert output == ""
        assert not log.exists()


class Typist:
    """A terminal with a chat in it, and what is seen there."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._mine, theirs = os.openpty()
        self._seen = ""
        self.script = start(log, *arguments, preexec_fn=lambda: os.login_tty(theirs), pass_fds=[theirs])
        os.close(theirs)

    def type(self, keys: str) -> None:
        os.write(self._mine, keys.encode())

    def wait_for(self, words: str, within_s: float = 30.0) -> None:
        """Read on until ``words`` are there, and forget everything up to them."""
        deadline = time.monotonic() + within_s
        while words not in self._seen:
            assert select.select([self._mine], [], [], max(0.0, deadline - time.monotonic()))[0], self._seen
            try:
                self._seen += os.read(self._mine, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                raise AssertionError(self._seen) from None
        self._seen = self._seen.partition(words)[2]

    def wait_for_end(self) -> int:
        """The exit status."""
        return self.script.wait(30)

    def close(self) -> None:
        self.script.kill()
        self.script.wait()
        os.close(self._mine)


class TestTerminal:
    def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(self, log: Path) -> None:
        with contextlib.closing(Typist(log, "--max-new-tokens", "3000")) as typist:
            typist.wait_for("Ctrl-C stops an answer.")
            typist.wait_for("> ")
            typist.type("endless\n")
            typist.wait_for("the last: endless on on")
            typist.type("\x03")
            typist.wait_for("--- stopped")
            typist.wait_for("> ")
            wait_for(lambda: any(entry.get("aborted") == "endless" for entry in seen(log)))
            typist.type("\n   \ntwo words\n")
            typist.wait_for("3 messages, the last: two words")
            typist.wait_for("tokens per round")
            typist.wait_for("> ")
            typist.type("\x04")
            assert typist.wait_for_end() == 0
        _, first, _ = conversations(log)[-1]
        assert first.startswith("1 messages, the last: endless on on")
        assert len(first) < 3 * 2999
        assert left() == []

    def test_ctrl_c_stops_a_comparison(self, log: Path) -> None:
        with contextlib.closing(Typist(log, "--max-new-tokens", "900", "--compare")) as typist:
            typist.wait_for("> ")
            typist.type("endless\n")
            typist.wait_for("900 tokens (cut at --max-new-tokens)")
            wait_for(lambda: seen(log)[-1]["who"] == "plain")
            typist.type("\x03")
            typist.wait_for("--- stopped")
            wait_for(lambda: any(entry.get("aborted") == "endless" for entry in seen(log)))
            typist.type("two words\n")
            typist.wait_for("3 messages, the last: two words")
            typist.wait_for("same text")
            typist.type("/quit\n")
            assert typist.wait_for_end() == 0
        assert left() == []

    def test_ctrl_c_at_the_prompt_ends(self, log: Path) -> None:
        with contextlib.closing(Typist(log)) as typist:
            typist.wait_for("> ")
            typist.type("\x03")
            typist.wait_for("interrupted, everything is ended")
            assert typist.wait_for_end() == 130
        assert left() == []

    def test_a_refused_question_is_no_error_of_a_person(self, log: Path) -> None:
        with contextlib.closing(Typist(log)) as typist:
            typist.wait_for("> ")
            typist.type("too long\n")
            typist.wait_for("say /new to begin a new conversation.")
            typist.type("/quit\n")
            assert typist.wait_for_end() == 0


def settings_of(**given: Any) -> Settings:
    others = {"num_steps": 4, "max_total_tokens": 20000, "start_timeout": 600.0, "dtype": "float32"}
    devices = {"device": "cpu", "draft_device": "cpu"}
    models = {"model_path": "org/target", "draft_model_path": "org/draft"}
    return make_settings(argparse.Namespace(**{**DEFAULTS, **others, **devices, **models, **given}))


class TestServers:
    def test_command_with_speculation(self) -> None:
        words = servers._command(settings_of(num_steps=6), 1234, 1235)
        assert words[words.index("--model-path") + 1] == "org/target"
        assert words[words.index("--speculative-draft-model-path") + 1] == "org/draft"
        assert words[words.index("--speculative-num-steps") + 1] == "6"
        assert "--speculative-token-map" not in words
        options = json.loads(words[words.index("--speculative-ssd-config") + 1])
        assert options["service"]["http_port"] == 1235
        assert options["service"]["max_total_tokens"] == 20000

    def test_command_without(self) -> None:
        words = servers._command(settings_of(), 1234, None)
        assert words[words.index("--port") + 1] == "1234"
        assert not [word for word in words if "speculative" in word]

    def test_the_pair_has_a_token_map_and_one_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setitem(sys.modules, "chat.pair", argparse.Namespace(chat_pair=lambda say: ("t", "d", "map")))
        settings = settings_of(model_path=None, draft_model_path=None)
        words = servers._command(settings, 1234, 1235)
        assert words[words.index("--speculative-token-map") + 1] == "map"
        assert servers._environment(settings)["OMP_NUM_THREADS"] == "1"
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        settings = settings_of(model_path=None, draft_model_path=None)
        assert servers._environment(settings)["OMP_NUM_THREADS"] == "2"

    @pytest.mark.parametrize(
        ("num_cores", "threads", "target", "others", "service_threads"),
        [
            (1, None, (0,), (0,), 1),
            (2, None, (0,), (1,), 1),
            (4, None, (0, 1, 2), (3,), 1),
            (4, "2", (0, 1), (2, 3), 2),
            (2, "2", (0, 1), (0, 1), 2),
            (4, "3,1", (0, 1, 2), (3,), 1),
        ],
    )
    def test_cores(
        self,
        monkeypatch: pytest.MonkeyPatch,
        num_cores: int,
        threads: str | None,
        target: tuple[int, ...],
        others: tuple[int, ...],
        service_threads: int,
    ) -> None:
        """Of models of one's own; target and service never share a core that they need not share."""
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if threads is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        settings = settings_of()
        assert (settings.target_cores, settings.other_cores) == (target, others)
        words = servers._command(settings, 1234, 1235)
        service = json.loads(words[words.index("--speculative-ssd-config") + 1])["service"]
        assert service["threads"] == service_threads

    def test_on_gpus(self) -> None:
        settings = settings_of(device="cuda", draft_device="cuda:1", dtype="auto")
        words = servers._command(settings, 1234, 1235)
        service = json.loads(words[words.index("--speculative-ssd-config") + 1])["service"]
        assert service["device"] == "cuda:1"
        assert "threads" not in service
        assert not settings.must_agree

    def test_no_second_server_is_started_without_memory_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(servers, "memory_bytes", lambda leader: 3_000_000_000)
        monkeypatch.setattr(servers, "available_memory_bytes", lambda: 2_000_000_000)
        words = r"^The server without speculation needs up to 3.0 GB and 2.0 GB are free: leave --compare out, or lower"
        with pytest.raises(servers.ConfigError, match=words):
            servers._check_memory(servers.Server(1, 2, 3))

    def test_interrupts_wait_for_signals_to_be_sent(self) -> None:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            with servers._undisturbed():
                signal.raise_signal(signal.SIGINT)
                reached = True
            raise AssertionError
        assert reached
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("name", ["report", "hits"])
def test_examples_in_docstrings_are_true(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"chat.{name}"))
    assert found.attempted
    assert not found.failed


def test_counts_of_a_speculator_that_was_started_again_are_not_used() -> None:
    assert terminal._hit_rate({"hit": 2}, {"hit": 5, "not_predicted": 1}) == 0.75
    assert terminal._hit_rate({"hit": 20}, {"hit": 5, "not_predicted": 1}) is None
    assert terminal._hit_rate(None, {"hit": 5}) is None
    assert terminal._hit_rate({"hit": 5}, None) is None
