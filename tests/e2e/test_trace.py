"""The trace of a real server and its service: one time line, on which drafting overlaps with verification."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from ssd_proto.trace import read_trace
from tests.support.answers import greedy
from tests.support.pool import SSDServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.parametrize("ssd", ["sync-retract", "overlap-retract"], indirect=True),
]
VERIFIER = {"prefill", "draft", "verify", "post"}
SPECULATOR = {"prefill", "outcomes", "table step", "fork", "model", "draw", "publish"}
WRITTEN_WITHIN_S = 1.0


def overlap(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> float:
    """Microseconds in which spans of both kinds run. Spans of one kind do not overlap among themselves."""
    total, at = 0.0, 0
    for span in one:
        begin, end = span["ts"], span["ts"] + span["dur"]
        while at < len(other) and other[at]["ts"] + other[at]["dur"] <= begin:
            at += 1
        for beside in other[at:]:
            if beside["ts"] >= end:
                break
            total += min(end, beside["ts"] + beside["dur"]) - max(begin, beside["ts"])
    return total


def test_drafting_overlaps_with_verification(ssd: SSDServer, prompts: list[str]) -> None:
    began = time.monotonic_ns() / 1000
    answers = ssd.generate_all([greedy(prompt, 40, ignore_eos=True) for prompt in prompts[:6]], concurrency=2)
    time.sleep(WRITTEN_WITHIN_S)
    events = read_trace(ssd.trace)
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        if event["ts"] >= began:
            spans.setdefault((names[event["pid"]], event["name"]), []).append(event)
    verifier, speculator = "verifier, rank 0", "speculator"
    assert {name for process, name in spans if process == verifier} >= VERIFIER
    assert {name for process, name in spans if process == speculator} >= SPECULATOR
    # A round in which no request has drafts (a late answer on a busy machine) is plain decoding.
    forwards = [*spans[verifier, "verify"], *spans.get((verifier, "decode"), [])]
    rounds = sum(answer.meta["spec_verify_ct"] for answer in answers)
    assert sum(span["args"]["batch"] for span in forwards) >= rounds
    # Tables are what a speculator makes while the target computes: most of that work lies there.
    computing = sorted([*forwards, *spans[verifier, "prefill"]], key=lambda span: span["ts"])
    tables = spans[speculator, "table step"]
    assert overlap(computing, tables) > 0.3 * sum(span["dur"] for span in tables)
