"""Measurements made by hand, for the tests of what launch/bench makes of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
sys.path.append(str(LAUNCH))  # launch/ is not a package

from benchmark.client import Completion, Stream  # noqa: E402
from benchmark.measurement import Measurements, Run  # noqa: E402
from benchmark.modes import parse_modes  # noqa: E402
from benchmark.processes import Placement  # noqa: E402
from benchmark.service_counts import PREFIX, Samples, ServiceCounts, counts_between, parse_samples  # noqa: E402
from benchmark.settings import Cell  # noqa: E402

CELL = Cell(0.0, 2)
NAMES = ["ar", "standalone@2", "standalone", "ssd"]
MODES = parse_modes(NAMES, 4, 1, "cpu")


def samples(**counters: dict[str, float]) -> Samples:
    """As a service's page shows them."""

    class Collector:
        def collect(self) -> list[Any]:
            families = []
            for name, values in counters.items():
                if name == "plan_depth":
                    continue
                family = CounterMetricFamily(PREFIX + name, "text", labels=["x"] if values.keys() != {""} else [])
                for label, value in values.items():
                    family.add_metric([label] if label else [], value)
                families.append(family)
            return families

    registry = CollectorRegistry()
    registry.register(Collector())  # type: ignore[arg-type]
    page = generate_latest(registry).decode() + f"{PREFIX}plan_depth {counters['plan_depth']['']}\n"
    return parse_samples(page + f'{PREFIX}plan_fan_out{{source="hit",k="0"}} 3.0\n')


def numbered(*values: float) -> dict[str, float]:
    return {str(number): value for number, value in enumerate(values)}


def page(times: float = 1.0, depth: float = 3.0) -> Samples:
    """Counters of 10 rounds of 2 sequences, so many ``times``; 6 rounds were all hits."""
    counters = {
        "outcomes": {"hit": 15, "short_hit": 1, "not_predicted": 4, "not_started": 0},
        "accepted": numbered(8, 2, 0, 10),
        "accepted_hits": numbered(4, 2, 0, 10),
        "accepted_full_hits": numbered(4, 1, 0, 10),
        "backups": {"primary": 4, "suffix": 0},
        "rounds": numbered(4, 6),
        "answer_seconds": numbered(0.02, 0.012),
        "verification_seconds": numbered(0.08, 0.108),
        "verified": {"hit": 16, "primary": 4},
        "verified_tokens": {"hit": 56, "primary": 10},
        "steps": {"table": 50, "draft": 9},
        "step_seconds": {"table": 0.1, "draft": 0.01},
    }
    scaled = {name: {key: times * value for key, value in of_name.items()} for name, of_name in counters.items()}
    return samples(**scaled, plan_depth={"": depth})


def run(seconds: float, rounds: int, tokens: int = 11, ids: int = 1, service: ServiceCounts | None = None) -> Run:
    """Two answers of ``tokens`` each, which take all of the time."""
    accepted = (rounds // 2, 0, rounds - rounds // 2) if rounds < tokens - 1 else ()
    answer = Completion((ids,) * tokens, tokens, rounds, accepted, seconds)
    return Run(seconds, (answer, answer), 0.5, 3_000_000_000, service)


def measurements(*runs: Run, first_token_s: float = 0.2) -> Measurements:
    stream = Stream(first_token_s, (0.01, 0.02, 0.03))
    place = Placement("target's scheduler", (0,), 30, 1, 0.99)
    return Measurements({CELL: list(runs)}, {CELL: [stream]}, [place])


def measured() -> list[Measurements]:
    """Of `MODES`: two repetitions, the machine being half as fast in the second."""
    counts = counts_between({}, page())
    return [
        measurements(run(2.2, 10), run(4.2, 10)),
        measurements(run(1.1, 5), run(2.1, 5)),
        measurements(run(2.2, 4), run(2.0, 4)),
        measurements(run(0.55, 4, service=counts), run(1.05, 4, service=counts)),
    ]
