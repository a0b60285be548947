"""launch/bench: what is made of measured numbers. All of them are made by hand here, so the results are known."""

from __future__ import annotations

from typing import Any

import pytest
from bench_numbers import CELL, MODES, NAMES, measured, page, run  # first: it finds the modules of launch/
from benchmark.client import Completion, Stream, completion_of, stream_of
from benchmark.measurement import Measurements
from benchmark.pairing import Ratio, paired_ratio, percentile
from benchmark.prediction import RoundParts, predicted_speedup, round_parts, theorem_speedup
from benchmark.rows import Row, make_rows
from benchmark.service_counts import counts_between, parse_samples, sum_counts
from benchmark.speeds import speeds_of
from prometheus_client import CollectorRegistry, generate_latest

from speculator_service.metrics import SpeculatorCollector
from speculator_service.saguaro.batch_speedup import batch_speedup
from speculator_service.saguaro.speedup import ssd_speedup
from tests.simulation.closed_loop import Loop


class TestPairs:
    def test_drift_does_not_matter_within_a_repetition(self) -> None:
        assert paired_ratio([20, 40, 10], [10, 20, 5]) == Ratio(2, 2, 2)
        assert paired_ratio([3, 1], [1, 1]) == Ratio(2, 1, 3)

    def test_unpaired_measurements_are_refused(self) -> None:
        for mine, theirs in (([1.0], [1.0, 2.0]), ([], [])):
            with pytest.raises(ValueError, match=r"zip|nothing"):
                paired_ratio(mine, theirs)

    def test_percentiles_are_measured_values(self) -> None:
        values = [float(value) for value in range(200, 0, -1)]
        assert [percentile(values, percent) for percent in (50, 99, 100)] == [100, 198, 200]


class TestAnswers:
    def test_tokens_and_rounds_are_the_servers(self) -> None:
        about: dict[str, Any] = {"completion_tokens": 9, "e2e_latency": 0.5}
        plain = completion_of({"output_ids": [1, 2, 3], "meta_info": about})
        assert plain == Completion((1, 2, 3), 9, 8, (), 0.5)
        speculated = about | {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [1, 0, 2]}
        assert completion_of({"output_ids": [], "meta_info": speculated}) == Completion((), 9, 3, (1, 0, 2), 0.5)

    def test_tokens_of_a_chunk_share_its_time(self) -> None:
        """Chunks without a new token are part of the next gap; those before the first token are part of its wait."""
        stream = stream_of(10.0, [(10.25, 0), (10.5, 1), (11.0, 1), (11.5, 5), (11.75, 6)])
        assert stream == Stream(0.5, (0.25, 0.25, 0.25, 0.25, 0.25))
        assert stream_of(0.0, [(2.0, 3)]) == Stream(2.0, ())


class TestServiceCounts:
    def test_only_what_was_counted_in_between_counts(self) -> None:
        counts = counts_between(page(2), page(3))
        assert counts.answer_s == pytest.approx([0.02, 0.012])
        assert counts.rounds == [4, 6]
        assert counts.outcomes == {"hit": 15, "short_hit": 1, "not_predicted": 4, "not_started": 0}
        assert counts.full_hits == [4, 1, 0, 10]
        assert (counts.num_outcomes, counts.num_rounds) == (20, 10)
        assert (counts.table_steps, counts.table_step_s) == (50, pytest.approx(0.1))

    def test_runs_add_up(self) -> None:
        total = sum_counts([counts_between({}, page(1)), counts_between(page(1), page(3, depth=2))])
        assert total == counts_between({}, page(3, depth=2))

    def test_the_service_has_what_is_read(self) -> None:
        registry = CollectorRegistry()
        registry.register(SpeculatorCollector(Loop.build(lookahead=2).speculator, lambda: 0.0, lambda: 0.0))
        counts = counts_between({}, parse_samples(generate_latest(registry).decode()))
        assert counts.rounds == [0, 0]
        assert (len(counts.full_hits), counts.tokens_per_branch) == (3, 2)
        assert {"hit", "short_hit"} <= counts.outcomes.keys()

    def test_a_missing_counter_is_an_error(self) -> None:
        lacking = {key: value for key, value in page().items() if key[0] != "rounds_total"}
        with pytest.raises(KeyError, match="rounds_total"):
            counts_between({}, lacking)


class TestPrediction:
    def test_terms(self) -> None:
        parts = round_parts(counts_between({}, page()))
        assert parts is not None
        # 10 rounds verify for .188 s, and for the .012 s in which nobody waits for the answer.
        assert parts == pytest.approx((0.8, 0.6, 3.5, 2.5, 0.02, 4 * 0.002 / 0.02, 0.005 / 0.02))

    def test_no_round_no_terms(self) -> None:
        assert round_parts(counts_between(page(), page())) is None

    def test_no_table_no_hit(self) -> None:
        before = page()
        only = {("rounds_total", "0"): 5, ("answer_seconds_total", "0"): 0.02, ("verification_seconds_total", "0"): 0.1}
        only |= {("verified_total", "primary"): 10, ("verified_tokens_total", "primary"): 30}
        parts = round_parts(counts_between(before, {key: value + only.get(key, 0) for key, value in before.items()}))
        assert parts is not None
        assert parts == pytest.approx((0, 0, 1, 3, 0.02, 0, 0.2))
        assert theorem_speedup(parts) == pytest.approx(3 / 1.2)

    def test_theorem_7_at_batch_size_1(self) -> None:
        for terms in ((0.8, 4.0, 1.0, 0.5, 0.0), (0.5, 3.0, 2.0, 1.25, 0.25), (1.0, 4.0, 1.0, 0.3, 0.3)):
            rate, tokens_hit, tokens_miss, primary, backup = terms
            parts = RoundParts(rate, rate, tokens_hit, tokens_miss, 0.02, primary, backup)
            assert theorem_speedup(parts) == pytest.approx(ssd_speedup(*terms))

    def test_corollary_16_where_misses_are_independent(self) -> None:
        parts = RoundParts(0.9, 0.9**8, 4, 2, 0.02, 0.3, 0.3)
        assert theorem_speedup(parts) == pytest.approx(batch_speedup(8, 0.9, 4, 2, 0.3, 0.3))

    def test_short_hits_make_a_round_wait(self) -> None:
        """All speculations were prepared, but half of the rounds waited for their ends."""
        assert theorem_speedup(RoundParts(1, 0.5, 3, 1, 0.02, 0.5, 0.5)) == pytest.approx(3 / 1.25)

    def test_plain_steps_are_shorter_than_verifications(self) -> None:
        parts = RoundParts(0.9, 0.8, 4, 2, 0.02, 0.3, 0.3)
        assert predicted_speedup(parts, 0.015) == pytest.approx(0.75 * theorem_speedup(parts))


def rows_by_mode(found: list[Measurements]) -> dict[str, Row]:
    rows = make_rows(MODES, found, [CELL])
    assert [row["mode"] for row in rows] == NAMES
    return {row["mode"]: row for row in rows}


class TestRows:
    def test_speeds_are_medians(self) -> None:
        row = rows_by_mode(measured())["ssd"]
        assert row["tok_s"] == pytest.approx((22 / 0.55 + 22 / 1.05) / 2)
        assert row["tok_s_per_device"] == row["tok_s"] / 2
        assert (row["temperature"], row["batch"], row["kind"], row["lookahead"]) == (0, 2, "ssd", 4)

    def test_ratios_are_those_of_pairs(self) -> None:
        rows = rows_by_mode(measured())
        assert rows["ssd"]["x"]["ar"] == pytest.approx({"median": 4, "min": 4, "max": 4})
        assert rows["ar"]["x"]["ssd"]["median"] == pytest.approx(0.25)
        assert rows["standalone"]["x"]["ar"] == pytest.approx({"median": 1.55, "min": 1, "max": 2.1})
        assert rows["ssd"]["x_ar"] == pytest.approx(4)

    def test_best_standalone_is_that_of_all_numbers_of_steps(self) -> None:
        for row in rows_by_mode(measured()).values():
            assert row["best_standalone"] == "standalone@2"
            assert row["x"]["best standalone"] == row["x"]["standalone@2"]
            assert row["x_best_standalone"] == row["x"]["standalone@2"]["median"]

    def test_decoding_is_what_is_not_prefill(self) -> None:
        rows = rows_by_mode(measured())
        # Of 2.2 and 4.2 s 0.2 are prefill, for 10 steps of each of two sequences.
        assert rows["ar"]["round_ms"] == pytest.approx(300)
        assert rows["ar"]["decode_tok_s"] == pytest.approx((20 / 2.0 + 20 / 4.0) / 2)
        assert rows["ssd"]["round_ms"] == pytest.approx((0.35 / 4 + 0.85 / 4) / 2 * 1e3)
        assert rows["ssd"]["decode_x_ar"]["max"] == pytest.approx(2.0 / 0.35)

    def test_without_streamed_runs_decoding_is_not_known(self) -> None:
        found = measured()
        for one in found:
            one.streams.clear()
        row = rows_by_mode(found)["ssd"]
        for name in ("decode_tok_s", "round_ms", "ttft_ms", "itl_ms", "decode_x_ar"):
            assert row[name] is None
        assert row["ssd"]["predicted_x_ar"] is None
        assert row["ssd"]["theorem_speedup"] is not None

    def test_short_answers_are_not_all_prefill(self) -> None:
        speeds = speeds_of([run(0.1, 5)], [Stream(0.2, ())])
        assert speeds.decode[0] > 0
        assert speeds.round_s[0] > 0

    def test_latency_tokens_and_cost(self) -> None:
        row = rows_by_mode(measured())["ssd"]
        assert row["ttft_ms"] == pytest.approx({"p50": 200, "p99": 200})
        assert row["itl_ms"] == pytest.approx({"p50": 20, "p99": 30})
        assert row["tokens_per_round"] == pytest.approx(10 / 4)
        assert row["acceptance"] == [0.5, 0.5, 0, 0]
        assert row["cpu_s_per_token"] == pytest.approx(0.5 / 22)
        assert row["memory_gb"] == 3
        assert rows_by_mode(measured())["ar"]["acceptance"] is None

    def test_what_the_speculator_did(self) -> None:
        rows = rows_by_mode(measured())
        ssd = rows["ssd"]["ssd"]
        assert ssd["outcomes"] == {"hit": 0.75, "short_hit": 0.05, "not_predicted": 0.2, "not_started": 0}
        assert ssd["full_hit_rate_by_k"] == [0.5, 0.5, None, 1]
        assert ssd["hit_rate_by_k"] == [0.5, 1, None, 1]
        assert (ssd["all_hit_rate"], ssd["hit_rate"], ssd["tokens_hit"], ssd["tokens_miss"]) == (0.6, 0.8, 3.5, 2.5)
        assert ssd["round_ms"] == pytest.approx(22)
        assert ssd["verification_ms"] == pytest.approx(20)
        assert ssd["wait_ms"] == pytest.approx(2)
        assert ssd["theorem_speedup"] == pytest.approx(3.3 / (0.6 + 0.4 * 1.25))
        assert ssd["predicted_x_ar"] == pytest.approx(ssd["theorem_speedup"] * 0.3 / 0.02)
        assert rows["ar"]["ssd"] is None

    def test_tokens_are_compared_with_those_of_the_first_mode(self) -> None:
        found = measured()
        assert all(row["same_tokens"] for row in rows_by_mode(found).values())
        found[3].runs[CELL][1] = run(1.05, 4, ids=2, service=found[3].runs[CELL][0].service)
        rows = rows_by_mode(found)
        assert [row["same_tokens"] for row in rows.values()] == [True, True, True, False]

    def test_without_plain_decoding_and_standalone(self) -> None:
        (row,) = make_rows(MODES[3:], measured()[3:], [CELL])
        for name in ("x_ar", "x_best_standalone", "best_standalone", "decode_x_ar"):
            assert row[name] is None
        assert row["ssd"]["predicted_x_ar"] is None
