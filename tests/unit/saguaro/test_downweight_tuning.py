"""The experiment finds the C that helps, and leaves q alone where none does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from speculator_service.saguaro.downweight_tuning import ARMS, DownweightTuner
from speculator_service.saguaro.speedup import accepted_distribution, expected_tokens, ssd_speedup

K = 4


def speedup(tokens: float, hit_rate: float) -> float:
    """A slow backup: hits are worth much."""
    return ssd_speedup(hit_rate, tokens, tokens, 0.9, 0.9)


Laws = Mapping[float, tuple[float, float]]
"""Acceptance rate and hit rate by C."""

HELPS: Laws = dict(zip(ARMS, [(0.8, 0.5), (0.8, 0.6), (0.79, 0.75), (0.78, 0.95), (0.4, 0.97)], strict=True))
HURTS: Laws = dict(zip(ARMS, [(0.8, 0.7), (0.7, 0.7), (0.6, 0.71), (0.4, 0.71), (0.1, 0.72)], strict=True))
SAME: Laws = dict.fromkeys(ARMS, (0.8, 0.7))


def simulate(tuner: DownweightTuner, laws: Laws, sequences: int, seed: int = 0) -> list[float]:
    """Sequences of 30 rounds; returns the best C after each."""
    generator, best = np.random.default_rng(seed), []
    for _ in range(sequences):
        downweight = tuner.next_arm()
        acceptance, hit_rate = laws[downweight]
        accepted = generator.choice(K + 1, 30, p=accepted_distribution(acceptance, K))
        tuner.observe(np.full(30, downweight), accepted, generator.random(30) < hit_rate)
        best.append(tuner.update(speedup))
    return best


def value(laws: Laws, downweight: float) -> float:
    acceptance, hit_rate = laws[downweight]
    return speedup(expected_tokens(acceptance, K), hit_rate)


def test_finds_the_downweight_that_helps() -> None:
    assert max(ARMS, key=lambda arm: value(HELPS, arm)) == 0.15
    for seed in range(5):
        assert simulate(DownweightTuner(), HELPS, 500, seed)[-1] == 0.15


def test_leaves_the_draft_alone_where_it_hurts() -> None:
    for seed in range(5):
        assert set(simulate(DownweightTuner(), HURTS, 400, seed)) == {1.0}


def test_noise_is_no_reason() -> None:
    """With 2000 decisions among equal arms a switch may happen; it is rare and does not last."""
    away = [np.mean(np.array(simulate(DownweightTuner(), SAME, 400, seed)) < 1) for seed in range(5)]
    assert np.mean(away) < 0.1


def test_follows_a_change_back() -> None:
    tuner = DownweightTuner(half_life=1000)
    assert simulate(tuner, HELPS, 500)[-1] == 0.15
    assert simulate(tuner, HURTS, 800)[-1] == 1.0


def test_returns_to_the_larger_one_when_the_gain_is_gone() -> None:
    tuner = DownweightTuner(half_life=500)
    assert simulate(tuner, HELPS, 500)[-1] == 0.15
    assert simulate(tuner, SAME, 1500)[-1] == 1.0


def test_most_sequences_get_the_best_and_the_others_take_turns() -> None:
    tuner = DownweightTuner()
    given = [tuner.next_arm() for _ in range(100)]
    assert {arm: given.count(arm) for arm in ARMS} == {1.0: 80, 0.7: 5, 0.4: 5, 0.15: 5, 0.0: 5}
    assert [DownweightTuner((0.5,)).next_arm() for _ in range(10)] == [0.5] * 10


def test_report() -> None:
    tuner = DownweightTuner((1.0, 0.0))
    tuner.observe(np.zeros(200), np.full(200, 3), np.ones(200, bool))
    tuner.update(speedup)
    one, zero = tuner.report()
    assert (one.downweight, one.num_outcomes) == (1.0, 0)
    assert np.isnan(one.speedup)
    assert zero.num_outcomes == pytest.approx(200)
    assert (zero.expected_tokens, zero.hit_rate) == pytest.approx((4, 1))
    assert zero.speedup == pytest.approx(speedup(4, 1))
    assert 0 < zero.standard_error < 0.2
    assert tuner.best == 1.0  # of which nothing is known: no comparison


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: DownweightTuner(()), "arms must be falling and at least 1"),
        (lambda: DownweightTuner((0.5, 1.0)), "arms must be falling"),
        (lambda: DownweightTuner((1.5, 1.0)), "arm must be in"),
        (lambda: DownweightTuner(half_life=0), "half_life"),
        (lambda: DownweightTuner(confidence=0), "confidence"),
    ],
)
def test_outside_of_the_domain(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
