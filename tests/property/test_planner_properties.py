"""What holds of a plan whatever was observed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from speculator_service.planner import Planner, PlannerSettings
from speculator_service.saguaro.sources import NUM_SOURCES, Source
from speculator_service.statistics import StepKind

times = st.floats(0, 10)


@settings(max_examples=60)
@given(
    lookahead=st.integers(1, 6),
    vocab_size=st.integers(2, 40),
    budget=st.integers(0, 40),
    backup=st.sampled_from(["auto", "primary", "suffix", "empty"]),
    batch_size=st.integers(1, 70),
    seconds=st.tuples(times, times, times),
    seed=st.integers(0, 10**6),
)
def test_plans_are_consistent(
    lookahead: int,
    vocab_size: int,
    budget: int,
    backup: str,
    batch_size: int,
    seconds: tuple[float, float, float],
    seed: int,
) -> None:
    settings = PlannerSettings(fan_out="auto", branch_budget=budget, backup=backup, downweight="auto")
    planner = Planner(settings, lookahead, vocab_size)
    generator = np.random.default_rng(seed)
    for _ in range(3):
        sent = generator.integers(0, lookahead + 1, 100)
        source = generator.integers(0, NUM_SOURCES, 100)
        accepted = generator.integers(0, sent + 1)
        rank = generator.integers(-1, 50, 100)
        hit = generator.random(100) < generator.random()
        planner.observe(source, accepted, sent, rank, np.maximum(rank + 1, 3), generator.random(100), hit)
        planner.verification_took(batch_size, seconds[0])
        planner.step_took(StepKind.TABLE, batch_size, seconds[1], 1 + len(seconds))
        planner.step_took(StepKind.DRAFT, max(1, batch_size // 3), seconds[2])
        planner.replan()
        assert 0 <= planner.new_sequence() <= 1
        assert planner.choose_backup(batch_size, 1) in (Source.PRIMARY, Source.SUFFIX, Source.EMPTY)

    plan = planner.plan
    assert 1 <= plan.depth <= lookahead
    assert 1 <= plan.jit_depth <= lookahead
    assert 1 <= plan.num_candidates <= planner.max_candidates or budget == 0
    assert (plan.counts >= 0).all()
    assert (plan.counts.sum(-1) <= budget).all()
    for depth in range(lookahead + 1):
        counts = plan.counts[:, depth]
        assert (counts[:, depth + 1 :] == 0).all()
        assert (counts[:, :depth] < vocab_size).all()
        assert (counts[:, depth] <= vocab_size).all()
    used = plan.accepted >= 0
    assert (used.sum(-1) == plan.counts.sum(-1)).all()
    order = np.where(used, plan.accepted * 1000 + plan.rank, 10**9 + np.arange(budget))
    assert (np.diff(order, axis=-1) > 0).all()
    per_k = (plan.accepted[..., None] == np.arange(lookahead + 1)).sum(-2)
    assert (per_k == plan.counts).all()
    assert (plan.rank[used] < np.take_along_axis(plan.counts, np.where(used, plan.accepted, 0), -1)[used]).all()
