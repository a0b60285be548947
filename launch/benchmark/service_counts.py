"""What a speculator service counted between two readings of its metrics."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmark.client import HOST

PREFIX = "sglang_ssd_speculator_"
_SAMPLE = re.compile(r'(\w+)(?:\{\w+="([^"]*)"\})? (\S+)')
_WITHIN_S = 10.0

Samples = Mapping[tuple[str, str], float]
"""Values by name without prefix, and label (empty if there is none); all our metrics have one label at most."""


@dataclass(frozen=True, slots=True)
class ServiceCounts:
    """Totals of one or several runs."""

    outcomes: dict[str, float]
    """Outcomes of sequences by what they met: ``hit``, ``short_hit``, and the misses by cause."""
    accepted: list[float]
    """[K + 1] outcomes by number of accepted tokens; the first token after a prompt counts for 0."""
    hits: list[float]
    """[K + 1] of these, hits, short or not."""
    full_hits: list[float]
    """[K + 1] of these, those that needed no further draft step."""
    backups: dict[str, float]
    """Misses by backup."""
    rounds: list[float]
    """[2] rounds of the batch: those that some sequence waited for, and those whose outcomes were all full hits."""
    answer_s: list[float]
    """[2] from the outcomes to their last answer; after full hits nobody waits for that."""
    verification_s: list[float]
    """[2] from there to the next outcomes."""
    verified: dict[str, float]
    """Rounds of sequences by source of the verified speculation."""
    verified_tokens: dict[str, float]
    """Their tokens, the bonus token included."""
    table_steps: float
    table_step_s: float
    tokens_per_branch: float
    """Tokens that were drafted for an outcome at the end of the last run."""

    @property
    def num_outcomes(self) -> float:
        """All outcomes."""
        return sum(self.outcomes.values())

    @property
    def num_rounds(self) -> float:
        """All rounds of the batch."""
        return sum(self.rounds)


def read_samples(port: int) -> Samples:
    """All metrics of the service whose pages are at ``port``."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=_WITHIN_S) as answer:
        return parse_samples(answer.read().decode())


def parse_samples(text: str) -> Samples:
    """Samples of a page in Prometheus' text format; those of other programs and with several labels are left out.

    >>> parse_samples('# HELP x\\nsglang_ssd_speculator_backups_total{backup="empty"} 3.0\\npython_info{a="b"} 1')
    {('backups_total', 'empty'): 3.0}
    """
    matches = (_SAMPLE.fullmatch(line) for line in text.splitlines() if line.startswith(PREFIX))
    return {(m[1].removeprefix(PREFIX), m[2] or ""): float(m[3]) for m in matches if m is not None}


def counts_between(before: Samples, after: Samples) -> ServiceCounts:
    """Differences of the counters.

    Raises:
        KeyError: the service lacks a counter.
    """
    risen = {key: value - before.get(key, 0.0) for key, value in after.items()}
    return ServiceCounts(
        outcomes=_labelled(risen, "outcomes_total"),
        accepted=_numbered(risen, "accepted_total"),
        hits=_numbered(risen, "accepted_hits_total"),
        full_hits=_numbered(risen, "accepted_full_hits_total"),
        backups=_labelled(risen, "backups_total"),
        rounds=_numbered(risen, "rounds_total"),
        answer_s=_numbered(risen, "answer_seconds_total"),
        verification_s=_numbered(risen, "verification_seconds_total"),
        verified=_labelled(risen, "verified_total"),
        verified_tokens=_labelled(risen, "verified_tokens_total"),
        table_steps=risen["steps_total", "table"],
        table_step_s=risen["step_seconds_total", "table"],
        tokens_per_branch=after["plan_depth", ""],
    )


def sum_counts(runs: Sequence[ServiceCounts]) -> ServiceCounts:
    """Totals of several runs, of which there is at least one."""
    return ServiceCounts(
        outcomes=_added([run.outcomes for run in runs]),
        accepted=_added_lists([run.accepted for run in runs]),
        hits=_added_lists([run.hits for run in runs]),
        full_hits=_added_lists([run.full_hits for run in runs]),
        backups=_added([run.backups for run in runs]),
        rounds=_added_lists([run.rounds for run in runs]),
        answer_s=_added_lists([run.answer_s for run in runs]),
        verification_s=_added_lists([run.verification_s for run in runs]),
        verified=_added([run.verified for run in runs]),
        verified_tokens=_added([run.verified_tokens for run in runs]),
        table_steps=sum(run.table_steps for run in runs),
        table_step_s=sum(run.table_step_s for run in runs),
        tokens_per_branch=runs[-1].tokens_per_branch,
    )


def _labelled(risen: Samples, name: str) -> dict[str, float]:
    """Values of a metric by label."""
    found = {label: value for (metric, label), value in risen.items() if metric == name}
    if not found:
        raise KeyError(name)
    return found


def _numbered(risen: Samples, name: str) -> list[float]:
    """Values of a metric whose labels are 0, 1, 2, ..."""
    found = _labelled(risen, name)
    return [found[str(number)] for number in range(len(found))]


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: sum(part[key] for part in parts) for key in parts[0]}


def _added_lists(parts: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*parts, strict=True)]
