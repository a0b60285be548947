"""launch/figures: rounds of the tiny pair, what is computed from their counts, and the command itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.offline import IdealSpeculation
from tests.support.sglang_server import DRAFT, TARGET

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
sys.path.append(str(LAUNCH))  # launch/ is not a package

from reproduction.counts import (  # noqa: E402
    ALLOCATIONS,
    Outcomes,
    count,
    cross_fitted_hit_rate,
    fit_power_law,
    outcomes,
)
from reproduction.curves import add_measured  # noqa: E402
from reproduction.measured import read_measured  # noqa: E402
from reproduction.pair import CachedModel, Pair, Start, load_pair, prefill  # noqa: E402
from reproduction.plan import FIGURES, Plan, Setting, all_settings  # noqa: E402
from reproduction.rounds import BACKUP, NUM_RANKS, PREPARED, Rounds, bonus_ranks, collect  # noqa: E402

K = 4
PROMPTS = ["def read_lines(path):\n", "class Queue:\n    def __init__(self):\n", "If the form is valid, the view saves"]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(str(TARGET), str(DRAFT))


@pytest.fixture(scope="module")
def start(pair: Pair) -> Start:
    return prefill(pair, [pair.tokenizer(prompt).input_ids for prompt in PROMPTS])


def rounds_of(start: Start, setting: Setting, *, num_rounds: int = 6, seed: int = 0) -> Rounds:
    return collect(start, setting, lookahead=K, num_rounds=num_rounds, fan_out=3, seed=seed, on_round=lambda: None)


class TestRounds:
    def test_cache_with_forgotten_tokens_equals_a_forward_over_the_kept_ones(self, pair: Pair) -> None:
        prompts = [[5, 6, 7], [9, 10, 11, 12, 13]]
        cached = CachedModel(pair.draft, prompts)
        first, second = torch.tensor([[20, 21, 22], [30, 31, 32]]), torch.tensor([[40, 41], [50, 51]])
        cached.extend(first)
        cached.keep(np.array([1, 3]))
        logits = cached.extend(second)
        for row, kept in enumerate((1, 3)):
            tokens = [*prompts[row], *first[row, :kept].tolist(), *second[row].tolist()]
            with torch.inference_mode():
                expected = pair.draft(torch.tensor([tokens])).logits[0, -2:]
            torch.testing.assert_close(logits[row], expected, atol=2e-4, rtol=1e-4)

    def test_greedy_rounds_are_those_of_ordinary_speculation(self, pair: Pair, start: Start) -> None:
        """With the draft as its own backup every round is drafted: the target's greedy text in as many rounds."""
        num_rounds = 5
        rounds = rounds_of(start, Setting(0.0), num_rounds=num_rounds)
        ideal = IdealSpeculation(K)
        for row, prompt in enumerate(start.prompts):
            length = 1 + int((rounds.num_accepted[rounds.prompt == row] + 1).sum())
            text = pair.target.generate(
                torch.tensor([prompt]), max_new_tokens=length, do_sample=False, eos_token_id=None
            )
            assert ideal.rounds(prompt, text[0, len(prompt) :].tolist()) == num_rounds

    def test_same_seed_same_rounds(self, start: Start) -> None:
        setting = Setting(1.0, "suffix")
        first, again, other = (np.stack(rounds_of(start, setting, seed=seed)) for seed in (1, 1, 2))
        assert (first == again).all()
        assert (first != other).any()

    def test_a_miss_is_answered_by_the_backup(self, start: Start) -> None:
        rounds = rounds_of(start, Setting(1.0, "empty"), num_rounds=8)
        source, rank = rounds.source.reshape(8, -1), rounds.rank.reshape(8, -1)
        assert (source[0] == PREPARED).all()
        assert ((source[1:] == BACKUP) == (rank[:-1] >= 3)).all()
        assert (rounds.num_sent == np.where(rounds.source == BACKUP, 0, K)).all()
        assert (rounds.source == BACKUP).any()

    @pytest.mark.parametrize("rule", ["ratio", "shared-noise"])
    def test_a_draft_equal_to_the_target_is_always_accepted(self, pair: Pair, start: Start, rule: str) -> None:
        twins = Start(start.prompts, start.draft, start.draft)
        rounds = rounds_of(twins, Setting(1.0, rule=rule), num_rounds=4)
        assert (rounds.num_accepted == K).mean() > 0.9  # rounding differs between 1 and K + 1 tokens
        if rule == "shared-noise":
            assert (rounds.rank[rounds.num_accepted == K] == 0).all()

    def test_ranks_leave_out_the_sent_token(self) -> None:
        scores = torch.tensor([[5.0, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [1, 5, 2, 4, 3, 0]]).expand(3, 3, 6)
        sent = np.array([[0, 5], [0, 5], [0, -1]])
        ranks = bonus_ranks(scores, sent, np.array([0, 2, 1]), np.array([2, 4, 5]))
        assert ranks.tolist() == [1, 2, 0]


def outcomes_with(ranks: dict[int, list[int]]) -> Outcomes:
    """Outcomes by k; those with k < K after a rejection."""
    counts = np.zeros((2, K + 1, NUM_RANKS + 1), np.int64)
    for k, seen in ranks.items():
        counts[int(k == K), k] = np.bincount(seen, minlength=NUM_RANKS + 1)
    return Outcomes(counts)


class TestCounts:
    def test_acceptance_and_hit_curves(self) -> None:
        part = outcomes_with({0: [0, 1], 2: [5], K: [0, 0, NUM_RANKS]})
        assert part.num == 6
        assert part.acceptance_rate == pytest.approx(14 / 17)
        assert part.expected_tokens == pytest.approx(1 + 14 / 6)
        assert part.hit_curves[0, :4].tolist() == [0, 0.5, 1, 1]
        assert part.hit_curves[K, [1, NUM_RANKS]].tolist() == pytest.approx([2 / 3, 2 / 3])
        misses, trials = part.misses(all_accepted=False, max_fan_out=6)
        assert (misses.tolist(), trials) == ([2, 1, 1, 1, 1, 0], 3)

    def test_fit_recovers_a_power_law(self) -> None:
        trials = 1_000_000
        fit = fit_power_law(np.round(trials * 0.6 * np.arange(1, 33) ** -0.8).astype(np.int64), trials)
        assert fit is not None
        assert fit.law == pytest.approx((0.6, 0.8), abs=1e-4)
        assert fit.r_squared == pytest.approx(1, abs=1e-6)
        assert fit.max_fan_out == 32

    def test_fit_leaves_out_the_tail_without_misses(self) -> None:
        fit = fit_power_law(np.array([512, 256, 171, 128, 3, 2, 0]), 1024)
        assert fit is not None
        assert fit.max_fan_out == 4
        assert fit.law == pytest.approx((0.5, 1), abs=0.01)
        assert fit_power_law(np.array([512, 3]), 1024) is None
        assert fit_power_law(np.array([512, 512]), 1024) is None

    def test_allocations_are_judged_by_the_other_half(self) -> None:
        """Each half alone has all its bonus tokens at another position: what it suggests is worthless for the other."""
        even = [Rounds(*np.array([[0], [PREPARED], [0], [K], [2]])) for _ in range(10)]
        odd = [Rounds(*np.array([[1], [PREPARED], [K], [K], [2]])) for _ in range(10)]
        counts = count(Rounds(*(np.concatenate(column) for column in zip(*even, *odd, strict=True))), K)
        greedy = cross_fitted_hit_rate(counts, 5, ALLOCATIONS["greedy"])
        assert greedy.rate == 0
        assert all(sum(fan_out) == 5 for fan_out in greedy.fan_outs)
        assert cross_fitted_hit_rate(counts, 15, ALLOCATIONS["uniform"]).rate == 1

    def test_greedy_allocation_is_the_best_where_it_was_made(self, start: Start) -> None:
        part = outcomes(count(rounds_of(start, Setting(1.0)), K))
        rates = {}
        for name, allocate in ALLOCATIONS.items():
            fan_out = allocate(part, 15)
            assert sum(fan_out) == 15
            rates[name] = part.weights @ part.hit_curves[np.arange(K + 1), list(fan_out)]
        assert max(rates.values()) == pytest.approx(rates["greedy"], abs=1e-9)


def test_runs_are_shared_between_figures() -> None:
    plan = Plan()
    settings = all_settings(FIGURES, plan)
    assert len(settings) == len(set(settings))
    assert settings.count(Setting(1.0)) == 1
    assert Setting(0.0, rule="shared-noise") not in settings


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, LAUNCH / "figures.py", *arguments], capture_output=True, text=True, timeout=400, check=False
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures") / "new"
    finished = command("all", "--quick", "--output", folder)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == [str(folder / f"{name}.{kind}") for name in FIGURES for kind in ("json", "png")]
    return folder


def read(folder: Path, figure: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"{figure}.json").read_text())
    return content


class TestQuickRun:
    @pytest.mark.parametrize("figure", FIGURES)
    def test_files_say_what_they_were_made_with(self, written: Path, figure: str) -> None:
        content = read(written, figure)
        assert content["figure"] == figure
        assert content["settings"]["plan"]["seed"] == 0
        assert {"plan", "models", "prompts", "versions"} <= set(content["settings"])
        outcomes_per_run = content["settings"]["plan"]["num_rounds"] * content["settings"]["prompts"]["used"]
        for run in content["counts"]["runs"]:
            assert np.sum(run["counts"]) == outcomes_per_run
        assert (written / f"{figure}.png").read_bytes().startswith(b"\x89PNG")

    def test_misses_fall_with_the_fan_out(self, written: Path) -> None:
        curves = read(written, "fan-out")["curves"]
        assert {curve["source"] for curve in curves} >= {"after a hit", "after no backup"}
        for curve in curves:
            assert (np.diff(curve["misses"]) <= 0).all()
            assert 0 <= curve["miss_rate"][-1] <= curve["miss_rate"][0] <= 1

    def test_every_allocation_spends_the_budget(self, written: Path) -> None:
        for point in read(written, "temperature")["curves"]:
            for allocation in ALLOCATIONS:
                assert [sum(fan_out) for fan_out in point[allocation]["fan_outs"]] == [15, 15]
                assert point[allocation]["speedup"] > point["sd_speedup"]

    def test_downweighting_trades_acceptance_for_hits(self, written: Path) -> None:
        for curve in read(written, "downweight")["curves"]:
            first, last = curve["ratio"][0], curve["ratio"][-1]
            assert (first["downweight"], last["downweight"]) == (0, 1)
            assert first["acceptance_rate"] < last["acceptance_rate"]
            assert first["rejected_hit_rate"] > last["rejected_hit_rate"]
            assert curve["shared_noise"]["hit_rate"] > last["hit_rate"]
            assert curve["best_downweight"] in [point["downweight"] for point in curve["ratio"]]

    def test_backups_are_predicted_from_step_times(self, written: Path) -> None:
        content = read(written, "backup")
        for panel in content["curves"]:
            seconds = content["step_seconds"]
            assert panel["backup_time"][0] == seconds["just_in_time"][0] / seconds["verification"][0]
            assert set(panel["predicted"]) == {"primary", "suffix", "empty"}
            assert panel["after_miss"]["empty"]["tokens_per_round"] == 1
            for line in panel["predicted"].values():
                assert len(line["speedup"]) == len(panel["batch_size"])


def test_measured_speedups_go_to_the_panel_of_their_temperature_and_fan_out(tmp_path: Path) -> None:
    rows = [
        {"temperature": 0.0, "batch": batch, "kind": kind, "x_ar": speedup}
        for batch, kind, speedup in [
            (4, "ssd-primary", 1.8),
            (1, "ssd-primary", 2.5),
            (1, "ssd-empty", 2.2),
            (1, "ar", 1),
        ]
    ]
    (tmp_path / "bench.json").write_text(json.dumps({"arguments": {"fan_out": "3"}, "rows": rows}))
    panels: list[dict[str, Any]] = [
        {"temperature": 0.0, "fan_out": 3},
        {"temperature": 0.0, "fan_out": 1},
        {"temperature": 1.0, "fan_out": 3},
    ]
    add_measured(panels, read_measured(tmp_path / "bench.json"))
    assert panels[0]["measured"] == {
        "primary": {"batch_size": [1, 4], "speedup": [2.5, 1.8]},
        "empty": {"batch_size": [1], "speedup": [2.2]},
    }
    assert "measured" not in panels[1] | panels[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fan-in", "--output", "{}/out"], "There is no figure 'fan-in'"),
        (["--output", "{}/file"], "name another --output"),
        (["--output", "{}/file/below"], "name another --output"),
        (["--output", "{}/out", "--prompts", "{}/none.jsonl"], "none.jsonl cannot be read"),
        (["--output", "{}/out", "--prompts", "{}/empty.jsonl"], "has 0 prompts"),
        (["--output", "{}/out", "--prompts", "{}/wrong.jsonl"], "Line 2 of"),
        (["--output", "{}/out", "--measured", "{}/none.json"], "none.json cannot be read"),
        (["--output", "{}/out", "--measured", "{}/wrong.jsonl"], "write it with launch/bench"),
        (["--output", "{}/out", "--num-rounds", "0"], "--num-rounds is 0"),
        (["--output", "{}/out", "--num-rounds", "1000"], "lower --num-rounds"),
        (["--output", "{}/out", "--model-path", "{}/nothing"], "There is no model in"),
    ],
)
def test_wrong_input_is_one_sentence(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    finished = command(*(argument.format(tmp_path) for argument in arguments))
    assert finished.returncode == 2, finished.stderr
    assert words in finished.stderr
    assert "Traceback" not in finished.stderr
    messages = [line for line in finished.stderr.splitlines() if line.startswith("launch/figures: ")]
    assert len(messages) == 1
    assert not list(tmp_path.glob("out/*.png"))
