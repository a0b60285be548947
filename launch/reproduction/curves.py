"""The numbers of each figure, computed from counts and step times. Everything returned can be written as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reproduction import counts as counting
from reproduction.counts import ALLOCATIONS, Outcomes, cross_fitted_hit_rate, fit_power_law, outcomes
from reproduction.measured import Measured
from reproduction.plan import BACKUPS, DownweightCase, Plan, Setting, both_rules, downweighted
from reproduction.rounds import BACKUP, PREPARED
from reproduction.step_times import StepTimes
from speculator_service.saguaro.allocation import expected_hit_rate
from speculator_service.saguaro.batch_speedup import SpeculatorQuality, critical_batch_size, speedup_with
from speculator_service.saguaro.downweight import DownweightCurve, best_downweight
from speculator_service.saguaro.speedup import sd_speedup, ssd_speedup, unconditional_hit_rate

MAX_FAN_OUT = 32
NOISE = 0.02
"""About one standard error of a speedup, as a share of it: a smaller gain is no reason for a C below 1."""
SOURCE_NAMES = {"primary": "after a just-in-time backup", "suffix": "after a suffix backup", "empty": "after no backup"}

Counts = Mapping[Setting, NDArray[np.int64]]
"""By setting, from `counts.count`."""


def curves_of(figure: str, counts: Counts, plan: Plan, times: StepTimes | None) -> list[dict[str, Any]]:
    """The curves of one of `plan.FIGURES`; ``times`` are needed by the backup figure alone."""
    if figure == "backup":
        assert times is not None
        return backup_curves(counts, plan, times)
    compute = {"fan-out": fan_out_curves, "temperature": temperature_curves, "downweight": downweight_curves}[figure]
    return compute(counts, plan)


def fan_out_curves(counts: Counts, plan: Plan) -> list[dict[str, Any]]:
    """Figure 3: misses against F with the fitted law, by temperature, source and whether a token was rejected."""
    curves = []
    for temperature in plan.fan_out_temperatures:
        by_backup = {backup: counts[Setting(temperature, backup)] for backup in BACKUPS}
        sources = {"after a hit": outcomes(counting.merged(by_backup.values()), source=PREPARED)}
        for backup, array in by_backup.items():
            sources[SOURCE_NAMES[backup]] = outcomes(array, source=BACKUP)
        for source, part in sources.items():
            for all_accepted in (False, True):
                curve = {"temperature": temperature, "source": source, "all_accepted": all_accepted}
                curves.append(curve | _miss_curve(part, all_accepted))
    return [curve for curve in curves if curve["outcomes"]]


def _miss_curve(part: Outcomes, all_accepted: bool) -> dict[str, Any]:
    misses, trials = part.misses(all_accepted=all_accepted, max_fan_out=MAX_FAN_OUT)
    fit = fit_power_law(misses, trials)
    law = None
    if fit is not None:
        law = {
            "c": fit.law.constant,
            "r": fit.law.exponent,
            "r_squared": fit.r_squared,
            "fitted_up_to": fit.max_fan_out,
        }
    return {
        "outcomes": trials,
        "fan_out": list(range(1, MAX_FAN_OUT + 1)),
        "misses": misses.tolist(),
        "miss_rate": (misses / max(1, trials)).tolist(),
        "power_law": law,
    }


def temperature_curves(counts: Counts, plan: Plan) -> list[dict[str, Any]]:
    """Figure 4: hit rate and predicted speedup of every allocation over temperature, for both rules."""
    points = []
    for temperature in plan.temperatures:
        for setting in both_rules(temperature):
            whole = outcomes(counts[setting])
            point: dict[str, Any] = {"temperature": temperature, "rule": setting.rule} | _acceptance(whole)
            point["sd_speedup"] = sd_speedup(whole.expected_tokens, plan.backup_time)
            for name, allocate in ALLOCATIONS.items():
                hit = cross_fitted_hit_rate(counts[setting], plan.budget, allocate)
                point[name] = {
                    "fan_outs": [list(fan_out) for fan_out in hit.fan_outs],
                    "hit_rate": hit.rate,
                    "standard_error": hit.standard_error,
                    "speedup": _speedup(hit.rate, whole, plan),
                }
            points.append(point)
    return points


def downweight_curves(counts: Counts, plan: Plan) -> list[dict[str, Any]]:
    """Figure 5: acceptance, hit rate and predicted speedup for every C, beside those of shared noise."""
    curves = []
    for case in plan.downweight_cases:
        points = [
            {"downweight": downweight} | _trade_off(outcomes(counts[downweighted(case, downweight)]), case, plan)
            for downweight in plan.downweights
        ]
        columns = {name: np.array([point[name] for point in points]) for name in points[0]}
        curve = DownweightCurve(columns["downweight"], columns["acceptance_rate"], columns["rejected_hit_rate"])
        shared = _trade_off(outcomes(counts[Setting(case.temperature, rule="shared-noise")]), case, plan)
        curves.append(
            {
                "temperature": case.temperature,
                "fan_out": case.fan_out,
                "ratio": points,
                "best_downweight": best_downweight(curve, columns["speedup"], NOISE),
                "best_speedup": float(columns["speedup"].max()),
                "shared_noise": shared,
            }
        )
    return curves


def _trade_off(part: Outcomes, case: DownweightCase, plan: Plan) -> dict[str, float]:
    """One point of the trade-off, with F at every position."""
    rejected, num_rejected = part.misses(all_accepted=False, max_fan_out=case.fan_out)
    fan_out = (case.fan_out,) * (part.lookahead + 1)
    hit_rate = min(1.0, expected_hit_rate(fan_out, part.weights, part.hit_curves))
    point = _acceptance(part)
    point["hit_rate"] = hit_rate
    point["hit_rate_error"] = math.sqrt(hit_rate * (1 - hit_rate) / max(1, part.num))
    point["rejected_hit_rate"] = 1 - int(rejected[-1]) / num_rejected if num_rejected else 1.0
    point["speedup"] = _speedup(hit_rate, part, plan)
    return point


def _acceptance(part: Outcomes) -> dict[str, float]:
    accepted = np.arange(part.lookahead + 1)
    variance = float(part.weights @ accepted**2) - float(part.weights @ accepted) ** 2
    return {
        "outcomes": part.num,
        "acceptance_rate": part.acceptance_rate,
        "tokens_per_round": part.expected_tokens,
        "tokens_per_round_error": math.sqrt(max(0.0, variance) / max(1, part.num)),
    }


def _speedup(hit_rate: float, part: Outcomes, plan: Plan) -> float:
    """Theorem 7 with the primary as its own backup, and the times of the plan."""
    tokens = part.expected_tokens
    return ssd_speedup(hit_rate, tokens, tokens, plan.primary_time, plan.backup_time)


def backup_curves(counts: Counts, plan: Plan, times: StepTimes) -> list[dict[str, Any]]:
    """Figure 6: predicted speedup of each backup over batch size, and where the fast ones overtake the slow one.

    Hit rates are those of the greedy allocation of B = (K + 1) F outcomes, made separately for each source; times are
    those measured at the batch size.
    """
    panels = []
    for temperature in plan.fan_out_temperatures:
        for fan_out in plan.backup_fan_outs:
            panels.append(_backup_panel(counts, plan, times, temperature, fan_out))
    return panels


def _backup_panel(counts: Counts, plan: Plan, times: StepTimes, temperature: float, fan_out: int) -> dict[str, Any]:
    budget = (plan.lookahead + 1) * fan_out
    by_backup = {backup: counts[Setting(temperature, backup)] for backup in BACKUPS}
    hit = _yield_of(counting.merged(by_backup.values()), PREPARED, budget)
    misses = {backup: _yield_of(array, BACKUP, budget) for backup, array in by_backup.items()}
    primary_times = [s / v for s, v in zip(times.speculation[fan_out], times.verification, strict=True)]
    backup_times = [j / v for j, v in zip(times.just_in_time, times.verification, strict=True)]
    lines: dict[str, Any] = {backup: {"speedup": []} for backup in BACKUPS}
    for backup in BACKUPS[1:]:
        lines[backup]["critical_batch_size"] = []
    for batch_size, primary_time, just_in_time in zip(plan.batch_sizes, primary_times, backup_times, strict=True):
        primary = SpeculatorQuality(primary_time, *hit)
        qualities = {
            backup: SpeculatorQuality(just_in_time if backup == "primary" else 0.0, *miss)
            for backup, miss in misses.items()
        }
        for backup, quality in qualities.items():
            lines[backup]["speedup"].append(speedup_with(primary, quality, batch_size))
        for backup in BACKUPS[1:]:
            critical = _critical(primary, qualities["primary"], qualities[backup])
            lines[backup]["critical_batch_size"].append(critical)
    return {
        "temperature": temperature,
        "fan_out": fan_out,
        "batch_size": list(plan.batch_sizes),
        "primary_time": primary_times,
        "backup_time": backup_times,
        "after_hit": hit._asdict(),
        "after_miss": {backup: miss._asdict() for backup, miss in misses.items()},
        "predicted": lines,
    }


def add_measured(panels: list[dict[str, Any]], measured: Sequence[Measured]) -> None:
    """Put the speedups of real servers beside the predicted ones, in the panels of their temperature and fan-out."""
    for panel in panels:
        for run in measured:
            if (run.temperature, run.fan_out) == (panel["temperature"], panel["fan_out"]):
                panel.setdefault("measured", {}).update(run.lines(BACKUPS))


class _Yield(NamedTuple):
    """What the speculations of a source are worth."""

    tokens_per_round: float
    hit_rate: float


def _yield_of(counts: NDArray[np.int64], source: int, budget: int) -> _Yield:
    hit = cross_fitted_hit_rate(counts, budget, counting.greedy, source=source)
    return _Yield(outcomes(counts, source=source).expected_tokens, hit.rate)


def _critical(primary: SpeculatorQuality, slow: SpeculatorQuality, fast: SpeculatorQuality) -> float | None:
    """b* of Theorem 17, with a hit rate for each backup; None: the slow one is better at every batch size.

    The theorem takes a just-in-time speculation to be as good as a prepared one.
    """
    slow_hit_rate = unconditional_hit_rate(primary.hit_rate, slow.hit_rate)
    fast_hit_rate = unconditional_hit_rate(primary.hit_rate, fast.hit_rate)
    found = critical_batch_size(
        slow_hit_rate,
        primary.expected_tokens,
        # Measured, hence possibly out of order by chance:
        min(primary.expected_tokens, fast.expected_tokens),
        slow.time,
        fast_hit_rate=min(slow_hit_rate, fast_hit_rate),
        fast_time=fast.time,
    )
    return found if math.isfinite(found) else None
