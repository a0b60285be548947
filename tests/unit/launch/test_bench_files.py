"""launch/bench: JSON, picture and tables of measurements made by hand."""

from __future__ import annotations

import doctest
import importlib
import json
import pkgutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from bench_numbers import CELL, MODES, NAMES, measured, run  # first: it finds the modules of launch/
from benchmark import files, plots, tables
from benchmark.measurement import Measurements
from benchmark.modes import parse_modes
from benchmark.rows import make_rows
from benchmark.settings import Cell, make_settings, parse_arguments
from reproduction.measured import read_measured
from rich.console import Console

from ssd_proto.errors import ConfigError


@pytest.fixture
def content() -> dict[str, Any]:
    arguments = parse_arguments(None, ["--modes", *NAMES, "--batch-sizes", "2", "--output", "somewhere"])
    settings, found = make_settings(arguments), measured()
    return files.make_content(arguments, settings, ["a", "b"], found, make_rows(MODES, found, [CELL]))


class TestFiles:
    def test_json_has_everything(self, content: dict[str, Any], tmp_path: Path) -> None:
        written = files.write(content, tmp_path, tmp_path / "again.json")
        assert [path.name for path in written] == ["bench.json", "again.json", "bench.png"]
        read = json.loads((tmp_path / "bench.json").read_text())
        assert read == json.loads((tmp_path / "again.json").read_text())
        assert read["arguments"]["modes"] == NAMES
        assert {"sglang", "torch", "python", "sglang-ssd"} <= set(read["versions"])
        assert read["machine"]["cores"] == list(make_settings(parse_arguments(None, [])).cores)
        assert [mode["name"] for mode in read["modes"]] == NAMES
        ssd = read["modes"][3]
        assert [one["seconds"] for one in ssd["runs"]] == [0.55, 1.05]
        assert ssd["runs"][0]["service"]["rounds"] == [4, 6]
        assert ssd["runs"][0]["answers"][0]["num_rounds"] == 4
        assert ssd["placements"][0]["cores"] == [0]
        assert ssd["streams"][0]["token_gaps_s"] == [0.01, 0.02, 0.03]
        assert len(read["rows"]) == 4

    def test_png(self, content: dict[str, Any], tmp_path: Path) -> None:
        files.write(content, tmp_path, None)
        assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")

    def test_bars_are_the_medians_with_predicted_and_measured_marks(self, content: dict[str, Any]) -> None:
        (axes,) = plots.draw(content["rows"]).axes
        assert [patch.get_height() for patch in axes.patches] == pytest.approx(  # type: ignore[attr-defined]
            [row["x_ar"] for row in content["rows"]]
        )
        labels = axes.get_legend_handles_labels()[1]
        assert set(labels) == {*NAMES, "decode only", "decode only, predicted"}

    def test_without_plain_decoding_the_first_mode_is_one(self) -> None:
        (axes,) = plots.draw(make_rows(MODES[1:], measured()[1:], [CELL])).axes
        assert axes.get_ylabel() == "x standalone@2"
        assert set(axes.get_legend_handles_labels()[1]) == set(NAMES[1:])

    def test_places_are_tried_and_left_as_they_were(self, tmp_path: Path) -> None:
        kept = tmp_path / "kept.json"
        kept.write_text("old")
        files.check_places(tmp_path / "new", kept)
        assert kept.read_text() == "old"
        assert list((tmp_path / "new").iterdir()) == []
        with pytest.raises(ConfigError, match="name another place"):
            files.check_places(None, tmp_path)

    def test_figures_read_the_speedups_of_backups(self, tmp_path: Path) -> None:
        modes = parse_modes(["ar", "ssd-primary", "ssd-empty@4"], 4, 1, "cpu")
        cells = [Cell(0.0, 1), Cell(0.0, 2), Cell(1.0, 1)]
        runs = {cell: [run(1.0, 4)] for cell in cells}
        faster = {cell: [run(0.5, 4)] for cell in cells}
        rows = make_rows(modes, [Measurements(runs), Measurements(faster), Measurements(runs)], cells)
        arguments = {"fan_out": "3"}
        (tmp_path / "bench.json").write_text(json.dumps({"arguments": arguments, "rows": rows}))
        cold, warm = read_measured(tmp_path / "bench.json")
        assert (cold.temperature, warm.temperature, cold.fan_out) == (0, 1, 3)
        assert cold.lines(("primary", "empty", "suffix")) == {
            "primary": {"batch_size": [1, 2], "speedup": [2, 2]},
            "empty": {"batch_size": [1, 2], "speedup": [1, 1]},
        }
        assert warm.lines(("primary",)) == {"primary": {"batch_size": [1], "speedup": [2]}}

    def test_figures_refuse_two_numbers_of_steps(self, tmp_path: Path) -> None:
        modes = parse_modes(["ar", "ssd-primary@2", "ssd-primary@4"], 4, 1, "cpu")
        rows = make_rows(modes, [Measurements({CELL: [run(1.0, 4)]})] * 3, [CELL])
        (tmp_path / "bench.json").write_text(json.dumps({"arguments": {"fan_out": "3"}, "rows": rows}))
        with pytest.raises(ConfigError, match="one fan-out and K"):
            read_measured(tmp_path / "bench.json")


@pytest.mark.parametrize("width", [60, 200])
def test_tables_show_what_the_rows_hold(width: int) -> None:
    output, found = StringIO(), measured()
    console = Console(file=output, width=width, highlight=False)
    tables.print_all(console, make_rows(MODES, found, [CELL]), MODES, found)
    text = output.getvalue()
    for word in ("4.00", "2.10]", "predicted", "Theorem 7"):
        assert word in text, word
    if width == 200:
        assert "target's scheduler" in text
        assert "1.55 [1.00, 2.10]" in text
        assert "Ratios of tok/s, median [min, max] of pairs: temperature 0, batch size 2; best standalone:" in text
        assert "0.50 0.50 - 1.00" in text


def test_examples_in_docstrings_are_true() -> None:
    names = [module.name for module in pkgutil.iter_modules([str(Path(files.__file__).parent)])]
    results = {name: doctest.testmod(importlib.import_module(f"benchmark.{name}")) for name in names}
    assert sum(result.attempted for result in results.values()) >= 8
    assert [name for name, result in results.items() if result.failed] == []
