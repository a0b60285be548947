"""The plan as a monitoring system sees it."""

from __future__ import annotations

import numpy as np
from outcome_stream import OutcomeStream, power_law_ranks

from speculator_service.planner import Planner, PlannerSettings
from speculator_service.planner_metrics import planner_metrics
from speculator_service.statistics import StepKind
from speculator_service.ways import Way


def samples(planner: Planner) -> dict[tuple[str, ...], float]:
    """Values by name and labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in planner_metrics(planner.snapshot(), "x_")
        for sample in metric.samples
    }


def test_what_is_known_at_the_start() -> None:
    values = samples(Planner(PlannerSettings(fan_out=(3, 2, 1)), 2, 100))
    assert [values["x_fan_out", "hit", str(k)] for k in range(3)] == [3, 2, 1]
    assert [values["x_fan_out", "empty", str(k)] for k in range(3)] == [6, 0, 0]
    assert (values["x_depth",], values["x_backup_depth",], values["x_downweight",]) == (2, 2, 1)
    assert [values["x_backup", name] for name in ("primary", "suffix", "empty")] == [1, 0, 0]
    assert [values["x_ways", str(way)] for way in Way] == [0, 0, 0]
    assert not any(name[0] in ("x_verification_seconds", "x_predicted_speedup") for name in values)


def test_ways_in_use() -> None:
    planner = Planner(PlannerSettings(), 2, 100)
    for batch_size in (1, 1, 8):
        planner.decide(batch_size, is_sampled=False)
    planner.replan()
    values = samples(planner)
    assert [values["x_ways", str(way)] for way in Way] == [2, 0, 0]


def test_what_was_measured() -> None:
    planner = Planner(PlannerSettings(downweight="auto", adapt_depth=False), 2, 100)
    planner.verification_took(1, 0.5)
    planner.step_took(StepKind.TABLE, 1, 0.05, 16)
    planner.step_took(StepKind.DRAFT, 1, 0.1)
    OutcomeStream(np.full(2, 0.8), power_law_ranks(2, 0.5, 1)).run(planner, 200, downweight=0.4)
    planner.replan()
    values = samples(planner)
    assert values["x_verification_seconds",] == 0.5
    assert abs(values["x_primary_time_ratio",] - 0.3) < 1e-9
    assert abs(values["x_backup_time_ratio", "primary"] - 0.4) < 1e-9
    assert values["x_backup_time_ratio", "empty"] == 0
    assert abs(values["x_acceptance_rate", "hit"] - 0.8) < 0.03
    assert abs(values["x_hit_rate", "hit"] - 5 / 6) < 0.04
    assert values["x_predicted_speedup", "primary"] > 1.5
    assert values["x_critical_batch_size",] > 0
    assert abs(values["x_downweight_hit_rate", "0.4"] - 5 / 6) < 0.04
    assert ("x_downweight_hit_rate", "1") not in values
