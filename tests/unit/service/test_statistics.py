"""Counters of rounds: what a benchmark needs, beside what the metrics have had."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from speculator_service.metrics import SpeculatorCollector
from speculator_service.saguaro.sources import Source
from speculator_service.statistics import OutcomeKind, Statistics
from tests.simulation.closed_loop import Loop

PREFIX = "sglang_ssd_speculator_"


def test_rounds_are_counted_by_what_was_verified() -> None:
    statistics = Statistics(2)
    for _ in range(2):
        statistics.count_verified(np.array([Source.HIT, Source.EMPTY, Source.HIT]), np.array([2, 0, 1]))
    statistics.count_verified(np.array([], np.int64), np.array([], np.int64))
    assert statistics.verified.tolist() == [4, 0, 0, 2]
    assert statistics.verified_tokens.tolist() == [10, 0, 0, 2]


def test_times_are_counted_by_whether_all_hit() -> None:
    statistics = Statistics(2)
    for all_hit, answer, verification in ((True, 0.25, 1.0), (False, 0.5, 2.0), (True, 0.25, 1.5)):
        statistics.count_round(all_hit, answer, verification)
    assert statistics.rounds == [1, 2]
    assert statistics.answer_seconds == [0.5, 0.5]
    assert statistics.verification_seconds == [2.0, 2.5]


def measured(loop: Loop, name: str, label: str) -> float:
    registry = CollectorRegistry()
    registry.register(SpeculatorCollector(loop.speculator, lambda: 0.0, lambda: 0.0))
    key = {"rounds": "all_hit", "verified": "source", "verified_tokens": "source"}.get(name, "k")
    value = registry.get_sample_value(f"{PREFIX}{name}_total", {key: label})
    assert value is not None, name
    return value


@pytest.mark.parametrize(("fan_out", "steps"), [(3, 64), (0, 64), (3, 3)])
def test_counters_of_a_closed_loop(fan_out: int, steps: int) -> None:
    """With tables in time, without tables, and with tables that are cut short."""
    loop = Loop.build(seed=5, fan_out=fan_out)
    verifier = loop.connect()
    verifier.steps_while_verifying = steps
    sequences = [verifier.open(slot, loop.prompt(), 10_000) for slot in range(3)]
    num_rounds = 25
    for _ in range(num_rounds):
        verifier.round()
    loop.settle()
    statistics = loop.speculator.statistics
    # The first tokens after the prompts end no verification; the last round has no end yet.
    assert sum(statistics.rounds) == num_rounds - 1
    assert statistics.verified.sum() == 3 * (num_rounds - 1)
    tokens = sum(sum(sequence.accepted[1:]) + num_rounds - 1 for sequence in sequences)
    assert statistics.verified_tokens.sum() == tokens
    assert statistics.accepted_full_hits.sum() == statistics.outcomes[OutcomeKind.HIT]
    hits = statistics.outcomes[OutcomeKind.HIT] + statistics.outcomes[OutcomeKind.SHORT_HIT]
    assert statistics.accepted_hits.sum() == hits
    assert (hits > 0) == (statistics.verified[Source.HIT] > 0) == (fan_out > 0)
    for count, seconds in zip(statistics.rounds, statistics.verification_seconds, strict=True):
        assert (seconds > 0) == (count > 0)
    for name, label, value in (
        ("rounds", "0", statistics.rounds[False]),
        ("rounds", "1", statistics.rounds[True]),
        ("verified", "hit", statistics.verified[Source.HIT]),
        ("verified_tokens", "primary", statistics.verified_tokens[Source.PRIMARY]),
        ("accepted_full_hits", "4", statistics.accepted_full_hits[4]),
    ):
        assert measured(loop, name, label) == value
