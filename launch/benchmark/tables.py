"""The tables that a run prints: a column for each mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmark.measurement import Measurements
from benchmark.modes import Mode
from benchmark.rows import BEST_STANDALONE, Row

_WIDTH = 200
"""Columns where the output is no terminal."""

Show = Callable[[Row], str]


def console() -> Console:
    """For stdout."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_WIDTH)


def print_all(output: Console, rows: Sequence[Row], modes: Sequence[Mode], measured: Sequence[Measurements]) -> None:
    """Placement, then for every temperature and batch size speeds, ratios and what the speculators did."""
    _print(output, "Processes, as read back from the system after they ran", placement_table(modes, measured))
    for cell in dict.fromkeys((row["temperature"], row["batch"]) for row in rows):
        here = [row for row in rows if (row["temperature"], row["batch"]) == cell]
        name = f"temperature {cell[0]:g}, batch size {cell[1]}"
        best = here[0]["best_standalone"]
        note = f"; {BEST_STANDALONE}: {best}" if best else ""
        _print(output, f"Speed: {name}", _table(here, SPEED))
        _print(output, f"Ratios of tok/s, median [min, max] of pairs: {name}{note}", _table(here, ratios(here)))
        if ssd := [row for row in here if row["ssd"]]:
            _print(output, f"Rounds of SSD: {name}", _table(ssd, ROUNDS))
            _print(output, f"Outcomes of SSD: {name}", _table(ssd, outcomes(ssd)))


def placement_table(modes: Sequence[Mode], measured: Sequence[Measurements]) -> Table:
    """Where the processes of each mode ran."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("mode", "process"):
        table.add_column(name)
    for name in ("cores", "threads", "busy threads", "cores used"):
        table.add_column(name, justify="right")
    for mode, found in zip(modes, measured, strict=True):
        for place in found.placements:
            cores = ",".join(map(str, place.cores))
            numbers = (str(place.num_threads), str(place.busy_threads), f"{place.cores_used:.2f}")
            table.add_row(mode.name, Text(place.role), cores, *numbers)
    return table


def ratios(rows: Sequence[Row]) -> Mapping[str, Show]:
    """Each mode against each other."""

    def ratio(name: str) -> Show:
        return lambda row: "{median:.2f} [{min:.2f}, {max:.2f}]".format(**row["x"][name])

    return {f"x {name}": ratio(name) for name in rows[0]["x"]}


def outcomes(rows: Sequence[Row]) -> Mapping[str, Show]:
    """What the outcomes met."""
    kinds = {kind.replace("_", " "): _share(kind) for kind in rows[0]["ssd"]["outcomes"]}
    return kinds | {"full hits at k = 0..K": lambda row: _numbers(row["ssd"]["full_hit_rate_by_k"])}


def _of_service(name: str, digits: int) -> Show:
    return lambda row: _number(row["ssd"].get(name), digits)


def _share(kind: str) -> Show:
    return lambda row: _number(row["ssd"]["outcomes"][kind], 3)


def _print(output: Console, title: str, table: Table) -> None:
    output.print(Text(title, style="bold"), table, sep="\n")


def _table(rows: Sequence[Row], lines: Mapping[str, Show]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for row in rows:
        table.add_column(row["mode"], justify="right")
    for name, show in lines.items():
        table.add_row(name, *(Text(show(row)) for row in rows))
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _numbers(values: Iterable[float | None] | None) -> str:
    return " ".join("-" if value is None else f"{value:.2f}" for value in values or ())


def _percentiles(value: dict[str, Any] | None) -> str:
    return "" if value is None else f"{value['p50']:.1f}, {value['p99']:.1f}"


SPEED: Mapping[str, Show] = {
    "tok/s": lambda row: _number(row["tok_s"], 0),
    "tok/s per device": lambda row: _number(row["tok_s_per_device"], 0),
    "decode tok/s": lambda row: _number(row["decode_tok_s"], 0),
    "TTFT ms p50, p99": lambda row: _percentiles(row["ttft_ms"]),
    "ITL ms p50, p99": lambda row: _percentiles(row["itl_ms"]),
    "tokens per round": lambda row: _number(row["tokens_per_round"], 2),
    "accepted at 1..K": lambda row: _numbers(row["acceptance"]),
    "round ms": lambda row: _number(row["round_ms"], 1),
    "CPU ms per token": lambda row: _number(row["cpu_s_per_token"] * 1e3, 1),
    "memory GB": lambda row: _number(row["memory_gb"], 1),
    "tokens of the first mode": lambda row: "same" if row["same_tokens"] else "others",
}
"""Speed, latency and cost."""

ROUNDS: Mapping[str, Show] = {
    "all hit": _of_service("all_hit_rate", 2),
    "p": _of_service("hit_rate", 2),
    "E_hit": _of_service("tokens_hit", 2),
    "E_miss": _of_service("tokens_miss", 2),
    "round ms": _of_service("round_ms", 1),
    "T_verify ms": _of_service("verification_ms", 1),
    "T_p": _of_service("primary_time", 2),
    "T_b": _of_service("backup_time", 2),
    "wait ms per round": _of_service("wait_ms", 2),
    "Theorem 7": _of_service("theorem_speedup", 2),
    "predicted x ar, decode": _of_service("predicted_x_ar", 2),
    "measured x ar, decode": lambda row: _number((row["decode_x_ar"] or {}).get("median"), 2),
    "measured x ar": lambda row: _number(row["x_ar"], 2),
}
"""Where the time of SSD's rounds goes, and what the paper's formula makes of it."""
