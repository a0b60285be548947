"""Speedups of real servers with one backup each, as launch/bench has measured them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ssd_proto.errors import ConfigError

_PREFIX = "ssd-"


class Measured(NamedTuple):
    """launch/bench with the modes ar, ssd-primary, ssd-suffix and ssd-empty (or some of them), at one temperature."""

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


def read_measured(path: Path) -> list[Measured]:
    """What ``launch/bench --json`` has written, by temperature.

    Raises:
        ConfigError: the file cannot be read, or is not of this kind.
    """
    advice = "write it with launch/bench --modes ar ssd-primary ssd-suffix ssd-empty --json FILE."
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        fan_out, found = int(content["arguments"]["fan_out"]), dict[float, Measured]()
        for row in content["rows"]:
            if row["kind"].startswith(_PREFIX):
                temperature, batch_size = float(row["temperature"]), int(row["batch"])
                measured = found.setdefault(temperature, Measured(temperature, fan_out, {}))
                line = measured.speedups.setdefault(row["kind"].removeprefix(_PREFIX), {})
                if batch_size in line:
                    raise ValueError("the same backup with two numbers of steps")
                line[batch_size] = float(row["x_ar"])
        return list(found.values())
    except OSError as error:
        raise ConfigError(f"The measurements {path} cannot be read ({error.strerror}): {advice}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"The measurements {path} are not of one fan-out and K against ar: {advice}") from error
