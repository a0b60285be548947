"""Prometheus metrics of the verifier; SGLang's ``/metrics`` shows them when ``--enable-metrics`` is on."""

from __future__ import annotations

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from ssd_proto.records import ProposalKind, Proposals


class VerifierMetrics:
    """Counters of one scheduler process. Created after SGLang has set up Prometheus' multiprocess mode."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._connected = Gauge(
            "sglang_ssd:connected",
            "1 while a speculator is attached, 0 while decoding runs plain",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self._lost = Counter(
            "sglang_ssd:connections_lost_total", "Times that the speculator was lost", registry=registry
        )
        self._proposals = Counter(
            "sglang_ssd:proposals_total",
            "Speculations verified, one per request and round",
            ["kind"],
            registry=registry,
        )
        self._tokens = Counter(
            "sglang_ssd:proposed_tokens_total", "Speculated tokens that were verified", registry=registry
        )
        self._waited = Counter(
            "sglang_ssd:wait_seconds_total", "Time that verification waited for speculations", registry=registry
        )
        self._deadlines = Counter(
            "sglang_ssd:deadlines_missed_total", "Rounds in which the deadline passed", registry=registry
        )
        self._by_kind = [self._proposals.labels(kind.name.lower()) for kind in ProposalKind]
        self._connected.set(0)

    def attached(self, is_attached: bool) -> None:
        """Note that a speculator was attached or lost; for any thread."""
        self._connected.set(int(is_attached))
        if not is_attached:
            self._lost.inc()

    def round(self, proposals: Proposals, waited_s: float, deadline_missed: bool) -> None:
        """Count the speculations of one round."""
        for counter, count in zip(
            self._by_kind, np.bincount(proposals.kind, minlength=len(self._by_kind)), strict=True
        ):
            if count:
                counter.inc(int(count))
        self._tokens.inc(int(proposals.depth.sum()))
        self._waited.inc(waited_s)
        if deadline_missed:
            self._deadlines.inc()
