"""Theorem 15, the corollaries' inequalities and Theorem 17 for arbitrary arguments."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from speculator_service.saguaro.batch_speedup import batch_speedup, batch_speedup_limit, critical_batch_size
from speculator_service.saguaro.downweight import downweight_curve, saguaro_probs
from speculator_service.saguaro.rejection import dense
from speculator_service.saguaro.sampling import draft_distribution, sample
from speculator_service.saguaro.speedup import (
    fast_backup_ratio,
    same_speculator_ratio,
    sd_speedup,
    ssd_speedup,
    unconditional_hit_rate,
)

rates = st.floats(0, 1)
tokens = st.floats(1, 9)
times = st.floats(0, 3)
seeds = st.integers(0, 2**32 - 1)


def pair(seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.dirichlet(np.full(size, 0.7)), generator.dirichlet(np.full(size, 0.7))


@given(seeds, st.integers(2, 12), st.integers(0, 12), rates)
def test_sigma_is_a_distribution(seed: int, size: int, fan_out: int, downweight: float) -> None:
    _, q = pair(seed, size)
    lowered = saguaro_probs(q, fan_out, downweight)
    assert abs(lowered.sum() - 1) < 1e-9
    assert (lowered >= 0).all()
    assert np.allclose(saguaro_probs(q, fan_out, 1), q)


@given(seeds, st.integers(2, 12), st.integers(1, 12))
def test_theorem_15(seed: int, size: int, fan_out: int) -> None:
    """Residual mass on the prepared tokens falls with C, outside it rises; so the share of hits falls."""
    p, q = pair(seed, size)
    first = np.argsort(-q)[:fan_out]
    outside = np.setdiff1d(np.arange(size), first)
    assume(len(outside))
    residuals = [np.maximum(p - saguaro_probs(q, fan_out, c), 0) for c in np.linspace(0, 1, 11)]
    inside_mass = np.array([residual[first].sum() for residual in residuals])
    outside_mass = np.array([residual[outside].sum() for residual in residuals])
    assert (np.diff(inside_mass) <= 1e-12).all()
    assert (np.diff(outside_mass) >= -1e-12).all()
    some = inside_mass + outside_mass > 1e-9
    assert (np.diff((inside_mass / (inside_mass + outside_mass + 1e-300))[some]) <= 1e-9).all()


@given(seeds, st.integers(2, 10), st.integers(0, 10))
def test_curve_holds_rates(seed: int, size: int, fan_out: int) -> None:
    p, q = pair(seed, size)
    curve = downweight_curve(p[None], -np.sort(-q)[None], fan_out)
    for values in (curve.acceptance_rate, curve.rejected_hit_rate):
        assert ((values >= 0) & (values <= 1 + 1e-9)).all()


@given(
    seeds,
    st.integers(1, 40),
    st.integers(0, 12),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(-1, 40),
    st.floats(0.01, 1),
    st.sampled_from([0.0, 0.6, 1.3]),
)
def test_draft_distribution_is_one_and_is_what_is_sampled(
    seed: int, num_kept: int, fan_out: int, downweight: float, top_k: int, top_p: float, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(5, 30, generator=generator) * 3).round()  # with ties
    logits[:, :20] = logits[:, :20].masked_fill(torch.rand(5, 20, generator=generator) < 0.3, -math.inf)
    q = draft_distribution(
        logits,
        torch.full((5,), temperature),
        num_kept=num_kept,
        fan_out=fan_out,
        downweight=downweight,
        top_k=torch.full((5,), top_k),
        top_p=torch.full((5,), top_p),
    )
    assert q.ids.shape == q.probs.shape == (5, min(num_kept, 30))
    assert torch.allclose(q.probs.sum(-1), torch.ones(5), atol=1e-6)
    assert (q.ids.sort(-1).values.diff(dim=-1) > 0).all()
    assert (dense(q, 30)[logits == -math.inf] == 0).all()
    if top_k > 0:
        assert ((q.probs > 0).sum(-1) <= top_k).all()
    drawn = sample(q, torch.rand(5, generator=generator, dtype=torch.float64))
    assert (dense(q, 30).gather(1, drawn[:, None]) > 0).all()


@given(rates, times)
def test_corollary_8(hit_rate: float, time: float) -> None:
    ratio = same_speculator_ratio(hit_rate, time)
    assert ratio >= 1 - 1e-12
    if hit_rate > 0.01 and time > 0.01:
        assert ratio > 1


@given(rates, tokens, tokens, tokens, times, st.floats(0, 0.99))
def test_corollary_9(p: float, hit: float, miss: float, sd: float, sd_time: float, primary_time: float) -> None:
    hit, miss = max(hit, miss), min(hit, miss)
    bounds = fast_backup_ratio(p, hit, miss, sd, sd_time)
    value = ssd_speedup(p, hit, miss, primary_time, 0) / sd_speedup(sd, sd_time)
    assert math.isclose(bounds.value, value)
    for smaller, larger in itertools.pairwise(bounds):
        assert smaller <= larger * (1 + 1e-12)


@given(rates, rates)
def test_unconditional_hit_rate_is_a_fixed_point_between_the_two(primary: float, backup: float) -> None:
    p = unconditional_hit_rate(primary, backup)
    assert 0 <= p <= 1
    assert math.isclose(p, p * primary + (1 - p) * backup, abs_tol=1e-9) or (primary, backup) == (1, 0)
    assert min(primary, backup) - 1e-12 <= p <= max(primary, backup) + 1e-12


@given(st.floats(0, 0.99), tokens, tokens, times, times)
def test_corollary_16_tends_to_its_limit(p: float, hit: float, miss: float, primary: float, backup: float) -> None:
    assert math.isclose(batch_speedup(10_000, p, hit, miss, primary, backup), batch_speedup_limit(p, hit, miss, backup))


@given(rates, rates, tokens, tokens, times, times)
def test_theorem_17(p_slow: float, p_fast: float, hit: float, miss: float, slow_time: float, fast_time: float) -> None:
    """Below b* the slow backup is no worse, above the fast one is no worse: any times, any hit rates p_f <= p_s."""
    p_slow, p_fast, hit, miss = max(p_slow, p_fast), min(p_slow, p_fast), max(hit, miss), min(hit, miss)
    critical = critical_batch_size(p_slow, hit, miss, slow_time, fast_hit_rate=p_fast, fast_time=fast_time)
    assert critical >= 0
    for batch_size in (1, 2, 3, 5, 8, 16, 64, 500):
        slow = batch_speedup(batch_size, p_slow, hit, hit, slow_time, slow_time)
        fast = batch_speedup(batch_size, p_fast, hit, miss, slow_time, fast_time)
        if batch_size < critical:
            assert slow >= fast * (1 - 1e-9)
        elif batch_size > critical:
            assert fast >= slow * (1 - 1e-9)
