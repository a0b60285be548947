"""What is reported of each mode at each temperature and batch size, as JSON: one row for each."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.client import Stream
from benchmark.measurement import Measurements, Run
from benchmark.modes import Mode
from benchmark.pairing import paired_ratio, percentile
from benchmark.prediction import predicted_speedup, round_parts, theorem_speedup
from benchmark.service_counts import ServiceCounts, sum_counts
from benchmark.settings import Cell
from benchmark.speeds import Speeds, speeds_of

PLAIN = "ar"
"""The mode that speedups are given against."""
BEST_STANDALONE = "best standalone"
"""The fastest of all K that were measured."""

Row = dict[str, Any]


def make_rows(modes: Sequence[Mode], measured: Sequence[Measurements], cells: Sequence[Cell]) -> list[Row]:
    """Rows of all modes at the first cell, then at the next.  What was not measured is None.

    Speeds are medians over the repetitions; ratios are medians of the ratios within repetitions.
    """
    return [row for cell in cells for row in _rows_at(cell, modes, measured)]


def best_standalone(modes: Sequence[Mode], speeds: Mapping[str, Speeds]) -> str | None:
    """Name of the fastest mode of STANDALONE; None if none was measured."""
    names = [mode.name for mode in modes if mode.kind == "standalone"]
    return max(names, key=lambda name: statistics.median(speeds[name].end_to_end), default=None)


def _rows_at(cell: Cell, modes: Sequence[Mode], measured: Sequence[Measurements]) -> list[Row]:
    of_mode = dict(zip((mode.name for mode in modes), measured, strict=True))
    speeds = {name: speeds_of(found.runs[cell], found.streams.get(cell, ())) for name, found in of_mode.items()}
    references, best = dict(speeds), best_standalone(modes, speeds)
    if best is not None:
        references[BEST_STANDALONE] = speeds[best]
    rows = []
    for mode in modes:
        runs, mine = of_mode[mode.name].runs[cell], speeds[mode.name]
        row: Row = {"temperature": cell.temperature, "batch": cell.batch_size, "mode": mode.name, "kind": mode.kind}
        row |= {"lookahead": mode.lookahead, "devices": mode.num_devices}
        row |= _speed(mode, mine) | _latency(of_mode[mode.name].streams.get(cell, ())) | _tokens(mode, runs)
        row |= _cost(runs)
        row["x"] = {name: _ratio(mine.end_to_end, other.end_to_end) for name, other in references.items()}
        row["x_ar"] = row["x"][PLAIN]["median"] if PLAIN in row["x"] else None
        row["best_standalone"] = best
        row["x_best_standalone"] = row["x"][BEST_STANDALONE]["median"] if best is not None else None
        plain = speeds.get(PLAIN)
        row["decode_x_ar"] = _ratio(mine.decode, plain.decode) if plain is not None and plain.decode else None
        row["same_tokens"] = _ids(runs) == _ids(of_mode[modes[0].name].runs[cell][:1])
        counts = [run.service for run in runs if run.service is not None]
        row["ssd"] = _speculator(sum_counts(counts), plain) if counts else None
        rows.append(row)
    return rows


def _speed(mode: Mode, speeds: Speeds) -> Row:
    tok_s = statistics.median(speeds.end_to_end)
    return {
        "tok_s": tok_s,
        "tok_s_per_device": tok_s / mode.num_devices,
        "decode_tok_s": statistics.median(speeds.decode) if speeds.decode else None,
        "round_ms": statistics.median(speeds.round_s) * 1e3 if speeds.round_s else None,
    }


def _latency(streams: Sequence[Stream]) -> Row:
    """Milliseconds, over all requests and over all tokens."""
    first = [stream.first_token_s * 1e3 for stream in streams]
    gaps = [gap * 1e3 for stream in streams for gap in stream.token_gaps_s]
    return {
        name: {"p50": percentile(values, 50), "p99": percentile(values, 99)} if values else None
        for name, values in (("ttft_ms", first), ("itl_ms", gaps))
    }


def _tokens(mode: Mode, runs: Sequence[Run]) -> Row:
    """Tokens per round, and the share of rounds that accept the draft at each position; what is first comes first."""
    rounds = sum(run.num_rounds for run in runs)
    by_count = [0] * (mode.lookahead + 1)
    for answer in (answer for run in runs for answer in run.answers):
        for accepted, number in enumerate(answer.accepted[: mode.lookahead + 1]):
            by_count[accepted] += number
    total = sum(by_count)
    return {
        "tokens_per_round": sum(run.num_decoded for run in runs) / rounds if rounds else None,
        "acceptance": [sum(by_count[position:]) / total for position in range(1, len(by_count))] if total else None,
    }


def _cost(runs: Sequence[Run]) -> Row:
    return {
        "cpu_s_per_token": statistics.median(run.cpu_seconds / run.num_tokens for run in runs),
        "memory_gb": max(run.memory_bytes for run in runs) / 1e9,
    }


def _speculator(counts: ServiceCounts, plain: Speeds | None) -> Row:
    """What the service counted, and the speedup that the paper's formula makes of it. Times in ms or verifications."""
    parts = round_parts(counts)
    row: Row = {
        "outcomes": {kind: number / max(counts.num_outcomes, 1) for kind, number in counts.outcomes.items()},
        "full_hit_rate_by_k": _shares(counts.full_hits, counts.accepted),
        "hit_rate_by_k": _shares(counts.hits, counts.accepted),
        "backups": counts.backups,
        "tokens_per_branch": counts.tokens_per_branch,
    }
    if parts is None:
        return row
    step_s = statistics.median(plain.round_s) if plain is not None and plain.round_s else None
    return row | {
        "hit_rate": parts.hit_rate,
        "all_hit_rate": parts.all_hit_rate,
        "tokens_hit": parts.tokens_hit,
        "tokens_miss": parts.tokens_miss,
        "round_ms": (sum(counts.answer_s) + sum(counts.verification_s)) / counts.num_rounds * 1e3,
        "verification_ms": parts.verification_s * 1e3,
        "primary_time": parts.primary_time,
        "backup_time": parts.backup_time,
        "wait_ms": (1 - parts.all_hit_rate) * parts.backup_time * parts.verification_s * 1e3,
        "theorem_speedup": theorem_speedup(parts),
        "predicted_x_ar": predicted_speedup(parts, step_s) if step_s is not None else None,
    }


def _shares(parts: Sequence[float], wholes: Sequence[float]) -> list[float | None]:
    return [part / whole if whole else None for part, whole in zip(parts, wholes, strict=True)]


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> Row:
    ratio = paired_ratio(mine, theirs)
    return {"median": ratio.median, "min": ratio.least, "max": ratio.most}


def _ids(runs: Sequence[Run]) -> set[tuple[tuple[int, ...], ...]]:
    return {tuple(answer.ids for answer in run.answers) for run in runs}
