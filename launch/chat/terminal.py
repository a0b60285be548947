"""The conversation: questions from the terminal, answers as they come, and below each how it was made."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from io import TextIOWrapper
from pathlib import Path

from children import say

from chat.client import Answer, Message, Refused, ask
from chat.hits import hit_rate, outcomes
from chat.report import answer_line, comparison_line
from chat.servers import Server, Servers, servers
from chat.settings import Settings, make_settings
from ssd_proto.errors import ConfigError

NEW, QUIT = "/new", "/quit"
_PROMPT = "\n> "
_HELP = f"{NEW} begins a new conversation, {QUIT} or Ctrl-D ends, Ctrl-C stops an answer.\n"
_WARM_UP = "Hello"
_WARM_UP_TOKENS = 16


def chat(arguments: argparse.Namespace, logs: Path) -> int:
    """Start the servers, talk, end them.

    Returns:
        The exit status: 0; 1 if speculation changed a text that it must not change; 2 if a question that was not
        typed by a person was refused.

    Raises:
        ConfigError: something must be changed first; the message says what.
        ChildFailed: a server failed.
    """
    settings = make_settings(arguments)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # what the terminal cannot show must not end the chat
    with servers(settings, logs) as started:
        for server in started.all:
            with started.alone(server):
                _warm_up(server, settings)
        is_typed = not settings.questions and sys.stdin is not None and sys.stdin.isatty()
        return _converse(Conversation(started, settings), _questions(settings.questions, is_typed), is_typed)


class Conversation:
    """What was said so far, and by whom."""

    def __init__(self, servers: Servers, settings: Settings) -> None:
        self._servers, self._settings = servers, settings
        self._messages: list[Message] = []
        self._num_compared = self._num_different = 0

    def begin_anew(self) -> None:
        """Forget what was said."""
        self._messages = []

    def ask(self, question: str) -> None:
        """Have it answered, on stdout. What was heard of an answer that is interrupted stays a part of the talk.

        Raises:
            Refused: the server does not answer this; the conversation is what it was.
            ChildFailed: the server failed.
        """
        asked = [*self._messages, {"role": "user", "content": question}]
        heard: list[str] = []

        def show(piece: str) -> None:
            heard.append(piece)
            write(piece)

        try:
            with self._servers.alone(self._servers.ssd):
                answer, hits = self._answer(asked, show)
        finally:
            if heard:
                self._messages = [*asked, {"role": "assistant", "content": "".join(heard)}]
        write(f"\n--- {answer_line(answer, hits)}\n")
        if self._servers.plain is not None:
            self._compare(self._servers.plain, asked, answer)

    def verdict(self) -> int:
        """Exit status: 1 if a text differs although it must not."""
        if not (self._num_different and self._settings.must_agree):
            return 0
        say(
            f"launch/quickstart: {self._num_different} of {self._num_compared} answers have another text without "
            "speculation, although at temperature 0 in float32 they must be the same"
        )
        return 1

    def _answer(self, asked: Sequence[Message], show: Callable[[str], None]) -> tuple[Answer, float | None]:
        before = _outcomes(self._servers.ssd)
        answer = self._ask(self._servers.ssd, asked, show)
        return answer, _hit_rate(before, _outcomes(self._servers.ssd))

    def _compare(self, plain: Server, asked: Sequence[Message], answer: Answer) -> None:
        with self._servers.alone(plain):
            other = self._ask(plain, asked, lambda piece: None)
        write(f"--- {comparison_line(answer, other, self._settings.temperature)}\n")
        self._num_compared += 1
        if other.text != answer.text:
            self._num_different += 1
            write(f"{other.text}\n")

    def _ask(self, server: Server, asked: Sequence[Message], show: Callable[[str], None]) -> Answer:
        return ask(server.port, asked, self._settings.temperature, self._settings.max_new_tokens, show)


def write(text: str) -> None:
    """Onto stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _converse(conversation: Conversation, questions: Iterator[str], is_typed: bool) -> int:
    """Answer all ``questions``; returns the exit status."""
    num_refused = 0
    for question in questions:
        if question == QUIT:
            break
        if question == NEW:
            conversation.begin_anew()
            write("--- a new conversation\n")
        elif question:
            try:
                conversation.ask(question)
            except Refused as reason:
                num_refused += 1
                write(f"--- The server refuses this ({reason}): say {NEW} to begin a new conversation.\n")
            except KeyboardInterrupt:
                if not is_typed:
                    raise
                write("\n--- stopped\n")
    if verdict := conversation.verdict():
        return verdict
    return 2 if num_refused and not is_typed else 0


def _questions(asked: Sequence[str], is_typed: bool) -> Iterator[str]:
    """Lines without surrounding spaces: those of the command line, typed ones, or those of stdin."""
    if is_typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() then edits the line and has a history
        write(_HELP)
        with contextlib.suppress(EOFError):
            while True:
                yield _clean(input(_PROMPT))
        write("\n")
        return
    for line in asked or sys.stdin or ():
        write(f"{_PROMPT}{_clean(line)}\n")
        yield _clean(line)


def _clean(line: str) -> str:
    """Without surrounding spaces and bytes that were no UTF-8, which Python keeps as half characters."""
    return line.encode(errors="replace").decode().strip()


def _warm_up(server: Server, settings: Settings) -> None:
    """The first request pays for what is set up late."""
    try:
        ask(server.port, [{"role": "user", "content": _WARM_UP}], 0.0, _WARM_UP_TOKENS, lambda piece: None)
    except Refused as reason:
        raise ConfigError(f"{settings.target} does not chat ({reason}): name a model with a chat template.") from reason


def _outcomes(server: Server) -> dict[str, float] | None:
    """Of the server's speculator; None if it does not answer, since its death costs speed and nothing else."""
    try:
        return outcomes(server.metrics_port) if server.metrics_port is not None else None
    except (OSError, HTTPException):
        return None


def _hit_rate(before: dict[str, float] | None, after: dict[str, float] | None) -> float | None:
    """None if it is not known: a speculator that was started again counts from 0."""
    if before is None or after is None or any(after.get(kind, 0.0) < count for kind, count in before.items()):
        return None
    return hit_rate(before, after)
