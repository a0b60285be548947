"""Bars of the speedups over plain decoding, with what the paper's formula predicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark.rows import PLAIN, Row

matplotlib.use("Agg")


def save(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows of `rows.make_rows` and write them as PNG. Without the mode ar the first mode is what is 1."""
    draw(rows).savefig(path, dpi=130)


def draw(rows: Sequence[Row]) -> Figure:
    """A panel for each temperature, a group for each batch size, a bar for each mode; whiskers are min and max."""
    reference = PLAIN if PLAIN in rows[0]["x"] else rows[0]["mode"]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    sizes = list(dict.fromkeys(row["batch"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    width = max(6.4, 0.45 * len(modes) * len(sizes) + 2)
    figure = Figure(figsize=(width, 4.2 * len(temperatures)), layout="constrained")
    figure.suptitle(f"Tokens per second against {reference}: median of paired runs, min to max")
    panels: list[list[Axes]] = figure.subplots(len(temperatures), 1, squeeze=False).tolist()
    for (axes,), temperature in zip(panels, temperatures, strict=True):
        for number, mode in enumerate(modes):
            here = [row for row in rows if row["mode"] == mode and row["temperature"] == temperature]
            _bars(axes, here, reference, number, len(modes))
        axes.axhline(1, color="black", linewidth=0.7)
        axes.set_xticks(range(len(sizes)), [f"batch size {size}" for size in sizes])
        axes.set(ylabel=f"x {reference}", title=f"temperature {temperature:g}")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=7, ncols=2)
    return figure


def _bars(axes: Axes, rows: Sequence[Row], reference: str, number: int, count: int) -> None:
    """Bars of one mode, and marks of its speedup without prefill, measured and predicted."""
    width = 0.8 / count
    places = [group + (number - (count - 1) / 2) * width for group in range(len(rows))]
    ratios = [row["x"][reference] for row in rows]
    heights = [ratio["median"] for ratio in ratios]
    errors = [
        [ratio["median"] - ratio["min"] for ratio in ratios],
        [ratio["max"] - ratio["median"] for ratio in ratios],
    ]
    colour = f"C{number % 10}"
    axes.bar(places, heights, width * 0.9, yerr=errors, capsize=2, color=colour, alpha=0.8, label=rows[0]["mode"])
    if reference == PLAIN:
        _marks(axes, places, [(row["decode_x_ar"] or {}).get("median") for row in rows], "o", "decode only")
        predicted = [(row["ssd"] or {}).get("predicted_x_ar") for row in rows]
        _marks(axes, places, predicted, "D", "decode only, predicted")


def _marks(axes: Axes, places: Sequence[float], values: Sequence[float | None], marker: str, label: str) -> None:
    known = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
    if known:
        drawn = axes.get_legend_handles_labels()[1]
        label = "_nolegend_" if label in drawn else label
        axes.plot(*zip(*known, strict=True), marker, color="black", fillstyle="none", markersize=5, label=label)
