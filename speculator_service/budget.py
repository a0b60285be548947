"""How many outcomes are prepared: the fan-out lists for a budget, and the budget that there is time for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from speculator_service.measurements import Measurements
from speculator_service.outlook import Outlook
from speculator_service.planner_settings import PlannerSettings
from speculator_service.saguaro.depth import best_depth
from speculator_service.saguaro.fan_out_lists import measured_lists, written_lists
from speculator_service.saguaro.sources import NUM_SOURCES, Source

_MARGIN = 0.01
"""Relative gain that is worth other lists."""
_DEPTH_MARGIN = 0.03
"""Relative gain that is worth another depth."""


class Budget:
    """Outcomes prepared where the fan-out is not hand-written: as many as the settings allow, or fewer.

    Args:
        settings: what is fixed.
        lookahead, vocab_size: K and V.
    """

    def __init__(self, settings: PlannerSettings, lookahead: int, vocab_size: int) -> None:
        self._settings, self._lookahead, self._vocab_size = settings, lookahead, vocab_size
        self._most = self._now = settings.num_outcomes(lookahead)
        hit_list, miss_list = settings.hit_list(lookahead), settings.miss_list(lookahead)
        self._written: list[NDArray[np.int64] | None] = []
        for source in range(NUM_SOURCES):
            written = hit_list if source == Source.HIT else miss_list
            self._written.append(None if written is None else written_lists(written, vocab_size))
        self._is_fixed = hit_list is not None
        self._num_fits = 0

    def outlook(self, measured: Measurements) -> Outlook:
        """What the lists of the current budget promise."""
        return self._outlook(measured, self._now)

    def fit(
        self, measured: Measurements, batch_size: int, depth: int, jit_depth: int, backup: str
    ) -> tuple[Outlook, int]:
        """Choose by predicted speedup the budget and the depth, which is returned; the arguments are the current ones.

        In turn a smaller and a larger budget is compared: a plan costs little more than without.
        """
        outlook, now = self.outlook(measured), (batch_size, depth, jit_depth, backup)
        speedups = outlook.speedups(*now, outlook)
        if speedups is None:
            return outlook, depth
        best = best_depth(speedups, depth, _DEPTH_MARGIN)
        budget = self._next_to_compare()
        if budget != self._now:
            other = self._outlook(measured, budget)
            theirs = outlook.speedups(*now, other)
            assert theirs is not None  # what is known is the same
            their_best = best_depth(theirs, depth, _DEPTH_MARGIN)
            if theirs[their_best - 1] > (1 + _MARGIN) * speedups[best - 1]:
                self._now = budget
                measured.change_lists(outlook.gain(other, depth, jit_depth))
                return other, their_best
        return outlook, best

    def _next_to_compare(self) -> int:
        self._num_fits += 1
        if self._is_fixed or self._now == 0:
            return self._now
        return min(self._now * 4 // 3 + 1, self._most) if self._num_fits % 2 else max(self._now * 3 // 4, 1)

    def _outlook(self, measured: Measurements, budget: int) -> Outlook:
        lists, curves = [], []
        for source, written in enumerate(self._written):
            curves.append(measured.estimates.hit_curves(source, self._most))
            if written is not None:
                lists.append(written)
            else:
                acceptance = measured.estimates.acceptance_by_position(source)
                lists.append(measured_lists(budget, acceptance, curves[-1], self._vocab_size))
        return Outlook(measured, np.stack(lists), np.stack(curves))
