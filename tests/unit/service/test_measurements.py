"""What is concluded from times and counts."""

from __future__ import annotations

import numpy as np
import pytest

from speculator_service.measurements import Measurements
from speculator_service.round_times import TABLE_ROWS
from speculator_service.saguaro.sources import Source
from speculator_service.statistics import StepKind


def measured(table: float, draft: float, rows: int = 64) -> Measurements:
    """Of batches of 4 sequences, one of which missed."""
    result = Measurements(4, 8)
    result.times.add(StepKind.TABLE, 4, table)
    result.times.add(TABLE_ROWS, 4, rows)
    result.times.add(StepKind.DRAFT, 1, draft)
    return result


@pytest.mark.parametrize(
    ("table", "draft", "num_rows", "expected"),
    [
        (0.64, 0.01, 64, 1.0),  # as measured
        (0.64, 0.01, 32, 0.5),  # as on a CPU: by the row
        (0.64, 0.01, 128, 2.0),
        (0.3, 0.3, 32, 1.0),  # as on a GPU: by the step
        (0.3, 0.4, 32, 1.0),  # a slow step of one row does not make larger ones faster
        (0.73, 0.1, 1, 0.1 / 0.73),  # both: 0.09 and 0.01 for each row
    ],
)
def test_table_steps_of_other_sizes(table: float, draft: float, num_rows: int, expected: float) -> None:
    assert measured(table, draft).relative_table_step(4, 1, num_rows) == pytest.approx(expected)


def test_nothing_is_concluded_from_steps_of_one_size() -> None:
    assert Measurements(4, 8).relative_table_step(4, 1, 32) == 1.0
    assert measured(0.3, 0.1, rows=1).relative_table_step(4, 1, 32) == 1.0


def test_hits_of_other_lists() -> None:
    """What was counted stays, but for what the change of lists promises."""
    result, size = Measurements(4, 8), 400
    zeros, ones = np.zeros(size, np.int64), np.ones(size, np.int64)
    hits = np.arange(size) % 2 == 0
    result.observe(Source.HIT * ones, zeros, 4 * ones, zeros, 8 * ones, hits, ones > 0)
    assert result.hit_rate(Source.HIT, 0.5) == pytest.approx(0.5)
    result.change_lists(np.array([3.0, 1.0, 1.0, 1.0]))
    assert result.hit_rate(Source.HIT, 0.75) == pytest.approx(0.75)
    for factor in [4.0] * 2 + [0.25] * 2 + [1 / 3]:  # there and back
        result.change_lists(np.array([factor, 1.0, 1.0, 1.0]))
        assert 0 < result.hit_rate(Source.HIT, 0.5) < 1
    assert result.hit_rate(Source.HIT, 0.5) == pytest.approx(0.5)
