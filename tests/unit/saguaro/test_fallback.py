"""The choice of the backup: Theorem 17, and no flapping."""

from __future__ import annotations

import math

import numpy as np
import pytest

from speculator_service.saguaro.batch_speedup import SpeculatorQuality, batch_speedup, speedup_with
from speculator_service.saguaro.fallback import PRIMARY, FallbackPolicy
from speculator_service.saguaro.speedup import unconditional_hit_rate

PRIMARY_QUALITY = SpeculatorQuality(0.3, 4, 0.9)
EMPTY = SpeculatorQuality(0, 1, 0.9)  # hit rate as in the paper's common-p example


def policy(empty: SpeculatorQuality = EMPTY, **options: float) -> FallbackPolicy:
    result = FallbackPolicy([PRIMARY, "empty"], **options)
    result.update(PRIMARY_QUALITY, {PRIMARY: PRIMARY_QUALITY, "empty": empty})
    return result


@pytest.mark.parametrize(("empty", "critical"), [(EMPTY, 2.990504), (SpeculatorQuality(0, 1, 0.3), 13.917330)])
def test_without_margin_it_is_theorem_17(empty: SpeculatorQuality, critical: float) -> None:
    chooser = policy(empty, margin=0)
    for batch_size in range(1, 40):
        assert chooser.choose(batch_size) == (PRIMARY if batch_size < critical else "empty")
    assert round(chooser.decision.critical_batch_size, 6) == critical


def test_first_name_until_there_are_measurements() -> None:
    chooser = FallbackPolicy(["empty", PRIMARY])
    assert chooser.choose(1) == "empty"
    assert chooser.decision.primary is None
    assert chooser.decision.critical_batch_size == math.inf


def test_oscillating_load_does_not_flap() -> None:
    chooser = policy()
    choices = [chooser.choose(batch_size) for batch_size in [2, 3] * 50]
    assert set(choices) == {PRIMARY}
    chooser.choose(20)
    assert {chooser.choose(batch_size) for batch_size in [2, 3] * 50} == {"empty"}


def test_load_that_swings_far_switches_each_time() -> None:
    chooser = policy()
    assert [chooser.choose(batch_size) for batch_size in (1, 30, 1, 30)] == [PRIMARY, "empty", PRIMARY, "empty"]


def test_loss_is_bounded_by_the_margin() -> None:
    """Whatever the load and however noisy the measurements, the choice is within the margin of the best."""
    generator = np.random.default_rng(0)
    chooser = FallbackPolicy([PRIMARY, "suffix", "empty"], margin=0.05)
    switches, before = 0, None
    for _ in range(500):
        primary = SpeculatorQuality(generator.uniform(0.2, 1.5), generator.uniform(1.5, 5), generator.uniform(0.5, 1))
        backups = {
            PRIMARY: primary,
            "suffix": SpeculatorQuality(0.01, generator.uniform(1, 3), generator.uniform(0, 1)),
            "empty": SpeculatorQuality(0, 1, generator.uniform(0, 1)),
        }
        chooser.update(primary, backups)
        chosen = chooser.choose(int(generator.integers(1, 64)))
        speedups = chooser.decision.speedups
        assert speedups[chosen] * 1.05 >= max(speedups.values())
        switches += before not in (None, chosen)
        before = chosen
    assert switches > 0


def test_noise_within_the_margin_never_switches() -> None:
    generator = np.random.default_rng(1)
    chooser = policy()
    names = set()
    for _ in range(300):
        noisy = SpeculatorQuality(0.3 * generator.uniform(0.97, 1.03), 4, 0.9)
        chooser.update(noisy, {PRIMARY: noisy, "empty": EMPTY})
        names.add(chooser.choose(3))
    assert names == {PRIMARY}


def test_decision_shows_its_inputs() -> None:
    chooser = policy()
    chooser.choose(5)
    decision = chooser.decision
    assert decision.backup == "empty"
    assert decision.batch_size == 5
    assert decision.primary == PRIMARY_QUALITY
    assert decision.backups == {PRIMARY: PRIMARY_QUALITY, "empty": EMPTY}
    assert decision.speedups["empty"] == pytest.approx(3.7)
    assert decision.speedups[PRIMARY] == pytest.approx(batch_speedup(5, 0.9, 4, 4, 0.3, 0.3))


def test_three_backups() -> None:
    suffix = SpeculatorQuality(0.02, 2, 0.6)
    chooser = FallbackPolicy([PRIMARY, "suffix", "empty"])
    qualities = {PRIMARY: PRIMARY_QUALITY, "suffix": suffix, "empty": SpeculatorQuality(0, 1, 0.3)}
    chooser.update(PRIMARY_QUALITY, qualities)
    assert [chooser.choose(b) for b in (1, 32)] == [PRIMARY, "suffix"]
    b = chooser.decision.critical_batch_size
    slow = batch_speedup(b, 0.9, 4, 4, 0.3, 0.3)
    assert speedup_with(PRIMARY_QUALITY, suffix, b) == pytest.approx(slow)


def test_slow_primary_and_measurements_out_of_order_have_a_critical_batch_size_too() -> None:
    chooser = FallbackPolicy([PRIMARY, "suffix"])
    slow = SpeculatorQuality(1.3, 2, 0.5)
    chooser.update(slow, {PRIMARY: slow, "suffix": SpeculatorQuality(0, 2.5, 0.8)})
    assert chooser.decision.backup == PRIMARY
    chooser.choose(4)
    assert chooser.decision.backup == "suffix"
    assert chooser.decision.critical_batch_size == 0


@pytest.mark.parametrize(("names", "critical"), [([PRIMARY], math.inf), (["empty"], 0)])
def test_a_single_backup(names: list[str], critical: float) -> None:
    chooser = FallbackPolicy(names)
    chooser.update(PRIMARY_QUALITY, dict.fromkeys(names, EMPTY))
    assert [chooser.choose(b) for b in (0, 1, 100)] == names * 3
    assert chooser.decision.critical_batch_size == critical


def test_predicted_hit_rate_is_the_unconditional_one() -> None:
    backup = SpeculatorQuality(0, 1, 0.3)
    rate = unconditional_hit_rate(0.9, 0.3)
    assert speedup_with(PRIMARY_QUALITY, backup, 1) == pytest.approx(4 * rate + 1 - rate)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="backups must have at least 1 name"):
        FallbackPolicy([])
    with pytest.raises(ValueError, match="margin"):
        FallbackPolicy([PRIMARY], margin=-1)
    with pytest.raises(ValueError, match=r"\['empty'\] missing"):
        policy().update(PRIMARY_QUALITY, {PRIMARY: PRIMARY_QUALITY})
    with pytest.raises(ValueError, match="hit_rate"):
        policy().update(PRIMARY_QUALITY, {PRIMARY: PRIMARY_QUALITY, "empty": SpeculatorQuality(0, 1, 2)})
    with pytest.raises(ValueError, match="batch_size"):
        policy().choose(-1)
