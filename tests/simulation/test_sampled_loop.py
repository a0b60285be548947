"""The output law of the real speculator with a sampling verifier; wrong verification must show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sampled_loop import VOCAB, SampledLoop

from speculator_service.ways import Decision, Way
from ssd_proto.records import ProposalKind, Sampling
from tests.statistical.chi_square import chi_square_deviation

LENGTH = 3
LIMIT = 4.0


def deviation(loop: SampledLoop, num_sequences: int = 1280) -> float:
    return chi_square_deviation(loop.counts(num_sequences, LENGTH), loop.law(LENGTH))


@pytest.mark.parametrize("downweight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("lookahead", "temperature"), [(1, 1.0), (4, 0.6), (4, 1.3)])
def test_hits_and_primary_backups(downweight: float, lookahead: int, temperature: float) -> None:
    loop = SampledLoop(Sampling(temperature), lookahead, settings={"downweight": downweight})
    assert deviation(loop) < LIMIT
    assert loop.kinds[ProposalKind.HIT] > 150
    assert loop.kinds[ProposalKind.BACKUP] > 150


@pytest.mark.parametrize("backup", ["suffix", "empty"])
def test_fast_backups(backup: str) -> None:
    loop = SampledLoop(settings={"backup": backup, "downweight": 0.3}, seed=3)
    assert deviation(loop) < LIMIT
    assert loop.kinds[ProposalKind.HIT] > 150
    assert loop.kinds[ProposalKind.BACKUP if backup == "suffix" else ProposalKind.EMPTY] > 100


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 1},
        {"num_kept": 2},
        {"drop_probability": 0.3},
        {"num_kept": 0},
        {"settings": {"fan_out": "auto", "downweight": "auto", "backup": "auto", "adapt_depth": True}},
        {"settings": {"fan_out": (0, 0, 0, 3)}},
        {"token_map": (4, 1, 3)},
    ],
    ids=[
        "batch of one",
        "truncated q",
        "lost proposals",
        "greedy drafts",
        "everything automatic",
        "all accepted only",
        "token map",
    ],
)
def test_other_conditions(options: dict[str, Any]) -> None:
    loop = SampledLoop(**options, seed=7)
    assert deviation(loop, 400 if options.get("batch") == 1 else 1280) < LIMIT


def test_shared_noise() -> None:
    loop = SampledLoop(Sampling(1.0, shared_noise=True), seed=11)
    assert deviation(loop) < LIMIT
    assert loop.accepted > 1.5 * loop.rounds


def test_a_verifier_that_mistakes_q_is_found_out() -> None:
    loop = SampledLoop(ignore_q=True)
    assert deviation(loop) > 3 * LIMIT


def test_ways_that_change_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = SampledLoop(seed=13)
    rng = np.random.default_rng(13)
    ways = (Way.AHEAD, Way.AHEAD, Way.JUST_IN_TIME, Way.REST, Way.REST)
    monkeypatch.setattr(
        loop.speculator.planner, "decide", lambda *batch: Decision(*batch, ways[rng.integers(len(ways))])
    )
    assert deviation(loop) < LIMIT
    assert loop.kinds[ProposalKind.HIT] > 150
    assert loop.kinds[ProposalKind.EMPTY] > 150


def test_a_token_map_that_reorders_the_tokens_changes_nothing() -> None:
    plain, mapped = (SampledLoop(token_map=order, batch=4, seed=5) for order in (None, tuple(reversed(range(VOCAB)))))
    assert np.abs(plain.counts(400, LENGTH) - mapped.counts(400, LENGTH)).sum() == 0
    assert plain.accepted == mapped.accepted > 0


def test_a_speculation_does_not_hang_on_when_it_is_drafted() -> None:
    """Drafted ahead or just in time, the tokens are those of the seed and the position."""
    accepted = [SampledLoop(settings={"fan_out": fan_out}, batch=4, seed=5).counts(400, LENGTH) for fan_out in (0, 4)]
    # The same draws of the verifier meet the same proposals, whether they come from a table or from the backup.
    assert np.abs(accepted[0] - accepted[1]).sum() == 0
