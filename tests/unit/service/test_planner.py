"""The plan follows from the options, and from what is observed: it becomes the best one for the true laws."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from outcome_stream import OutcomeStream, power_law_ranks

from speculator_service.planner import Planner, PlannerSettings
from speculator_service.saguaro.sources import BACKUPS, NUM_SOURCES, Source
from speculator_service.statistics import StepKind
from speculator_service.ways import Way
from ssd_proto.errors import ConfigError

V = 1000


class Clock:
    """A second passes with every look at it."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def make(lookahead: int = 4, vocab_size: int = V, **settings: object) -> Planner:
    return Planner(PlannerSettings(**settings), lookahead, vocab_size, Clock())  # type: ignore[arg-type]


def tell_times(
    planner: Planner, verification: float, table: float, draft: float, batch_size: int = 1, num_missed: int = 1
) -> None:
    planner.verification_took(batch_size, verification)
    planner.step_took(StepKind.TABLE, batch_size, table, batch_size * (planner.num_outcomes + 1))
    planner.step_took(StepKind.DRAFT, num_missed, draft)


def settle(planner: Planner, times: int = 40) -> None:
    """Plan so often that nothing changes any more."""
    for _ in range(times):
        planner.replan()


class TestHandWrittenLists:
    def test_lists_by_depth_and_columns(self) -> None:
        planner = make(2, fan_out=(3, 2, 1), fan_out_after_miss=(4, 0, 0))
        plan = planner.plan
        assert planner.num_outcomes == 6
        assert plan.counts[Source.HIT].tolist() == [[6, 0, 0], [3, 3, 0], [3, 2, 1]]
        for source in (Source.PRIMARY, Source.SUFFIX, Source.EMPTY):
            assert plan.counts[source].tolist() == [[4, 0, 0], [4, 0, 0], [4, 0, 0]]
        assert plan.accepted[Source.HIT, 2].tolist() == [0, 0, 0, 1, 1, 2]
        assert plan.rank[Source.HIT, 2].tolist() == [0, 1, 2, 0, 1, 0]
        assert plan.accepted[Source.EMPTY, 0].tolist() == [0, 0, 0, 0, -1, -1]
        assert plan.rank[Source.EMPTY, 0].tolist() == [0, 1, 2, 3, 0, 0]
        assert (plan.depth, plan.jit_depth, plan.backup) == (2, 2, Source.PRIMARY)
        assert (plan.num_candidates, planner.max_candidates) == (6, 8)

    def test_one_number(self) -> None:
        plan = make(4, fan_out=3).plan
        assert plan.counts[Source.HIT, 4].tolist() == [3, 3, 3, 3, 3]
        assert plan.counts[Source.PRIMARY, 1].tolist() == [3, 12, 0, 0, 0]
        assert plan.num_candidates == 5

    def test_pearl_and_amusd_prepare_only_for_the_acceptance_of_all_tokens(self) -> None:
        plan = make(4, fan_out=(0, 0, 0, 0, 5)).plan
        for depth in range(5):
            assert set(plan.accepted[Source.HIT, depth].tolist()) == {depth}
            assert plan.rank[Source.HIT, depth].tolist() == [0, 1, 2, 3, 4]

    def test_one_branch_point(self) -> None:
        plan = make(4, fan_out=(0, 0, 6, 0, 0)).plan
        assert set(plan.accepted[Source.HIT, 4].tolist()) == {2}
        assert set(plan.accepted[Source.HIT, 3].tolist()) == {2}
        assert set(plan.accepted[Source.HIT, 1].tolist()) == {1}

    def test_nothing_prepared(self) -> None:
        planner = make(4, fan_out=0)
        assert planner.num_outcomes == 0
        assert planner.plan.accepted.shape == (NUM_SOURCES, 5, 0)
        tell_times(planner, 1.0, 0.1, 0.1)
        OutcomeStream(np.full(4, 0.8), power_law_ranks(4, 0.5, 1)).run(planner, 50)
        assert planner.plan.depth == 4

    def test_lists_are_clipped_to_the_vocabulary(self) -> None:
        planner = make(2, vocab_size=5, fan_out=(3, 2, 4))
        assert planner.plan.counts[Source.HIT].tolist() == [[5, 0, 0], [3, 5, 0], [3, 2, 4]]
        assert planner.max_candidates == 5
        assert planner.plan.num_candidates == 5
        auto = make(2, vocab_size=5, fan_out="auto", branch_budget=30).plan
        assert auto.counts[Source.HIT].tolist() == [[5, 0, 0], [4, 5, 0], [4, 4, 5]]

    def test_they_stay_whatever_is_observed(self) -> None:
        planner = make(4, fan_out=(1, 2, 3, 4, 5))
        OutcomeStream(np.full(4, 0.2), power_law_ranks(4, 0.5, 1)).run(planner, 100)
        assert planner.plan.counts[Source.HIT, 4].tolist() == [1, 2, 3, 4, 5]

    def test_a_list_for_hits_beside_a_measured_one_for_misses(self) -> None:
        planner = make(2, fan_out=(9, 9, 9), fan_out_after_miss="auto")
        assert planner.num_outcomes == 27
        assert planner.plan.counts[Source.PRIMARY, 2].sum() == 27
        other = make(2, fan_out="auto", fan_out_after_miss=(5, 0, 0))
        assert other.num_outcomes == 9
        assert other.plan.counts[Source.PRIMARY, 2].tolist() == [5, 0, 0]


class TestMistakes:
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"fan_out": "many"}, "fan_out must be auto, a number, or a list"),
            ({"fan_out": (1, 2.5, 3)}, "fan_out must be auto"),
            ({"fan_out": -1}, "fan_out must have no entry below 0"),
            ({"fan_out_after_miss": (1, -2, 3)}, "fan_out_after_miss must have no entry below 0"),
            ({"fan_out": (1, 2)}, r"fan_out must have lookahead \+ 1 = 3 entries"),
            ({"fan_out_after_miss": (1, 2)}, "fan_out_after_miss must have lookahead"),
            ({"fan_out": 400}, "fan_out must prepare at most 1024 outcomes per sequence, got 1200"),
            ({"fan_out": 3, "branch_budget": 5}, "branch_budget is for fan_out auto"),
            ({"fan_out": "auto", "branch_budget": -1}, "branch_budget must be 0 to 1024"),
            ({"fan_out": "auto", "branch_budget": 1025}, "branch_budget must be 0 to 1024"),
            ({"fan_out": "auto", "branch_budget": 3.0}, "branch_budget must be 0 to 1024"),
            ({"fan_out": "auto", "branch_budget": 5, "fan_out_after_miss": 2}, "branch_budget must be at least 6"),
            ({"backup": "random"}, "backup must be one of auto, primary, suffix, empty"),
            ({"downweight": 1.5}, "downweight must be 0 to 1, or auto"),
            ({"downweight": "low"}, "downweight must be 0 to 1, or auto"),
            ({"downweight": float("nan")}, "downweight must be 0 to 1, or auto"),
            ({"fan_out": (3, 12, 3)}, "fan_out must be at most 11 for k < K = 2 and 12 for k = K"),
            ({"fan_out": (3, 3, 13)}, "fan_out must be at most 11 for k < K = 2 and 12 for k = K"),
        ],
    )
    def test_name_the_option(self, settings: dict[str, object], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            make(2, vocab_size=12, **settings)


class TestMeasuredLists:
    def test_start_from_the_power_law(self) -> None:
        plan = make(4, fan_out="auto").plan
        assert plan.counts[Source.HIT, 4].sum() == 15
        assert (np.diff(plan.counts[Source.HIT, 4, :4]) <= 0).all()
        for source in range(NUM_SOURCES):
            assert plan.counts[source, 0].tolist() == [15, 0, 0, 0, 0]
            for depth in range(5):
                assert plan.counts[source, depth].sum() == 15
                assert (plan.counts[source, depth, depth + 1 :] == 0).all()

    @pytest.mark.parametrize("acceptance", [(0.9, 0.5), (0.3, 0.8), (0.6, 0.6)])
    def test_become_the_best_ones(self, acceptance: tuple[float, float]) -> None:
        """Against all lists of the budget, with curves that differ by position and are not a power law."""
        ranks = np.array(
            [[0.5, 0.2, 0.1, 0.05, 0.02, 0.01], [0.15, 0.14, 0.13, 0.12, 0.11, 0.1], [0.8, 0.1, 0.02, 0.01, 0.01, 0.01]]
        )
        stream = OutcomeStream(np.array(acceptance), ranks)
        planner = make(2, fan_out="auto", branch_budget=6, backup="primary", adapt_depth=False)
        stream.run(planner, 500, batch_size=64)
        lists = [fan_out for fan_out in itertools.product(range(7), repeat=3) if sum(fan_out) == 6]
        best = max(map(stream.hit_rate, lists))
        planned = tuple(planner.plan.counts[Source.HIT, 2].tolist())
        assert sum(planned) == 6
        assert stream.hit_rate(planned) >= best - 0.002
        assert stream.hit_rate((2, 2, 2)) < best - 0.005

    @pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.8, 0.95])
    @pytest.mark.parametrize(("constant", "exponent"), [(0.6, 0.4), (0.5, 1.0), (0.2, 1.5)])
    def test_are_at_least_as_good_as_uniform_ones(self, acceptance: float, constant: float, exponent: float) -> None:
        stream = OutcomeStream(np.full(4, acceptance), power_law_ranks(4, constant, exponent))
        planner = make(4, fan_out="auto", backup="primary", adapt_depth=False)
        stream.run(planner, 150, batch_size=64)
        assert stream.hit_rate(tuple(planner.plan.counts[Source.HIT, 4].tolist())) >= stream.hit_rate((3,) * 5) - 1e-3

    def test_follow_a_change(self) -> None:
        planner = make(2, fan_out="auto", branch_budget=9, backup="primary")
        OutcomeStream(np.array([0.95, 0.95]), power_law_ranks(2, 0.5, 1)).run(planner, 60, batch_size=64)
        assert planner.plan.counts[Source.HIT, 2].argmax() == 2
        OutcomeStream(np.array([0.1, 0.1]), power_law_ranks(2, 0.5, 1)).run(planner, 300, batch_size=64)
        assert planner.plan.counts[Source.HIT, 2].argmax() == 0

    def test_short_speculations_do_not_spoil_the_curves_of_rejections(self) -> None:
        """A bonus token of the target itself, after one token, is no news of a rejection at position 1."""
        planner = make(2, fan_out="auto", backup="primary")
        ones = np.ones(500, np.int64)
        for _ in range(4):
            planner.observe(0 * ones, ones, ones, 0 * ones, ones, ones * np.nan, ones > 0)
        before = planner.plan
        planner.replan()
        assert planner.plan is not before
        curves = planner._measured.estimates.hit_curves(Source.HIT, 1)
        assert curves[2, 1] > 0.95 > curves[1, 1]


class TestBudget:
    """K = 4, so that 15 outcomes are prepared if there is time for them."""

    def run(self, planner: Planner, per_row: float, constant: float = 0.0, batch_size: int = 4) -> int:
        """Outcomes that are prepared in the end, where a step takes ``constant`` and for each token ``per_row``."""
        stream = OutcomeStream(np.full(4, 0.8), power_law_ranks(4, 0.4, 0.8))
        for _ in range(80):
            stream.run(planner, 16, batch_size)
            num_rows = batch_size * (1 + self.prepared(planner))
            planner.verification_took(batch_size, 1.0)
            for _ in range(8):
                planner.step_took(StepKind.TABLE, batch_size, constant + per_row * num_rows, num_rows)
                planner.step_took(StepKind.DRAFT, 1, constant + per_row)
            planner.replan()
        return self.prepared(planner)

    def prepared(self, planner: Planner) -> int:
        return int(planner.plan.counts[Source.HIT, planner.plan.depth].sum())

    def test_is_all_where_there_is_time(self) -> None:
        assert self.run(make(4), 0.002) == 15

    def test_is_what_there_is_time_for(self) -> None:
        """All of it would take 5 steps of 64 tokens: 1.6 verifications."""
        planner = make(4)
        prepared = self.run(planner, 0.005)
        assert 5 <= prepared <= 11
        forecast = planner.snapshot().forecast
        assert forecast is not None
        assert 0.7 < forecast.primary.time <= 1.1

    def test_can_be_very_small(self) -> None:
        assert self.run(make(4), 0.05) <= 3

    def test_is_all_where_more_of_it_takes_no_longer(self) -> None:
        """As on a GPU: fewer outcomes would not be there sooner."""
        assert self.run(make(4), 0.0, 0.15) == 15

    def test_follows_the_times(self) -> None:
        planner = make(4)
        assert self.run(planner, 0.005, 0.05) < 12
        assert self.run(planner, 0.001, 0.05) >= 13

    @pytest.mark.parametrize(
        "settings", [{"fan_out": 3}, {"fan_out": (5, 4, 3, 2, 1)}, {"adapt_depth": False}], ids=str
    )
    def test_stays_where_it_is_fixed(self, settings: dict[str, Any]) -> None:
        assert self.run(make(4, **settings), 0.005) == 15


class TestDepth:
    @pytest.mark.parametrize(("step", "depth"), [(0.1, 6), (0.15, 6), (0.25, 3), (0.6, 1)])
    def test_has_the_highest_speedup(self, step: float, depth: int) -> None:
        """(1 + a + .. + a^D) / max(1, (D + 1) step) where a just-in-time step is no cheaper than one of the table."""
        planner = make(6, backup="empty")
        OutcomeStream(np.full(6, 0.95), power_law_ranks(6, 0.5, 1)).run(planner, 200)
        tell_times(planner, 1.0, step, step)
        planner.replan()
        assert planner.plan.depth == depth
        assert planner.snapshot().forecast is not None
        assert planner.snapshot().forecast.primary.time == pytest.approx((depth + 1) * step)  # type: ignore[union-attr]

    def test_is_the_fastest_where_none_is_done_in_time(self) -> None:
        """T_p = D + 1: (1 + a + .. + a^D) / (D + 1) is largest for one token."""
        planner = make(4, backup="empty")
        tell_times(planner, 1.0, 1.0, 1.0)
        settle(planner)
        assert planner.plan.depth == 1

    def test_is_not_cut_where_a_late_table_is_finished_cheaply(self) -> None:
        planner = make(4, backup="primary")
        OutcomeStream(np.full(4, 0.8), power_law_ranks(4, 0.5, 1)).run(planner, 200)
        tell_times(planner, 1.0, 0.24, 0.05)
        planner.replan()
        assert planner.plan.depth == 4

    def test_is_less_where_verification_takes_longer_the_more_it_verifies(self) -> None:
        """E(D) = (1 - .4^(D + 1)) / .6, T(D) = .2 + .8 D / 6 where tables are free: E / T is largest for one token."""
        planner = make(6, backup="empty")
        OutcomeStream(np.full(6, 0.4), power_law_ranks(6, 0.5, 1)).run(planner, 200)
        tell_times(planner, 1.0, 0.01, 0.01)
        planner.replan()
        assert planner.plan.depth == 6, "all verifications are believed to take the same time"
        for _ in range(40):
            planner.verification_took(1, 0.2, is_plain=True)
        planner.replan()
        assert planner.plan.depth == 1

    @pytest.mark.parametrize(("backup", "depth"), [("empty", 1), ("suffix", 6)])
    def test_is_not_less_where_another_sequence_makes_the_verification_long(self, backup: str, depth: int) -> None:
        """A large batch has a miss nearly always; it is as long then as the backup's speculation."""
        planner = make(6, backup=backup, branch_budget=7)
        OutcomeStream(np.full(6, 0.4), power_law_ranks(6, 0.5, 1)).run(planner, 200, batch_size=64)
        for _ in range(40):
            tell_times(planner, 1.0, 0.01, 0.01, batch_size=64)
            planner.verification_took(64, 0.2, is_plain=True)
        for _ in range(3):
            planner.replan()
        assert planner.plan.depth == depth

    def test_without_tables_weighs_the_time_of_drafting_alone(self) -> None:
        planner = make(6, backup="primary")
        OutcomeStream(np.full(6, 0.5), power_law_ranks(6, 0.5, 1)).run(planner, 200)
        lone_depths = []
        for step in (0.01, 0.5):
            for _ in range(40):
                tell_times(planner, 1.0, 0.01, step)
            settle(planner)
            lone_depths.append(planner.plan_for(False).jit_depth)
        assert lone_depths == [6, 1]

    def test_greedy_batches_are_not_judged_by_sampled_ones(self) -> None:
        planner = make(6, backup="empty")
        stream = OutcomeStream(np.full(6, 0.95), power_law_ranks(6, 0.5, 1))
        stream.run(planner, 200)
        tell_times(planner, 1.0, 0.1, 0.1)
        planner.replan()
        depth, promised = planner.plan.depth, planner.snapshot().sources[Source.HIT].acceptance_rate
        seldom = np.zeros(64, np.int64)
        for _ in range(50):
            others = (seldom, seldom, seldom + 6, seldom - 1, seldom, np.full(64, np.nan), np.zeros(64, np.bool_))
            planner.observe(*others, is_sampled=True)
        planner.replan()
        assert planner.snapshot().sources[Source.HIT].acceptance_rate < 0.1
        stream.run(planner, 1)
        planner.replan()
        assert planner.snapshot().sources[Source.HIT].acceptance_rate == pytest.approx(promised, abs=0.02)
        assert planner.plan.depth == depth

    def test_stays_where_it_is_fixed(self) -> None:
        planner = make(6, adapt_depth=False)
        tell_times(planner, 1.0, 0.5, 0.5)
        settle(planner)
        assert (planner.plan.depth, planner.plan.jit_depth) == (6, 6)

    def test_does_not_swing_with_noise(self) -> None:
        planner, generator = make(6, backup="empty"), np.random.default_rng(0)
        depths = []
        for step in 0.2 * (1 + 0.05 * generator.standard_normal(400)):  # (4 + 1) x .2 is exactly a verification
            tell_times(planner, 1.0, step, step)
            planner.replan()
            depths.append(planner.plan.depth)
        assert set(depths[20:]) <= {3, 4}
        assert sum(one != other for one, other in itertools.pairwise(depths[20:])) <= 2

    def test_comes_back_when_the_steps_are_fast_again(self) -> None:
        """What is accepted at depths that were not drafted lately is not forgotten, nor taken for rejected."""
        planner = make(6, backup="empty")
        stream = OutcomeStream(np.full(6, 0.9), power_law_ranks(6, 0.5, 1))
        for _ in range(40):
            tell_times(planner, 1.0, 0.25, 0.25)
        stream.run(planner, 400, batch_size=64)
        assert planner.plan.depth == 3
        for _ in range(40):
            tell_times(planner, 1.0, 0.1, 0.1)
        planner.replan()
        assert planner.plan.depth == 6

    def test_of_a_backup_weighs_its_time(self) -> None:
        """Drafting just in time stops the whole batch: the larger, the fewer tokens are worth it."""
        depths = []
        for batch_size in (1, 32):
            planner = make(6, backup="primary", adapt_depth=True)
            OutcomeStream(np.full(6, 0.8), power_law_ranks(6, 0.3, 1)).run(planner, 200)
            tell_times(planner, 1.0, 0.1, 0.1, batch_size)
            settle(planner)
            depths.append(planner.plan.jit_depth)
        assert depths[0] > depths[1]


class TestWays:
    """What is told of rounds; `test_ways.py` has the experiments."""

    FULL, NOTHING = np.full(4, 4), np.zeros(4, np.int64)

    def run(self, planner: Planner, seconds: dict[Way, float], num_rounds: int = 800) -> list[Way]:
        """Rounds that take so long."""
        ways = []
        for _ in range(num_rounds):
            decision = planner.decide(4, True)
            sent = self.NOTHING if decision.way is Way.REST else self.FULL
            planner.round_took(decision, 0 * sent + Source.HIT, np.minimum(2, sent), sent, seconds[decision.way])
            ways.append(decision.way)
        return ways

    @pytest.mark.parametrize("best", list(Way))
    def test_the_fastest_is_found(self, best: Way) -> None:
        planner = make(4)
        OutcomeStream(np.full(4, 0.8), power_law_ranks(4, 0.5, 1)).run(planner, 50)  # E = 3.4
        seconds = {Way.AHEAD: 1.0, Way.JUST_IN_TIME: 1.0, Way.REST: 1.0 / 3.4} | {best: 0.8 / 3.4}
        ways = self.run(planner, seconds)
        assert set(ways) == set(Way)
        assert set(ways[-100:]) == {best}

    def test_what_was_accepted_by_chance_does_not_count(self) -> None:
        planner = make(4)
        OutcomeStream(np.full(4, 0.8), power_law_ranks(4, 0.5, 1)).run(planner, 50)
        decision, tokens = planner.decide(4, True), []
        planner._ways.round_took = lambda *told: tokens.append(told[1])  # type: ignore[method-assign]
        for accepted in (0, 4):
            planner.round_took(decision, self.NOTHING + Source.HIT, self.NOTHING + accepted, self.FULL, 1.0)
            planner.round_took(decision, self.NOTHING + Source.SUFFIX, self.NOTHING + accepted, self.FULL, 1.0)
        assert tokens[0] == tokens[2] == pytest.approx(3.4, abs=0.3)
        assert tokens[1::2] == [1, 5]

    def test_numbers_that_make_no_sense_do_no_harm(self) -> None:
        planner = make(4)
        for sent in (-(2**31), 2**31 - 1):
            planner.round_took(planner.decide(4, True), self.NOTHING, self.NOTHING, self.NOTHING + sent, 1.0)

    def test_nothing_is_tried_with_no_rest(self) -> None:
        ways = self.run(make(4, rest=False), {Way.AHEAD: 9.0})
        assert set(ways) == {Way.AHEAD}

    @pytest.mark.parametrize("settings", [{"fan_out": 0}, {"backup": "empty"}])
    def test_what_would_be_the_same_is_not_tried(self, settings: dict[str, Any]) -> None:
        assert set(self.run(make(4, **settings), {Way.AHEAD: 1.0, Way.REST: 1.0})) == {Way.AHEAD, Way.REST}

    def test_rounds_without_tables_teach_nothing_about_hits(self) -> None:
        planner, zeros = make(4), np.zeros(500, np.int64)
        OutcomeStream(np.full(4, 0.8), power_law_ranks(4, 0.5, 1)).run(planner, 100)
        before = planner._measured.hit_rate(Source.HIT, 0.5)
        unprepared = (zeros, zeros, zeros + 4, zeros, zeros + 1, zeros * np.nan, zeros > 0, zeros > 0)
        planner.observe(*unprepared)
        planner.replan()
        assert planner._measured.hit_rate(Source.HIT, 0.5) == pytest.approx(before)

    def test_backups(self) -> None:
        planner = TestBackup().planner((64,))
        assert planner.choose_backup(64, 9) != Source.PRIMARY
        assert planner.choose_backup(64, 9, Way.JUST_IN_TIME) == Source.PRIMARY
        assert planner.choose_backup(64, 9, Way.REST) == Source.EMPTY
        assert make(4, backup="suffix").choose_backup(64, 9, Way.JUST_IN_TIME) == Source.SUFFIX


class TestBackup:
    def planner(self, batch_sizes: tuple[int, ...] = (1,), acceptance: float = 0.9, suffix: float = 0.0) -> Planner:
        planner = make(4, adapt_depth=False)
        stream = OutcomeStream(np.full(4, acceptance), power_law_ranks(4, 0.6, 0.6), suffix_tokens=suffix)
        for batch_size in batch_sizes:
            for _ in range(40):
                tell_times(planner, 1.0, 0.08, 0.08, batch_size, max(1, batch_size // 4))
            stream.run(planner, 100, batch_size)
        return planner

    def test_is_primary_until_times_are_known(self) -> None:
        planner = make(4)
        assert planner.choose_backup(1000, 500) == Source.PRIMARY
        OutcomeStream(np.full(4, 0.1), power_law_ranks(4, 0.5, 1)).run(planner, 100)
        assert planner.choose_backup(1000, 500) == Source.PRIMARY
        assert planner.snapshot().forecast is None

    @pytest.mark.parametrize("name", list(BACKUPS))
    def test_is_what_the_settings_say(self, name: str) -> None:
        planner = make(4, backup=name)
        tell_times(planner, 1.0, 0.2, 0.2)
        settle(planner)
        assert planner.plan.backup == BACKUPS[name]
        assert planner.choose_backup(64, 3) == BACKUPS[name]
        assert planner.choose_backup(64, 0) == BACKUPS[name]

    def test_is_primary_for_one_sequence_and_fast_for_many(self) -> None:
        planner = self.planner((1, 64))
        assert planner.choose_backup(64, 9) != Source.PRIMARY
        assert planner.choose_backup(1, 1) == Source.PRIMARY
        critical = planner.snapshot().critical_batch_size
        assert 1 < critical < 64

    def test_does_not_swing_around_the_critical_batch_size(self) -> None:
        planner = self.planner((1, 2, 4, 8, 16, 32))
        best = []
        for batch_size in range(1, 33):
            planner.choose_backup(batch_size, 1)
            speedups = planner._policy.decision.speedups
            best.append(max(speedups, key=speedups.__getitem__))
        assert best[0] == "primary"
        below = max(batch_size for batch_size, name in enumerate(best, 1) if name == "primary")
        assert below < 16
        for start in (1, 32):  # coming from either side
            planner.choose_backup(start, 1)
            chosen = [planner.choose_backup(below + turn % 2, 1) for turn in range(100)]
            assert len(set(chosen)) == 1

    def test_follows_the_times(self) -> None:
        planner = self.planner((4,))
        before = planner.choose_backup(4, 1)
        for _ in range(40):
            tell_times(planner, 1.0, 0.08, 0.002 if before != Source.PRIMARY else 0.8, 4)
        planner.replan()
        assert (planner.choose_backup(4, 1) == Source.PRIMARY) == (before != Source.PRIMARY)

    def test_suffix_is_tried_and_kept_if_it_is_good(self) -> None:
        good = self.planner((64,), suffix=2.0)
        assert good.plan.backup == Source.SUFFIX
        assert good.snapshot().sources[Source.SUFFIX].expected_tokens == pytest.approx(3, abs=0.1)

    def test_suffix_is_tried_and_given_up_if_it_finds_nothing(self) -> None:
        """It then yields what an empty speculation yields; how often it was tried is bounded."""
        planner = self.planner((64,), suffix=0.0)
        tried = planner.snapshot().sources[Source.SUFFIX]
        assert tried.num_outcomes > 0
        assert tried.expected_tokens < 1.15

    def test_an_empty_speculation_is_followed_by_the_targets_own_token(self) -> None:
        planner = make(2, fan_out="auto", branch_budget=4)
        ones = np.ones(1000, np.int64)
        # All accepted: always the first candidate. Rejected at once: never one of those looked at.
        planner.observe(0 * ones, 2 * ones, 2 * ones, 0 * ones, ones, ones * np.nan, ones > 0)
        planner.observe(0 * ones, 0 * ones, 2 * ones, -ones, 4 * ones, ones * np.nan, ones < 0)
        tell_times(planner, 1.0, 0.1, 0.1)
        planner.replan()
        forecast = planner.snapshot().forecast
        assert forecast is not None
        assert forecast.backups["empty"].hit_rate > 0.97
        assert forecast.backups["empty"].expected_tokens == 1.0
        assert forecast.backups["empty"].time == 0.0
        assert forecast.primary.hit_rate == pytest.approx(0.5, abs=0.02)


class TestDownweight:
    def test_fixed(self) -> None:
        planner = make(4, downweight=0.3)
        assert [planner.new_sequence() for _ in range(9)] == [0.3] * 9
        assert planner.snapshot().downweight == 0.3
        assert planner.snapshot().arms == ()

    def test_by_experiment_counts_only_what_was_sampled_by_the_draft_model(self) -> None:
        planner = make(4, downweight="auto")
        assert len({planner.new_sequence() for _ in range(40)}) == 5
        ones = np.ones(4, np.int64)
        source = np.array([Source.HIT, Source.PRIMARY, Source.SUFFIX, Source.HIT])
        downweight = np.array([0.4, 0.4, 0.4, np.nan])
        planner.observe(source, ones, 4 * ones, 0 * ones, ones, downweight, ones > 0)
        planner.replan()
        counted = {arm.downweight: arm.num_outcomes for arm in planner.snapshot().arms}
        assert counted == {1.0: 0, 0.7: 0, 0.4: 2, 0.15: 0, 0.0: 0}


class TestReplanning:
    def test_is_due_after_news_and_time(self) -> None:
        clock = Clock()
        planner = Planner(PlannerSettings(), 4, V, clock)
        assert not planner.is_due()
        stream = OutcomeStream(np.full(4, 0.8), power_law_ranks(4, 0.5, 1))
        while not planner.is_due():
            stream._round(planner, np.nan) if len(stream.source) else stream.run(planner, 1)
        clock.now -= 100  # no time passed
        assert not planner.is_due()

    def test_plans_are_new_objects(self) -> None:
        planner = make(4)
        plan = planner.plan
        planner.replan()
        assert planner.plan is not plan

    def test_steps_of_other_kinds_and_without_sequences_do_not_count(self) -> None:
        planner = make(4)
        planner.verification_took(1, 1.0)
        planner.step_took(StepKind.PREFILL, 1, 5.0)
        planner.step_took(StepKind.TABLE, 0, 0.0)
        planner.replan()
        assert planner.snapshot().forecast is None
