"""Speedups of real servers with one backup each, as launch/bench has measured them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ssd_proto.errors import ConfigError

_PREFIX = "ssd-"


class Measured(NamedTuple):
    """One run of launch/bench with the modes ar, ssd-primary, ssd-suffix and ssd-empty (or some of them)."""

    temperature: float
    fan_out: int
    speedups: dict[str, dict[int, float]]
    """Against plain decoding, by backup and batch size."""

    def lines(self, backups: tuple[str, ...]) -> dict[str, dict[str, list[float]]]:
        """Batch sizes and speedups of those ``backups`` that were measured."""
        found = {backup: self.speedups[backup] for backup in backups if backup in self.speedups}
        return {
            backup: {"batch_size": sorted(line), "speedup": [line[size] for size in sorted(line)]}
            for backup, line in found.items()
        }


def read_measured(path: Path) -> Measured:
    """What ``launch/bench --json`` has written.

    Raises:
        ConfigError: the file cannot be read, or is not of this kind.
    """
    advice = "write it with launch/bench --modes ar ssd-primary ssd-suffix ssd-empty --json FILE."
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        arguments, speedups = content["arguments"], dict[str, dict[int, float]]()
        for row in content["rows"]:
            if row["mode"].startswith(_PREFIX):
                line = speedups.setdefault(row["mode"].removeprefix(_PREFIX), {})
                line[int(row["batch"])] = float(row["x_ar"])
        return Measured(float(arguments["temperature"]), int(arguments["fan_out"]), speedups)
    except OSError as error:
        raise ConfigError(f"The measurements {path} cannot be read ({error.strerror}): {advice}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"The measurements {path} are not those of one fan-out against ar: {advice}") from error
