"""Prometheus view of the plan and of what it was made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from speculator_service.plan import PlannerSnapshot
from speculator_service.saguaro.sources import BACKUPS, SOURCE_NAMES


def planner_metrics(snapshot: PlannerSnapshot, prefix: str) -> Iterator[Metric]:
    """All metrics of a plan; what is not known yet is left out."""
    yield GaugeMetricFamily(prefix + "depth", "Tokens drafted for each prepared outcome.", snapshot.plan.depth)
    yield GaugeMetricFamily(prefix + "backup_depth", "Tokens of a just-in-time backup.", snapshot.plan.jit_depth)
    chosen = {name: float(source == snapshot.plan.backup) for name, source in BACKUPS.items()}
    yield _by("backup", prefix + "backup", "1 for the backup that answers misses now.", chosen)
    text = "Kinds of batches (size, sampled or not) for which this is the fastest way to speculate."
    yield _by("way", prefix + "ways", text, {str(way): count for way, count in snapshot.ways.items()})
    yield from _sources(snapshot, prefix)
    yield from _times(snapshot, prefix)
    yield from _downweights(snapshot, prefix)


def _sources(snapshot: PlannerSnapshot, prefix: str) -> Iterator[Metric]:
    lists = GaugeMetricFamily(
        prefix + "fan_out",
        "Outcomes prepared, by source of the verified speculation and accepted tokens.",
        labels=["source", "k"],
    )
    for name, source in zip(SOURCE_NAMES, snapshot.sources, strict=True):
        for k, count in enumerate(source.fan_out):
            lists.add_metric([name, str(k)], count)
    yield lists
    for field, text in (
        ("acceptance_rate", "Estimated share of accepted tokens."),
        ("expected_tokens", "Estimated tokens of a round, bonus token included."),
        ("hit_rate", "Estimated share of outcomes that are prepared."),
    ):
        values = [getattr(source, field) for source in snapshot.sources]
        yield _by("source", prefix + field, text, dict(zip(SOURCE_NAMES, values, strict=True)))
    laws = [source.law for source in snapshot.sources]
    for name, text, values in (
        ("miss_constant", "c of the fitted miss law c F^-r.", [law.constant for law in laws]),
        ("miss_exponent", "r of the fitted miss law c F^-r.", [law.exponent for law in laws]),
    ):
        yield _by("source", prefix + name, text, dict(zip(SOURCE_NAMES, values, strict=True)))


def _times(snapshot: PlannerSnapshot, prefix: str) -> Iterator[Metric]:
    forecast = snapshot.forecast
    if forecast is None:
        return
    table_time = (snapshot.plan.depth + 1) * forecast.times.table_step
    for name, text, value in (
        ("batch_size", "Recent batch size that the predictions are for.", forecast.batch_size),
        ("verification_seconds", "Median time of a verification.", forecast.times.verification),
        ("primary_time_ratio", "T_p: time of a table over that of a verification.", table_time),
        ("critical_batch_size", "b*: below, the just-in-time backup is the best.", snapshot.critical_batch_size),
    ):
        yield GaugeMetricFamily(prefix + name, text, value)
    times = {name: backup.time for name, backup in forecast.backups.items()}
    yield _by("backup", prefix + "backup_time_ratio", "T_b: time of a backup over that of a verification.", times)
    text = "Predicted speedup over autoregressive decoding."
    yield _by("backup", prefix + "predicted_speedup", text, snapshot.speedups)


def _downweights(snapshot: PlannerSnapshot, prefix: str) -> Iterator[Metric]:
    yield GaugeMetricFamily(prefix + "downweight", "Saguaro's C of most sequences.", snapshot.downweight)
    known = {f"{arm.downweight:g}": arm for arm in snapshot.arms if arm.num_outcomes > 0}
    for field, text in (
        ("expected_tokens", "Tokens of a round with this C, bonus token included."),
        ("hit_rate", "Share of prepared outcomes with this C."),
    ):
        values = {label: getattr(arm, field) for label, arm in known.items()}
        yield _by("downweight", prefix + "downweight_" + field, text, values)


def _by(label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        gauge.add_metric([key], value)
    return gauge
