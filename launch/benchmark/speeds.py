"""Speeds of one mode at one temperature and batch size, a value for each repetition."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmark.client import Stream
from benchmark.measurement import Run

_LEAST_SHARE = 0.01
"""Of a request's time, that is decoding; keeps speeds of very short answers positive."""


class Speeds(NamedTuple):
    """Tokens per second, and seconds."""

    end_to_end: list[float]
    """Tokens per second from the first request to the last answer."""
    decode: list[float]
    """Without prefill: tokens but the first ones per second that is spent decoding; empty if that is not known."""
    round_s: list[float]
    """Of a round, without speculation of a step; empty if that is not known."""


def speeds_of(runs: Sequence[Run], streams: Sequence[Stream]) -> Speeds:
    """Speeds of ``runs``; ``streams`` of the same prompts say how much of a request's time is prefill.

    A request decodes from its first token to its end. The server gives the whole time of each request, and the first
    token comes, on the mean, as late as in the streamed runs.
    """
    if not streams:
        return Speeds([run.speed for run in runs], [], [])
    first_token_s = statistics.fmean(stream.first_token_s for stream in streams)
    decode, rounds = [], []
    for run in runs:
        total = sum(answer.seconds for answer in run.answers)
        decoding = max(total - first_token_s * len(run.answers), _LEAST_SHARE * total)
        decode.append(run.num_decoded / (run.seconds * decoding / total))
        rounds.append(decoding / run.num_rounds)
    return Speeds([run.speed for run in runs], decode, rounds)
