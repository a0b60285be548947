"""The paper's predicted speedup, from what was measured in the same runs.

Theorem 7 has one sequence; for b of them Corollary 16 puts p^b, the probability that all hit if misses were
independent, for p in the denominator. Misses cluster, so the measured share of rounds in which all hit stands there.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmark.service_counts import ServiceCounts
from speculator_service.saguaro.speedup import ssd_speedup


class RoundParts(NamedTuple):
    """The terms of the formula. Times are in units of a verification, except for its own."""

    hit_rate: float
    """p: share of verified speculations that were prepared."""
    all_hit_rate: float
    """P: share of rounds of the batch that nobody waited for."""
    tokens_hit: float
    """E_hit, of a round that verifies a prepared speculation."""
    tokens_miss: float
    """E_miss, of one that verifies a backup; 1 if there was none."""
    verification_s: float
    """T_verify: a round without what it waits for the speculator; seconds."""
    primary_time: float
    """T_p: a whole table."""
    backup_time: float
    """T_b: mean wait of the rounds that waited."""


def round_parts(counts: ServiceCounts) -> RoundParts | None:
    """The terms; None if there was no round.

    A round lasts from one batch of outcomes to the next: the answer, then the verification.  Where all outcomes are
    full hits the verification begins at once, so all of that is verification; elsewhere it begins with the last answer.
    """
    waited, ready = 0, 1
    if not counts.num_rounds or not sum(counts.verified.values()):
        return None
    verification = (sum(counts.verification_s) + counts.answer_s[ready]) / counts.num_rounds
    rounds_hit, tokens_hit = counts.verified["hit"], counts.verified_tokens["hit"]
    rounds_miss = sum(counts.verified.values()) - rounds_hit
    tokens_miss = sum(counts.verified_tokens.values()) - tokens_hit
    # A table's first step computes the last token that was sent.
    table_s = counts.table_step_s / counts.table_steps * (counts.tokens_per_branch + 1) if counts.table_steps else 0.0
    wait_s = counts.answer_s[waited] / counts.rounds[waited] if counts.rounds[waited] else 0.0
    return RoundParts(
        rounds_hit / (rounds_hit + rounds_miss),
        counts.rounds[ready] / counts.num_rounds,
        tokens_hit / rounds_hit if rounds_hit else 1.0,
        tokens_miss / rounds_miss if rounds_miss else 1.0,
        verification,
        table_s / verification,
        wait_s / verification,
    )


def theorem_speedup(parts: RoundParts) -> float:
    """(p E_hit + (1 - p) E_miss) / (P max(1, T_p) + (1 - P) (1 + T_b)), against a step as long as a verification.

    >>> round(theorem_speedup(RoundParts(.9, .9, 4, 4, .02, .3, .3)), 6)
    3.883495
    """
    tokens = parts.hit_rate * parts.tokens_hit + (1 - parts.hit_rate) * parts.tokens_miss
    # Theorem 7 with one E: p is that of the numerator, P that of the denominator.
    return ssd_speedup(parts.all_hit_rate, tokens, tokens, parts.primary_time, parts.backup_time)


def predicted_speedup(parts: RoundParts, plain_step_s: float) -> float:
    """The same against plain decoding whose step takes ``plain_step_s``: it verifies one token, not K + 1.

    >>> round(predicted_speedup(RoundParts(.9, .9, 4, 4, .02, .3, .3), .018), 6)
    3.495146
    """
    return theorem_speedup(parts) * plain_step_s / parts.verification_s
