"""Steps are as wide as the tables that are under way, whatever the budget was when they began."""

from __future__ import annotations

from closed_loop import Loop
from test_closed_loop import run

from speculator_service.saguaro.sources import Source


def test_steps_follow_the_lists() -> None:
    loop = Loop.build(3, fan_out="auto", backup="primary")
    widths, engine = [], loop.speculator._steps._engine
    step = engine.step

    def observed(made):  # type: ignore[no-untyped-def]
        widths.append(made.live.shape[1])
        return step(made)

    engine.step = observed  # type: ignore[method-assign]
    budget, verifier = loop.speculator.planner._budget, loop.connect()
    most = loop.speculator.planner.num_outcomes
    run(loop, [verifier], count=6, batch=3)
    assert max(widths) == 1 + most
    for small in (2, 1):
        budget._most = budget._now = small
        loop.speculator.planner.replan()
        assert loop.speculator.planner.plan.counts[Source.HIT, -1].sum() == small
        run(loop, [verifier], count=2, batch=3)  # what is under way is finished as it was begun
        widths.clear()
        run(loop, [verifier], count=6, batch=3)
        assert 1 < max(widths) <= 1 + small
    assert loop.speculator.statistics.invalid == 0
