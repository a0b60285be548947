"""Something that answers like a server of SGLang, and like the speculator service beside it; starts at once.

Arguments: its port, that of the service's metrics (0: there is none), the seconds of a token, and a tag of its tokens.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT, METRICS_PORT, TOKEN_S, TAG = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
TOKENS_PER_ROUND = 4 if METRICS_PORT else 1

LOCK = threading.Lock()
COUNTERS = {
    f'sglang_ssd_speculator_{name}_total{{{label}="{value}"}}': 0.0
    for name, label, values in (
        ("outcomes", "kind", ("hit", "short_hit", "not_predicted")),
        ("accepted", "k", "01234"),
        ("accepted_hits", "k", "01234"),
        ("accepted_full_hits", "k", "01234"),
        ("backups", "backup", ("primary", "suffix", "empty")),
        ("rounds", "all_hit", "01"),
        ("answer_seconds", "all_hit", "01"),
        ("verification_seconds", "all_hit", "01"),
        ("verified", "source", ("hit", "primary", "suffix", "empty")),
        ("verified_tokens", "source", ("hit", "primary", "suffix", "empty")),
        ("steps", "kind", ("table", "draft", "prefill")),
        ("step_seconds", "kind", ("table", "draft", "prefill")),
    )
    for value in values
}
"""Of the service's page."""


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(b"", "text/plain")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/flush_cache?"):
            self.answer(b"", "text/plain")
            return
        length = request["sampling_params"]["max_new_tokens"]
        if length > 1000:
            self.answer(b'{"error": "longer than\\nthe context"}', "application/json", 400)
            return
        if request.get("stream"):
            self.stream(length)
            return
        began = time.perf_counter()
        time.sleep(TOKEN_S * length)
        count_rounds(length // TOKENS_PER_ROUND)
        self.answer(json.dumps(self.body(length, time.perf_counter() - began)).encode(), "application/json")

    def stream(self, length: int) -> None:
        self.send_response(200)
        self.end_headers()
        for number in range(1, length + 1):
            time.sleep(TOKEN_S)
            self.wfile.write(b"data: " + json.dumps(self.body(number, 0.0)).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def body(self, length: int, seconds: float) -> dict[str, Any]:
        about: dict[str, Any] = {"completion_tokens": length, "e2e_latency": seconds}
        if METRICS_PORT:
            about["spec_verify_ct"] = max(1, length // TOKENS_PER_ROUND)
        return {"output_ids": [TAG] * length, "meta_info": about}

    def answer(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Service(Server):
    def do_GET(self) -> None:
        with LOCK:
            lines = [f"{name} {value}" for name, value in COUNTERS.items()]
        self.answer("\n".join([*lines, "sglang_ssd_speculator_plan_depth 4.0", ""]).encode(), "text/plain")


def count_rounds(number: int) -> None:
    """Of each four rounds the first one misses."""
    with LOCK:
        for round_ in range(number):
            hit = int(round_ % 4 > 0)
            source = "hit" if hit else "primary"
            for name, value in (
                (f'rounds_total{{all_hit="{hit}"}}', 1),
                (f'answer_seconds_total{{all_hit="{hit}"}}', 0.001),
                (f'verification_seconds_total{{all_hit="{hit}"}}', 0.009),
                (f'verified_total{{source="{source}"}}', 1),
                (f'verified_tokens_total{{source="{source}"}}', 1 + 3 * hit),
                ('accepted_total{k="4"}', 1),
            ):
                COUNTERS[f"sglang_ssd_speculator_{name}"] += value


if METRICS_PORT:
    service = ThreadingHTTPServer(("127.0.0.1", METRICS_PORT), Service)
    threading.Thread(target=service.serve_forever, daemon=True).start()
ThreadingHTTPServer(("127.0.0.1", PORT), Server).serve_forever()
