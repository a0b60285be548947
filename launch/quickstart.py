"""See SSD run: the same prompts on a plain SGLang server, then on one with a speculator service beside it.

The two servers run one after the other, so that neither slows the other down and both fit on one machine.
With --chat: talk to a chat model that speculates (`chat.terminal`).

Exit status: 0; 2 for wrong input; 1 if a server failed, or if the text is another one although it must not be.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from chat.hits import hit_rate, outcomes
from chat.settings import DEFAULTS as CHAT_DEFAULTS
from chat.settings import add_flags, check_flags
from children import ChildFailed, end_on_signals, free_port, log_end, running, say

from ssd_proto.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parent.parent
TARGET = CHECKOUT / "tests" / "models" / "tiny-target"
DRAFT = CHECKOUT / "tests" / "models" / "tiny-draft"
DEFAULTS = {"model_path": str(TARGET), "draft_model_path": str(DRAFT), "max_new_tokens": 96}
REQUEST_WITHIN_S = 300.0
HOST = "127.0.0.1"

# The tiny models have read manuals and a standard library: they continue such text, and know nothing.
PROMPTS = (
    'def read_lines(path, encoding=\'utf-8\'):\n    """Return the lines of a file as a list."""\n',
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n",
    "To create a new database table, add a model to the ``models.py`` file of your application.\n\n",
    "The sum of the squares of the elements of an array x is computed with ``numpy.sum(x**2)``.\n\nParameters\n",
    "If the form is valid, the view saves the object and redirects to the success URL. Otherwise, ",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One completed request."""

    tokens: list[int]
    seconds: float
    """From sending the prompt to the last token."""
    rounds: int
    """Verification rounds; 0 without speculation."""

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds

    @property
    def tokens_per_round(self) -> float:
        """Accepted tokens and the bonus token of a round; the prompt's own forward pass gives the first token."""
        return (len(self.tokens) - 1) / self.rounds if self.rounds else 0.0


def parse_arguments() -> argparse.Namespace:
    """The command line with all defaults.

    Raises:
        ConfigError: it does not go together.
    """
    parser = argparse.ArgumentParser(
        prog="launch/quickstart",
        description="Send a few prompts to a plain SGLang server, then to one that speculates with SSD, and compare. "
        "With --chat: talk to a chat model, SmolLM2-135M-Instruct, which is fetched the first time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    absent = argparse.SUPPRESS  # the default depends on --chat
    add("--model-path", default=absent, help="target model (default: tests/models/tiny-target, or the chat's)")
    add(
        "--draft-model-path",
        default=absent,
        help="draft, same vocabulary (default: tests/models/tiny-draft, or the chat's)",
    )
    add("--num-steps", type=int, default=4, help="K, tokens speculated per round")
    add("--max-new-tokens", type=int, default=absent, help="tokens per prompt (default: 96; most of an answer: 256)")
    add("--max-total-tokens", type=int, default=20000, help="KV cache of each server, tokens")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the target")
    add("--draft-device", default="auto", help="cpu or cuda:N; auto: a GPU of its own if there is one")
    add("--dtype", default="auto", help="auto: float32 on a CPU, otherwise as the model says")
    add("--start-timeout", type=float, default=600, help="longest start of a server, seconds")
    add_flags(parser)
    given = vars(parser.parse_args())
    check_flags(given)
    arguments = argparse.Namespace(**{**(CHAT_DEFAULTS if given["chat"] else DEFAULTS), **given})
    resolve_devices(arguments)
    return arguments


def resolve_devices(arguments: argparse.Namespace) -> None:
    """Replace every `auto` by what this machine has."""
    if arguments.device == "auto" or (arguments.device == "cuda" and arguments.draft_device == "auto"):
        import torch  # seconds to import: only when asked to find out

        count = torch.cuda.device_count()
        arguments.device = ("cuda" if count else "cpu") if arguments.device == "auto" else arguments.device
        automatic_draft_device = f"cuda:{min(1, count - 1)}"
    if arguments.draft_device == "auto":
        arguments.draft_device = "cpu" if arguments.device == "cpu" else automatic_draft_device
    if arguments.dtype == "auto" and arguments.device == "cpu":
        arguments.dtype = "float32"


def server_command(arguments: argparse.Namespace, port: int, *speculation: str) -> list[str]:
    """Command line of a SGLang server for the target."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", arguments.model_path, *speculation]
    command += ["--host", HOST, "--port", str(port), "--device", arguments.device, "--dtype", arguments.dtype]
    return [*command, "--max-total-tokens", str(arguments.max_total_tokens), "--max-running-requests", "8"]


def speculator_command(arguments: argparse.Namespace, endpoint: str, http_port: int) -> list[str]:
    """Command line of the speculator service for the draft."""
    command = [sys.executable, "-m", "speculator_service", "--model-path", arguments.draft_model_path]
    command += ["--endpoint", endpoint, "--http-port", str(http_port), "--lookahead", str(arguments.num_steps)]
    command += ["--device", arguments.draft_device, "--dtype", arguments.dtype]
    return [*command, "--max-total-tokens", str(arguments.max_total_tokens)]


def server_environment(arguments: argparse.Namespace) -> dict[str, str]:
    """Our environment; the tiny pair gets one CPU thread per process, since more only slow it down."""
    environment = dict(os.environ, TOKENIZERS_PARALLELISM="false")
    if arguments.model_path == str(TARGET):
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def generate(port: int, prompt: str, max_new_tokens: int, show: Callable[[str], None]) -> Answer:
    """Send one prompt, greedily; ``show`` gets each piece of text as it comes."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = json.dumps({"text": prompt, "sampling_params": sampling, "stream": True}).encode()
    request = urllib.request.Request(
        f"http://{HOST}:{port}/generate", data=body, headers={"Content-Type": "application/json"}
    )
    started, shown, last = time.perf_counter(), 0, None
    with urllib.request.urlopen(request, timeout=REQUEST_WITHIN_S) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            last = json.loads(line[len(b"data: ") :])
            if "error" in last:
                raise ChildFailed(f"the server refused the request: {last['error']}")
            show(last["text"][shown:])
            shown = len(last["text"])
    if last is None:
        raise ChildFailed("the server ended the answer before its first token")
    return Answer(last["output_ids"], time.perf_counter() - started, int(last["meta_info"].get("spec_verify_ct", 0)))


def run_plain(arguments: argparse.Namespace, logs: Path) -> list[Answer]:
    """All prompts without speculation."""
    port = free_port()
    with running(
        "SGLang without speculation",
        server_command(arguments, port),
        log=logs / "plain.log",
        health=f"http://{HOST}:{port}/health",
        ready_within_s=arguments.start_timeout,
        environment=server_environment(arguments),
    ):
        generate(port, PROMPTS[0][:20], 16, show=lambda text: None)  # the first request pays for what is set up late
        answers = []
        for number, prompt in enumerate(PROMPTS, 1):
            answers.append(generate(port, prompt, arguments.max_new_tokens, show=lambda text: None))
            say(f"  prompt {number} of {len(PROMPTS)}: {answers[-1].tokens_per_second:.1f} tok/s")
    return answers


def run_ssd(arguments: argparse.Namespace, logs: Path, plain: list[Answer]) -> list[bool]:
    """All prompts with SSD, streamed to stdout and compared; whether each gave the same tokens."""
    port, http_port = free_port(), free_port()
    endpoint = f"ipc://{logs}/speculator"
    environment = server_environment(arguments)
    speculation = ["--speculative-algorithm", "SSD", "--speculative-draft-model-path", arguments.draft_model_path]
    speculation += ["--speculative-num-steps", str(arguments.num_steps), "--speculative-ssd-endpoint", endpoint]
    speculation += ["--speculative-ssd-config", '{"deadline_ms": 1000}']  # a laptop may be busy with other things
    with (
        running(
            "speculator service",
            speculator_command(arguments, endpoint, http_port),
            log=logs / "speculator.log",
            health=f"http://{HOST}:{http_port}/health",
            ready_within_s=arguments.start_timeout,
            environment=environment,
        ),
        running(
            "SGLang with --speculative-algorithm SSD",
            server_command(arguments, port, *speculation),
            log=logs / "ssd.log",
            health=f"http://{HOST}:{port}/health",
            ready_within_s=arguments.start_timeout,
            environment=environment,
        ),
    ):
        generate(port, PROMPTS[0][:20], 16, show=lambda text: None)
        same = []
        for number, (prompt, reference) in enumerate(zip(PROMPTS, plain, strict=True), 1):
            write(f"\n--- prompt {number} of {len(PROMPTS)} ---\n{prompt}")
            before = outcomes(http_port)
            answer = generate(port, prompt, arguments.max_new_tokens, show=write)
            same.append(answer.tokens == reference.tokens)
            write(f"\n--- {report(answer, reference, hit_rate(before, outcomes(http_port)))}\n")
    return same


def report(answer: Answer, reference: Answer, hits: float) -> str:
    """The line below an answer."""
    if answer.tokens == reference.tokens:
        verdict = "same tokens"
    else:
        pairs = zip(answer.tokens, reference.tokens, strict=False)
        verdict = f"differs from token {next((i for i, (a, b) in enumerate(pairs) if a != b), 'the end')} on"
    return (
        f"{answer.tokens_per_round:.2f} tokens per round, cache hit rate {hits:.0%}, "
        f"{answer.tokens_per_second:.1f} tok/s; without speculation {reference.tokens_per_second:.1f} tok/s, "
        f"ratio {answer.tokens_per_second / reference.tokens_per_second:.2f}; {verdict}"
    )


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def compare(arguments: argparse.Namespace, logs: Path) -> int:
    """All prompts on both servers, one after the other; returns the exit status."""
    plain = run_plain(arguments, logs)
    same = run_ssd(arguments, logs, plain)
    write(f"\n{sum(same)} of {len(same)} prompts gave the same tokens with and without speculation.\n")
    return 0 if all(same) or arguments.dtype != "float32" else 1


def main() -> int:
    end_on_signals()
    with tempfile.TemporaryDirectory(prefix="sglang-ssd-") as folder:
        try:
            arguments = parse_arguments()
            if not arguments.chat:
                return compare(arguments, Path(folder))
            from chat.terminal import chat

            return chat(arguments, Path(folder))
        except ConfigError as error:
            say(f"launch/quickstart: {error}")
            return 2
        except ChildFailed as error:
            say(f"launch/quickstart: {error}")
            return 1
        except (OSError, HTTPException) as error:
            say(f"launch/quickstart: a server does not answer any more: {error!r}")
            for log in sorted(Path(folder).glob("*.log")):
                say(f"\nend of {log.name}:\n{log_end(log)}")
            return 1
        except KeyboardInterrupt:
            say("\nlaunch/quickstart: interrupted, everything is ended")
            return 130


if __name__ == "__main__":
    sys.exit(main())
