"""What a planner decides, and what it shows of how it came to that."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculator_service.outlook import Forecast, SourceReport
from speculator_service.saguaro.downweight_tuning import ArmReport
from speculator_service.saguaro.fan_out_lists import columns
from speculator_service.saguaro.sources import Source
from speculator_service.ways import Way


class Plan(NamedTuple):
    """Immutable: a new one replaces the old. S: sources (`Source`), depth: of the speculation that is verified."""

    accepted: NDArray[np.int64]
    """[S, K + 1, B] by source and depth: k of each column of the table, ascending; -1: unused, these are last."""
    rank: NDArray[np.int64]
    """[S, K + 1, B] place from 0 of the column's token among the candidates of its k; 0 where unused."""
    counts: NDArray[np.int64]
    """[S, K + 1, K + 1] fan-out lists F_k by source and depth; 0 for k > depth."""
    depth: int
    """Tokens drafted for each prepared outcome, 1..K."""
    jit_depth: int
    """Tokens of a primary backup, just in time, 1..K."""
    backup: int
    """Source of the answers to coming misses: PRIMARY, SUFFIX or EMPTY."""
    num_candidates: int
    """Candidates to keep at positions of branches and of just-in-time chains.

    For the lists of speculations as deep as planned, with one for the token sent and one for a stop token. Shorter
    ones, near the end of a context, have longer lists, of which the last columns then stay empty.
    """


def make_plan(
    counts: NDArray[np.int64], num_outcomes: int, depth: int, jit_depth: int, backup: int, vocab_size: int
) -> Plan:
    """The plan with these fan-out lists; arguments as the fields of `Plan`, B and V."""
    accepted, rank = columns(counts, num_outcomes)
    by_draft = counts[[Source.HIT, Source.PRIMARY]][:, [depth, jit_depth]]  # a hit cut short is drafted to jit_depth
    return Plan(accepted, rank, counts, depth, jit_depth, backup, min(int(by_draft.max()) + 2, vocab_size))


class PlannerSnapshot(NamedTuple):
    """For metrics: what the current plan was made of."""

    plan: Plan
    sources: tuple[SourceReport, ...]
    """By `Source`."""
    forecast: Forecast | None
    """Qualities and times near the recent batch size; None until times are known."""
    critical_batch_size: float
    """b* (Theorem 17); not a number while it is unknown or the backup is fixed."""
    speedups: dict[str, float]
    """Predicted near the recent batch size, by backup; against autoregressive decoding."""
    downweight: float
    """Saguaro's C of most sequences."""
    ways: dict[Way, int]
    """Kinds of batches (size, sampled or not) by the way that turned out to be the fastest for them."""
    arms: tuple[ArmReport, ...]
    """Of the experiment that finds C; empty if C is fixed."""
