"""Shared noise: one definition, two implementations, and uniform numbers that look independent."""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import gumbel_r, kstest

from sglang_ssd import noise as on_device
from ssd_proto.noise import shared_noise, shared_uniforms

EDGES = np.array([0, 1, 2**31, 2**32 - 1, 2**63 - 1])


def test_both_sides_have_the_same_uniforms_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    seeds = np.concatenate([np.repeat(EDGES, 40), rng.integers(0, 2**63, 800)])
    positions = np.concatenate([np.tile([0, 1, 2**20, 2**31 - 1], 50), rng.integers(0, 2**20, 800)])
    tokens = np.concatenate([np.tile([0, 1, 2**18, 2**31 - 1], (1000, 1)), rng.integers(0, 2**18, (1000, 6))], 1)
    expected = shared_uniforms(seeds, positions, tokens)
    found = on_device.shared_uniforms(*map(torch.from_numpy, (seeds, positions, tokens)))
    assert found.dtype == torch.float64
    assert (found.numpy() == expected).all()
    for_all = on_device.shared_uniforms(*map(torch.from_numpy, (seeds, positions, tokens[0])))
    assert (for_all.numpy()[0] == expected[0]).all()


def test_arguments_stay_as_they_are() -> None:
    seeds, positions, tokens = torch.tensor([3, 4]), torch.tensor([5, 6]), torch.arange(4).repeat(2, 1)
    before = [value.clone() for value in (seeds, positions, tokens)]
    on_device.shared_uniforms(seeds, positions, tokens)
    assert all((a == b).all() for a, b in zip((seeds, positions, tokens), before, strict=True))


def test_few_tokens_get_the_noise_that_they_have_among_all() -> None:
    seeds, positions = np.array([3, 2**62]), np.array([17, 0])
    whole = shared_noise(seeds, positions, np.tile(np.arange(1000), (2, 1)))
    few = np.array([[5, 900, 6], [0, 999, 31]])
    assert (shared_noise(seeds, positions, few) == np.take_along_axis(whole, few, 1)).all()


def test_uniforms_are_uniform_and_never_0_or_1() -> None:
    uniforms = shared_uniforms(np.arange(400), np.arange(400) % 7, np.tile(np.arange(2500), (400, 1)))
    assert kstest(uniforms.ravel(), "uniform").pvalue > 1e-3
    assert 0 < uniforms.min() < uniforms.max() < 1
    noise = shared_noise(np.arange(100), np.full(100, 9), np.tile(np.arange(1000), (100, 1)))
    assert kstest(noise.ravel(), gumbel_r.cdf).pvalue > 1e-3


def test_neighbours_are_not_correlated() -> None:
    """In seed, position and token, which are all small numbers in a row in practice."""
    count = 60
    seeds, positions = (axis.ravel() for axis in np.meshgrid(np.arange(count), np.arange(count), indexing="ij"))
    tokens = np.tile(np.arange(count), (count * count, 1))
    uniforms = shared_uniforms(seeds, positions, tokens).reshape(count, count, count) - 0.5
    for axis in range(3):
        one, next_one = np.take(uniforms, range(count - 1), axis), np.take(uniforms, range(1, count), axis)
        correlation = 12 * (one * next_one).mean() * np.sqrt(one.size)
        assert abs(correlation) < 4
    assert len(np.unique(uniforms)) == uniforms.size
