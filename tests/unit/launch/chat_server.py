"""Something that chats like a server of SGLang, and counts like the speculator service in it; starts at once.

It says how many messages the conversation has and repeats the last one, word by word; some questions make it fail.
Arguments: its port, and that of the service's metrics (0: there is none). A file, $CHAT_LOG, gets what it saw.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PORT, METRICS_PORT = int(sys.argv[1]), int(sys.argv[2])
WHO, OTHER = ("ssd", "plain") if METRICS_PORT else ("plain", "ssd")
TOKENS_PER_ROUND = 3 if METRICS_PORT else 1
ROUND_S = 0.005
LOG = Path(os.environ["CHAT_LOG"])
TOO_LONG = {
    "object": "error",
    "message": "The input (9000 tokens) is longer than the model's context length (8192 tokens). Shorten it.",
    "code": 400,
}

COUNTERS = {"hit": 0, "short_hit": 0, "not_predicted": 0, "stopped": 0}
"""Of the service's page."""


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(b"", 200)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        log(request=request, **surroundings())
        match question := request["messages"][-1]["content"]:
            case "too long":
                self.answer(json.dumps(TOO_LONG).encode(), 400)
            case "fail":
                self.answer(b'{"object": "error", "message": "no\\nmemory", "code": 500}', 500)
            case _:
                self.send_response(200)
                self.end_headers()
                try:
                    self.stream(question, request)
                except (BrokenPipeError, ConnectionResetError):
                    log(aborted=question)

    def stream(self, question: str, request: dict[str, Any]) -> None:
        tokens = tokens_of(request["messages"])
        is_cut = request["max_tokens"] < len(tokens)
        tokens = tokens[: request["max_tokens"]]
        self.send(choices=[{"delta": {"role": "assistant", "content": ""}}])
        self.send(choices=[{"delta": {"content": tokens[0]}}])
        for start in range(1, len(tokens), TOKENS_PER_ROUND):
            time.sleep(ROUND_S)
            self.send(choices=[{"delta": {"content": "".join(tokens[start : start + TOKENS_PER_ROUND])}}])
            match question:
                case "late":
                    self.send(error=TOO_LONG)
                case "break off":
                    return
                case "die":
                    os._exit(1)
        self.send(choices=[{"delta": {}, "finish_reason": "length" if is_cut else "stop"}])
        rounds = -(-(len(tokens) - 1) // TOKENS_PER_ROUND)
        if METRICS_PORT:
            COUNTERS["hit"] += rounds - 1
            COUNTERS["not_predicted"] += 1
            COUNTERS["stopped"] += not is_cut
            self.send(choices=[], sglext={"spec_tokens_details": {"spec_verify_ct": rounds}})
        self.send(choices=[], usage={"completion_tokens": len(tokens)})
        self.wfile.write(b"data: [DONE]\n\n")

    def send(self, **event: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def answer(self, body: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Service(Server):
    def do_GET(self) -> None:
        lines = [f'sglang_ssd_speculator_outcomes_total{{kind="{kind}"}} {n}' for kind, n in COUNTERS.items()]
        self.answer("\n".join(lines).encode(), 200)


def tokens_of(messages: list[dict[str, str]]) -> list[str]:
    """Words, and a stop token without text."""
    words = [f"{len(messages)} messages,", " the last:", *(f" {word}" for word in messages[-1]["content"].split())]
    if messages[-1]["content"] == "endless":
        words += [" on"] * 3000
    if WHO == "plain" and "OTHER_TEXT" in os.environ:
        words.append(" or not")
    return [*words, ""]


def surroundings() -> dict[str, Any]:
    """Where this runs and its client does, and whether the other server is stopped (T)."""
    other = LOG.with_suffix(f".{OTHER}")
    state = Path(f"/proc/{other.read_text()}/stat").read_text().rpartition(")")[2].split()[0] if other.exists() else ""
    cores, client_cores = (sorted(os.sched_getaffinity(pid)) for pid in (0, os.getppid()))
    return {"who": WHO, "other": state, "cores": cores, "client_cores": client_cores}


def log(**what: Any) -> None:
    with LOG.open("a") as file:
        file.write(json.dumps(what) + "\n")


LOG.with_suffix(f".{WHO}").write_text(str(os.getpid()))
if METRICS_PORT and "NO_METRICS" not in os.environ:
    service = ThreadingHTTPServer(("127.0.0.1", METRICS_PORT), Service)
    threading.Thread(target=service.serve_forever, daemon=True).start()
ThreadingHTTPServer(("127.0.0.1", PORT), Server).serve_forever()
