"""The figures as PNG, drawn from nothing but what their JSON holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")

Data = Sequence[dict[str, Any]]

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")
RULES = {"ratio": "ratio rule", "shared-noise": "shared noise"}


def save(figure: str, data: Data, path: Path) -> None:
    """Draw one of `plan.FIGURES` from the data of `curves` and write it as PNG."""
    drawn = {"fan-out": fan_out, "temperature": temperature, "downweight": downweight, "backup": backup}[figure](data)
    drawn.savefig(path, dpi=130)


def fan_out(data: Data) -> Figure:
    """Figure 3: miss rate against fan-out on logarithmic axes, dashed: the fitted power law."""
    temperatures = list(dict.fromkeys(curve["temperature"] for curve in data))
    sources = list(dict.fromkeys(curve["source"] for curve in data))
    figure, grid = _grid(len(temperatures), 2, "Miss rate falls with the fan-out as a power law, c F^-r (dashed)")
    for curve in data:
        axes = grid[temperatures.index(curve["temperature"])][int(curve["all_accepted"])]
        colour = COLOURS[sources.index(curve["source"])]
        sizes, rates = np.array(curve["fan_out"]), np.array(curve["miss_rate"])
        label = f"{curve['source']} ({curve['outcomes']} rounds)"
        law = curve["power_law"]
        if law is not None:
            label += f": c {law['c']:.2f}, r {law['r']:.2f}"
            axes.plot(sizes, law["c"] * sizes ** -law["r"], "--", color=colour, linewidth=1)
        axes.plot(sizes[rates > 0], rates[rates > 0], ".-", color=colour, label=label)
    for row, value in enumerate(temperatures):
        for column, what in enumerate(("a token was rejected (k < K)", "all accepted (k = K, or nothing was sent)")):
            axes = grid[row][column]
            axes.set(xscale="log", yscale="log", title=f"T = {value:g}, {what}")
            axes.set(xlabel="fan-out F (bonus tokens prepared)", ylabel="miss rate 1 - h(F)")
            axes.set_xticks(*_labelled(1, 2, 4, 8, 16, 32))
            axes.set_yticks(*_labelled(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1))
            axes.minorticks_off()
            _finish(axes)
    return figure


def temperature(data: Data) -> Figure:
    """Figure 4: hit rate and predicted speedup over temperature, by allocation and rule."""
    figure, ((hits, speeds),) = _grid(1, 2, "Allocations of the same budget over temperature")
    styles = {"uniform": ":", "geometric": "--", "greedy": "-"}
    for number, (rule, name) in enumerate(RULES.items()):
        # Nothing is random at temperature 0: both rules are the same there.
        points = [point for point in data if point["rule"] == rule or point["temperature"] == 0]
        if all(point["rule"] != rule for point in points):
            continue
        temperatures = [point["temperature"] for point in points]
        for allocation, style in styles.items():
            look: dict[str, Any] = {
                "color": COLOURS[number],
                "linestyle": style,
                "marker": ".",
                "label": f"{name}, {allocation}",
            }
            rates, errors = ([point[allocation][key] for point in points] for key in ("hit_rate", "standard_error"))
            hits.errorbar(temperatures, rates, errors, elinewidth=0.7, **look)
            speeds.plot(temperatures, [point[allocation]["speedup"] for point in points], **look)
        sd = [point["sd_speedup"] for point in points]
        speeds.plot(temperatures, sd, color=COLOURS[number], alpha=0.35, label=f"{name}, ordinary speculation")
    hits.set(xlabel="temperature", ylabel="hit rate", title="Hit rate (bars: standard error)")
    speeds.set(xlabel="temperature", ylabel="speedup against plain decoding", title="Predicted speedup")
    _finish(hits)
    _finish(speeds)
    return figure


def downweight(data: Data) -> Figure:
    """Figure 5: acceptance against hit rate along C, and the predicted speedup."""
    figure, ((trade, speeds),) = _grid(1, 2, "Down-weighting by C trades acceptance for hits")
    for number, curve in enumerate(data):
        colour, points, shared = COLOURS[number], curve["ratio"], curve["shared_noise"]
        name = f"T = {curve['temperature']:g}, F = {curve['fan_out']}"
        rates, acceptance = ([point[key] for point in points] for key in ("hit_rate", "acceptance_rate"))
        trade.plot(rates, acceptance, ".-", color=colour, label=f"{name}, ratio rule")
        for point in (points[0], points[-1]):
            place = (point["hit_rate"], point["acceptance_rate"])
            trade.annotate(f"C = {point['downweight']:g}", place, xytext=(4, 4), textcoords="offset points", fontsize=7)
        trade.plot(
            shared["hit_rate"], shared["acceptance_rate"], "*", color=colour, ms=11, label=f"{name}, shared noise"
        )
        label = f"{name}, best C = {curve['best_downweight']:g}"
        speeds.plot(
            [point["downweight"] for point in points], [p["speedup"] for p in points], ".-", color=colour, label=label
        )
        speeds.axhline(shared["speedup"], color=colour, linestyle="--", linewidth=1, label=f"{name}, shared noise")
    trade.set(xlabel="hit rate", ylabel="acceptance rate per token", title="Acceptance against hit rate")
    speeds.set(xlabel="C", ylabel="speedup against plain decoding", title="Predicted speedup")
    _finish(trade)
    _finish(speeds)
    return figure


def backup(data: Data) -> Figure:
    """Figure 6: speedup of each backup over batch size; vertical lines: predicted critical batch sizes."""
    temperatures = list(dict.fromkeys(panel["temperature"] for panel in data))
    fan_outs = list(dict.fromkeys(panel["fan_out"] for panel in data))
    figure, grid = _grid(len(temperatures), len(fan_outs), "Which backup answers a miss: slow and good, or fast")
    names = {"primary": "just in time (slow)", "suffix": "suffix (fast)", "empty": "none (fast)"}
    for panel in data:
        axes = grid[temperatures.index(panel["temperature"])][fan_outs.index(panel["fan_out"])]
        sizes = panel["batch_size"]
        for number, (name, line) in enumerate(panel["predicted"].items()):
            axes.plot(sizes, line["speedup"], ".-", color=COLOURS[number], label=f"{names[name]}, predicted")
            crossing = crossing_batch_size(sizes, line.get("critical_batch_size", ()))
            if crossing is not None:
                axes.axvline(
                    crossing, color=COLOURS[number], linestyle=":", label=f"b* = {crossing:.1f}, {names[name]}"
                )
            if found := panel.get("measured", {}).get(name):
                label = f"{names[name]}, measured"
                axes.plot(found["batch_size"], found["speedup"], "x--", color=COLOURS[number], label=label)
        axes.set(xscale="log", xlabel="batch size b", ylabel="speedup against plain decoding")
        axes.set(title=f"T = {panel['temperature']:g}, F = {panel['fan_out']}")
        axes.set_xticks(*_labelled(*sizes))
        axes.minorticks_off()
        _finish(axes)
    return figure


def crossing_batch_size(batch_sizes: Sequence[int], critical: Sequence[float | None]) -> float | None:
    """b* at the first batch size that reaches the b* of its own step times; None if none does.

    >>> crossing_batch_size([1, 2, 4], [6.0, None, 3.5])
    3.5
    """
    for batch_size, value in zip(batch_sizes, critical, strict=False):
        if value is not None and batch_size >= value:
            return value
    return None


def _grid(rows: int, columns: int, title: str) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(6.4 * columns, 4.6 * rows), layout="constrained")
    figure.suptitle(title)
    axes: list[list[Axes]] = figure.subplots(rows, columns, squeeze=False).tolist()
    return figure, axes


def _labelled(*ticks: float) -> tuple[list[float], list[str]]:
    """Places and labels of ticks."""
    return list(ticks), [f"{tick:g}" for tick in ticks]


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
