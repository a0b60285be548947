"""The plan of the speculator: which outcomes are prepared, how deep, and what answers a miss; adapted on-line.

Everything follows from counted outcomes and measured times by the paper's formulas (sections 4.1 to 4.3). No model,
no channel; one thread uses it, except for `Planner.snapshot`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median_high
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speculator_service.budget import Budget
from speculator_service.measurements import Measurements
from speculator_service.outlook import Forecast, Outlook
from speculator_service.plan import Plan, PlannerSnapshot, make_plan
from speculator_service.planner_settings import AUTO, PlannerSettings
from speculator_service.round_times import PLAIN, TABLE_ROWS, VERIFICATION, RoundTimes
from speculator_service.saguaro.batch_speedup import SpeculatorQuality, speedup_with
from speculator_service.saguaro.downweight_tuning import DownweightTuner
from speculator_service.saguaro.fallback import PRIMARY, FallbackPolicy
from speculator_service.saguaro.sources import BACKUPS, Source
from speculator_service.statistics import StepKind
from speculator_service.ways import Decision, Way, Ways

__all__ = ["Plan", "Planner", "PlannerSettings", "PlannerSnapshot"]

_MAX_RANKS = 64
"""Ranks counted one by one; beyond, the hit curves follow the fitted law."""
_DUE_AFTER = 64
"""New outcomes that are worth another plan."""
_FIRST_DUE_AFTER = 8
"""The same at the start, when each says much."""
_DUE_AFTER_S = 0.25
_MOST_KEPT = 64
"""Rounds that wait to be counted, should nobody ask for a plan."""
_RECENT_BATCHES = 32


class Planner:
    """Makes plans from what it observes.

    Args:
        settings: what is fixed.
        lookahead: K, 1..`MAX_LOOKAHEAD`.
        vocab_size: V.
        clock: seconds, for `is_due`.

    Raises:
        ConfigError: hand-written fan-out lists do not fit K, V or the budget.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        lookahead: int,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings.check_vocabulary(lookahead, vocab_size)
        self.num_outcomes = settings.num_outcomes(lookahead)
        """B: columns of a table."""
        self.max_candidates = min(self.num_outcomes + 2, vocab_size)
        """Candidates that any list may need at a position."""
        self._settings, self._lookahead, self._vocab_size, self._clock = settings, lookahead, vocab_size, clock
        ranks, times = min(max(self.num_outcomes, 1), _MAX_RANKS), RoundTimes()
        self._kinds = [Measurements(lookahead, ranks, times) for _ in range(2)]
        """Of greedy and of sampled batches: a temperature lowers acceptance at once."""
        self._measured = self._kinds[0]
        """Of the kind of the last batch."""
        self._tuner = DownweightTuner()
        self._ways = Ways(settings.ways(lookahead))
        self._policy = FallbackPolicy(list(BACKUPS))
        self._name = PRIMARY if settings.backup == AUTO else settings.backup
        """The backup in use."""
        self._forecasts: dict[int, Forecast] = {}
        """By batch size, the largest of a bucket."""
        self._policy_size = 0
        """Batch size of the forecast that ``_policy`` knows; 0: none."""
        self._depth = self._jit_depth = self._lone_depth = lookahead
        self._budget = Budget(settings, lookahead, vocab_size)
        self._batch_sizes: deque[int] = deque([1], maxlen=_RECENT_BATCHES)
        self._observed: list[tuple[NDArray[Any], ...]] = []
        """Arguments of `observe` that are not counted yet."""
        self._num_plans = self._new_outcomes = 0
        self.replan()

    # -- observations -------------------------------------------------------------------------------------------------

    def observe(
        self,
        source: NDArray[np.integer],
        num_accepted: NDArray[np.integer],
        num_sent: NDArray[np.integer],
        rank: NDArray[np.integer],
        num_known: NDArray[np.integer],
        downweight: NDArray[np.floating],
        hit: NDArray[np.bool_],
        has_table: NDArray[np.bool_] | None = None,
        *,
        is_sampled: bool = False,
    ) -> None:
        """Count the outcomes of a round; all arguments are [b], and not to be changed afterwards.

        They are kept as they are and counted with the next plan: a round pays nothing for that.

        Args:
            source, num_accepted, num_sent, rank, num_known: see `OutcomeEstimates.observe`.
            downweight: C with which the verified speculation was sampled; not a number where it was not sampled.
            hit: whether the outcome was prepared.
            has_table: whether any was; None: always. Where none was, nothing is learnt about hits.
            is_sampled: whether most of the batch is; a number, not an array.
        """
        if self._kinds[is_sampled] is not self._measured:
            self._count_observed()
            self._measured = self._kinds[is_sampled]
        if has_table is None:
            has_table = np.ones(len(source), np.bool_)
        self._observed.append((source, num_accepted, num_sent, rank, num_known, downweight, hit, has_table))
        self._new_outcomes += len(source)
        if len(self._observed) >= _MOST_KEPT:
            self._count_observed()

    def _count_observed(self) -> None:
        if not self._observed:
            return
        columns = [np.concatenate(column) for column in zip(*self._observed, strict=True)]
        self._observed.clear()
        source, num_accepted, num_sent, rank, num_known, downweight, hit, has_table = columns
        self._measured.observe(source, num_accepted, num_sent, rank, num_known, hit, has_table)
        sampled = has_table & (source <= Source.PRIMARY) & (num_sent > 0) & ~np.isnan(downweight)
        if self._settings.downweight == AUTO and sampled.any():
            self._tuner.observe(downweight[sampled], num_accepted[sampled], hit[sampled])

    def verification_took(self, batch_size: int, seconds: float, is_plain: bool = False) -> None:
        """A verifier's batch took so long from the last answer to its next outcomes; ``is_plain``: without drafts."""
        self._measured.times.add(PLAIN if is_plain else VERIFICATION, batch_size, seconds)
        self._batch_sizes.append(batch_size)

    def round_took(
        self,
        decision: Decision,
        source: NDArray[np.integer],
        num_accepted: NDArray[np.integer],
        num_sent: NDArray[np.integer],
        seconds: float,
    ) -> None:
        """A round that was decided about took so long; the arrays [b] as those of `observe`.

        Of the draft model's speculations count the tokens to be expected of so many, by all that is known of them:
        they scatter less than those that were accepted, so that a few rounds are enough to compare.
        """
        expected = self._expected.take(num_sent, mode="clip")  # nobody has checked what a verifier says that it had
        expected = np.where(source <= Source.PRIMARY, expected, 1.0 + num_accepted)
        is_plain = bool(2 * np.count_nonzero(num_sent) < len(num_sent))
        self._ways.round_took(decision, float(expected.mean()), seconds, is_plain)

    def step_took(self, kind: StepKind, batch_size: int, seconds: float, num_rows: int = 0) -> None:
        """A step of the draft model for so many sequences: TABLE, or DRAFT or GLUE, those that missed; else ignored.

        ``num_rows``: of a table step, dead ones included.
        """
        if kind is StepKind.PREFILL or not batch_size:
            return
        self._measured.times.add(kind, batch_size, seconds)
        if kind is StepKind.TABLE:
            self._measured.times.add(TABLE_ROWS, batch_size, num_rows)

    # -- per round ----------------------------------------------------------------------------------------------------

    def new_sequence(self) -> float:
        """Saguaro's C for a sequence that begins."""
        downweight = self._settings.downweight
        return self._tuner.next_arm() if isinstance(downweight, str) else float(downweight)

    def decide(self, batch_size: int, is_sampled: bool) -> Decision:
        """How far the next round of such a batch is speculated for."""
        return self._ways.decide(batch_size, is_sampled)

    def choose_backup(self, batch_size: int, num_missed: int, way: Way = Way.AHEAD) -> int:
        """Source of the answers to the ``num_missed`` misses of a batch (Theorem 17). Microseconds."""
        if way is Way.REST:
            return Source.EMPTY
        if way is Way.JUST_IN_TIME and self._settings.backup == AUTO:
            return Source.PRIMARY
        if num_missed:
            self._choose(batch_size)
        return BACKUPS[self._name]

    def _choose(self, batch_size: int) -> None:
        if self._settings.backup != AUTO:
            return
        forecast = self._nearest_forecast(batch_size)
        if forecast is not None and forecast.batch_size != self._policy_size:
            self._policy.update(forecast.primary, forecast.backups)
            self._policy_size = forecast.batch_size
        self._name = self._policy.choose(batch_size)

    def _nearest_forecast(self, batch_size: int) -> Forecast | None:
        if not self._forecasts:
            return None
        wanted = RoundTimes.bucket(batch_size)
        return self._forecasts[min(self._forecasts, key=lambda size: abs(RoundTimes.bucket(size) - wanted))]

    # -- plans --------------------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether there is enough news for another plan."""
        enough = min(_DUE_AFTER, _FIRST_DUE_AFTER * self._num_plans)
        return self._new_outcomes >= enough and self._clock() - self._planned_at >= _DUE_AFTER_S

    def replan(self) -> None:
        """Replace `plan` by what the measurements say now. Milliseconds."""
        self._count_observed()
        batch_size = median_high(self._batch_sizes)
        if not self._settings.adapt_depth:
            outlook = self._budget.outlook(self._measured)
        else:
            depth_before = self._depth
            now = batch_size, self._depth, self._jit_depth, self._name
            outlook, self._depth = self._budget.fit(self._measured, *now)
            self._jit_depth = outlook.best_jit_depth(batch_size, self._depth, self._jit_depth)
            self._lone_depth = outlook.best_lone_depth(batch_size, depth_before, self._lone_depth)
        sizes = [1 << bucket for bucket in self._measured.times.buckets(VERIFICATION)]
        forecasts = [outlook.forecast(size, self._depth, self._jit_depth) for size in sizes]
        self._forecasts = {forecast.batch_size: forecast for forecast in forecasts if forecast is not None}
        self._policy_size = 0  # the qualities that the policy knows are old
        self._choose(batch_size)
        forecast = self._nearest_forecast(batch_size)
        if self._settings.downweight == AUTO and forecast is not None:
            self._tuner.update(partial(_speedup, forecast, self._name))
        self.plan = make_plan(
            outlook.counts, self.num_outcomes, self._depth, self._jit_depth, BACKUPS[self._name], self._vocab_size
        )
        self.tableless_plan = make_plan(
            np.zeros_like(outlook.counts),
            self.num_outcomes,
            self._depth,
            self._lone_depth,
            Source.PRIMARY,
            self._vocab_size,
        )
        self._expected = np.array([1.0, *self._measured.tokens_by_depth(Source.HIT)])
        self._num_plans += 1
        self._new_outcomes, self._planned_at = 0, self._clock()
        self._snapshot = self._report(outlook, forecast)

    def plan_for(self, has_table: bool) -> Plan:
        """The plan, or the one of sequences without tables."""
        return self.plan if has_table else self.tableless_plan

    # -- view ---------------------------------------------------------------------------------------------------------

    def snapshot(self) -> PlannerSnapshot:
        """What the current plan was made of. From any thread."""
        return self._snapshot

    def _report(self, outlook: Outlook, forecast: Forecast | None) -> PlannerSnapshot:
        decision, known = self._policy.decision, forecast is not None
        return PlannerSnapshot(
            plan=self.plan,
            sources=outlook.sources(self._depth, self._jit_depth),
            forecast=forecast,
            critical_batch_size=decision.critical_batch_size if known else math.nan,
            speedups=_speedups(forecast),
            downweight=self._tuner.best if isinstance(self._settings.downweight, str) else self._settings.downweight,
            ways=self._ways.choices(),
            arms=self._tuner.report() if self._settings.downweight == AUTO else (),
        )


def _speedup(forecast: Forecast, backup: str, expected_tokens: float, hit_rate: float) -> float:
    """Of a primary with these qualities and the forecast's time; a primary backup draws the same tokens as it does."""
    quality = forecast.backups[backup]
    if backup == PRIMARY:
        quality = quality._replace(expected_tokens=expected_tokens, hit_rate=hit_rate)
    primary = SpeculatorQuality(forecast.primary.time, expected_tokens, hit_rate)
    return speedup_with(primary, quality, forecast.batch_size)


def _speedups(forecast: Forecast | None) -> dict[str, float]:
    """Predicted at the forecast's batch size, by backup."""
    if forecast is None:
        return {}
    return {
        name: speedup_with(forecast.primary, quality, forecast.batch_size) for name, quality in forecast.backups.items()
    }
