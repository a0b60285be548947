"""Prometheus view of the service. Reads the counters when it is scraped: a round pays nothing for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from speculator_service.planner_metrics import planner_metrics
from speculator_service.saguaro.sources import BACKUPS, SOURCE_NAMES
from speculator_service.speculator import Speculator

_PREFIX = "sglang_ssd_speculator_"


class SpeculatorCollector(Collector):
    """Metrics of one speculator.

    ``beat_age`` gives the seconds since the model thread last moved, ``silence`` those since the verifier that is
    silent for longest was heard.
    """

    def __init__(self, speculator: Speculator, beat_age: Callable[[], float], silence: Callable[[], float]) -> None:
        self._speculator, self._beat_age, self._silence = speculator, beat_age, silence

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        yield from self._gauges()
        yield from self._totals()
        yield from self._by_label()
        yield from self._verifications()
        yield from planner_metrics(self._speculator.planner.snapshot(), _PREFIX + "plan_")

    def _gauges(self) -> Iterator[Metric]:
        speculator = self._speculator
        for name, value, text in (
            ("verifiers", len(speculator.verifiers), "Connected verifiers."),
            ("sequences", sum(v.num_sequences for v in speculator.verifiers), "Open sequences."),
            ("sequences_waiting", speculator.num_waiting, "Open sequences for which there is no room."),
            ("engine_slots_used", speculator.num_served, "Sequences that the draft model holds."),
            ("engine_slots", speculator.engine.max_slots, "Sequences that it can hold."),
            ("kv_free_tokens", speculator.num_free_cells, "KV cells that no open sequence holds."),
            ("beat_age_seconds", self._beat_age(), "Since the model thread last moved."),
            ("verifier_silence_seconds", self._silence(), "Since the most silent verifier was heard."),
        ):
            yield GaugeMetricFamily(_PREFIX + name, text, value)

    def _totals(self) -> Iterator[Metric]:
        statistics = self._speculator.statistics
        for name, value, text in (
            ("sequences_opened", statistics.opened, "Sequences opened."),
            ("sequences_closed", statistics.closed, "Sequences closed."),
            ("tables", statistics.tables, "Speculation tables begun."),
            ("prefill_tokens", statistics.prefill_tokens, "Prompt tokens computed."),
            ("prefill_tokens_shared", statistics.prefill_tokens_shared, "Prompt tokens that another sequence had."),
            ("stale_records", statistics.stale, "Records of sequences that are not open; ignored."),
            ("invalid_records", statistics.invalid, "Records that made no sense; their sequences get no speculation."),
            ("channel_errors", statistics.channel_errors, "Verifiers given up because of what they sent."),
        ):
            yield CounterMetricFamily(_PREFIX + name, text, value)

    def _by_label(self) -> Iterator[Metric]:
        statistics = self._speculator.statistics
        outcomes = CounterMetricFamily(_PREFIX + "outcomes", "Outcomes, by what they met.", labels=["kind"])
        for kind, count in statistics.outcomes.items():
            outcomes.add_metric([kind.value], count)
        yield outcomes
        steps = CounterMetricFamily(_PREFIX + "steps", "Model steps, by purpose.", labels=["kind"])
        seconds = CounterMetricFamily(_PREFIX + "step_seconds", "Time spent in model steps.", labels=["kind"])
        for step, count in statistics.steps.items():
            steps.add_metric([step.value], count)
            seconds.add_metric([step.value], statistics.step_seconds[step])
        yield steps
        yield seconds
        accepted = CounterMetricFamily(
            _PREFIX + "accepted", "Outcomes of served sequences, by accepted tokens.", labels=["k"]
        )
        hits = CounterMetricFamily(_PREFIX + "accepted_hits", "Of these, hits (short or not).", labels=["k"])
        full = CounterMetricFamily(_PREFIX + "accepted_full_hits", "Of these, hits that were not short.", labels=["k"])
        for family, counts in (
            (accepted, statistics.accepted),
            (hits, statistics.accepted_hits),
            (full, statistics.accepted_full_hits),
        ):
            for k, count in enumerate(counts.tolist()):
                family.add_metric([str(k)], count)
            yield family
        backups = CounterMetricFamily(_PREFIX + "backups", "Misses answered, by backup.", labels=["backup"])
        for name, source in BACKUPS.items():
            backups.add_metric([name], statistics.backups[source])
        yield backups

    def _verifications(self) -> Iterator[Metric]:
        statistics = self._speculator.statistics
        for name, text, counts in (
            ("verified", "Rounds of sequences, by source of the speculation that was verified.", statistics.verified),
            ("verified_tokens", "Tokens of these, bonus tokens included.", statistics.verified_tokens),
        ):
            family = CounterMetricFamily(_PREFIX + name, text, labels=["source"])
            for source, count in zip(SOURCE_NAMES, counts.tolist(), strict=True):
                family.add_metric([source], count)
            yield family
        for name, text, values in (
            ("rounds", "Rounds of verifiers, by whether all outcomes were hits, none short.", statistics.rounds),
            ("answer_seconds", "From the outcomes of these to the last answer.", statistics.answer_seconds),
            ("verification_seconds", "From there to the next outcomes.", statistics.verification_seconds),
        ):
            family = CounterMetricFamily(_PREFIX + name, text, labels=["all_hit"])
            for all_hit, value in enumerate(values):
                family.add_metric([str(all_hit)], value)
            yield family


def metrics_registry() -> CollectorRegistry:
    """A registry of our own: the default one is a global that SGLang writes to."""
    return CollectorRegistry(auto_describe=False)
