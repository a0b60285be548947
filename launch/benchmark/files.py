"""The JSON of a run, and the places that it is written to."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.measurement import Measurements, Run
from benchmark.modes import Mode
from benchmark.rows import Row
from benchmark.settings import Cell, Settings
from ssd_proto.errors import ConfigError

PACKAGES = ("sglang-ssd", "sglang", "torch", "transformers", "numpy")


def check_places(output: Path | None, file: Path | None) -> None:
    """See, before anything is measured, that the results can be written; makes the folder.

    Raises:
        ConfigError: they cannot.
    """
    if output is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--output needs matplotlib: pip install 'matplotlib>=3.8', or give --json FILE.")
    try:
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            _try(output / "bench.json")
        if file is not None:
            _try(file)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written ({error.strerror}): name another place.") from error


def write(content: dict[str, Any], output: Path | None, file: Path | None) -> list[Path]:
    """Write the JSON to both places that are given, and the PNG to the folder; returns what was written."""
    written = [path for path in (output / "bench.json" if output is not None else None, file) if path is not None]
    for path in written:
        path.write_text(json.dumps(content, allow_nan=False, indent=1))
    if output is not None:
        from benchmark import plots

        plots.save(content["rows"], output / "bench.png")
        written.append(output / "bench.png")
    return written


def make_content(
    arguments: argparse.Namespace,
    settings: Settings,
    prompts: Sequence[str],
    measured: Sequence[Measurements],
    rows: list[Row],
) -> dict[str, Any]:
    """Everything that was asked for, found and computed, with what it was made with."""
    return {
        "arguments": {name: _plain(value) for name, value in vars(arguments).items()},
        "machine": {"processor": processor(), "system": platform.platform(), "cores": list(settings.cores)},
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "prompts": {"used": len(prompts), "sha256": _digest("\0".join(prompts))},
        "rows": rows,
        "modes": [_mode(mode, found) for mode, found in zip(settings.modes, measured, strict=True)],
    }


def processor() -> str:
    """Name of the processor, as far as the system tells."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _try(path: Path) -> None:
    """Open a file for writing; leaves what is in it, and none that was not there."""
    existed = path.exists()
    path.open("a").close()
    if not existed:
        path.unlink()


def _mode(mode: Mode, found: Measurements) -> dict[str, Any]:
    """Where it ran, and all runs as they were measured."""
    runs = [_at(cell) | _run(run) for cell, runs in found.runs.items() for run in runs]
    streams = [_at(cell) | stream._asdict() for cell, streams in found.streams.items() for stream in streams]
    placements = [placement._asdict() for placement in found.placements]
    return mode._asdict() | {"placements": placements, "runs": runs, "streams": streams}


def _run(run: Run) -> dict[str, Any]:
    """A run; of the token ids only a digest."""
    answers = [answer._asdict() | {"ids": _digest(str(answer.ids))} for answer in run.answers]
    return {
        "seconds": run.seconds,
        "tokens": run.num_tokens,
        "cpu_seconds": run.cpu_seconds,
        "memory_bytes": run.memory_bytes,
        "answers": answers,
        "service": asdict(run.service) if run.service is not None else None,
    }


def _at(cell: Cell) -> dict[str, Any]:
    return {"temperature": cell.temperature, "batch": cell.batch_size}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
