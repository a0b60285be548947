"""The speculator's cache hits between two readings of its metrics."""

from __future__ import annotations

from collections.abc import Mapping

from benchmark.service_counts import read_samples

_NOT_COUNTED = ("stopped", "rested")
"""Outcomes for which nothing was to be prepared: the end of a sequence, and rounds without speculation on purpose."""


def outcomes(http_port: int) -> dict[str, float]:
    """The speculator's counts of outcomes so far, by kind (`hit`, `short_hit`, and the misses by cause).

    Raises:
        OSError: nobody answers at the port.
    """
    samples = read_samples(http_port)
    return {kind: count for (metric, kind), count in samples.items() if metric == "outcomes_total"}


def hit_rate(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Share of the outcomes since ``before`` whose speculation had been prepared; 0 without outcomes.

    >>> hit_rate({"hit": 5}, {"hit": 10, "short_hit": 1, "not_predicted": 2, "stopped": 1})
    0.75
    """
    new = {kind: count - before.get(kind, 0.0) for kind, count in after.items() if kind not in _NOT_COUNTED}
    total = sum(new.values())
    return (new.get("hit", 0.0) + new.get("short_hit", 0.0)) / total if total else 0.0
