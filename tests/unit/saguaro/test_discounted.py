"""Means with forgetting."""

from __future__ import annotations

import math

import numpy as np
import pytest

from speculator_service.saguaro.discounted import DiscountedMeans


def test_mean_and_error_are_those_of_the_sample() -> None:
    values = np.random.default_rng(0).normal(3, 2, 4000)
    means = DiscountedMeans(2, half_life=1e9)
    for part in values.reshape(40, 100):
        means.observe(np.ones(100, np.int64), part)
    assert means.weight(1) == pytest.approx(4000, rel=1e-4)
    assert means.mean(1) == pytest.approx(values.mean(), rel=1e-6)
    assert means.standard_error(1) == pytest.approx(values.std() / math.sqrt(4000), rel=1e-3)


def test_nothing_known() -> None:
    means = DiscountedMeans(1, half_life=10)
    assert math.isnan(means.mean(0))
    assert means.mean(0, prior=0.4, prior_weight=5) == pytest.approx(0.4)
    assert means.standard_error(0) == math.inf


def test_equal_values_are_not_taken_for_certainty() -> None:
    means = DiscountedMeans(1, half_life=1e9)
    means.observe(np.zeros(10, np.int64), np.ones(10, bool))
    assert means.standard_error(0) == pytest.approx(0.1)


def test_groups_forget_on_their_own_or_together() -> None:
    for together, expected in ((False, 100), (True, 25)):
        means = DiscountedMeans(2, half_life=1000, forget_together=together)
        means.observe(np.zeros(100, np.int64), np.ones(100))
        for _ in range(20):
            means.observe(np.ones(100, np.int64), np.ones(100))
        assert means.weight(0) == pytest.approx(expected, rel=0.08)
        assert means.mean(0) == pytest.approx(1)
