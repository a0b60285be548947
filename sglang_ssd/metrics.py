"""Prometheus metrics of the verifier; SGLang's ``/metrics`` shows them when ``--enable-metrics`` is on."""

from __future__ import annotations

import time

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from ssd_proto.records import ProposalKind, Proposals

_SHOW_EVERY_S = 0.25


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
        # Not shown yet: a counter of Prometheus' multiprocess mode costs microseconds a time.
        self._new_by_kind = np.zeros(len(ProposalKind), np.int64)
        self._new_tokens, self._new_waited, self._new_deadlines = 0, 0.0, 0
        self._show_at = 0.0

    def attached(self, is_attached: bool) -> None:
        """Note that a speculator was attached or lost; for any thread."""
        self._connected.set(int(is_attached))
        if not is_attached:
            self._lost.inc()

    def round(self, proposals: Proposals, waited_s: float, deadline_missed: bool, num_empty: int = 0) -> None:
        """Count the speculations of one round, and ``num_empty`` rows without any; `show` is called in due time."""
        self._new_by_kind[ProposalKind.EMPTY] += num_empty
        self._new_by_kind += np.bincount(proposals.kind, minlength=len(self._new_by_kind))
        self._new_tokens += int(np.add.reduce(proposals.depth))
        self._new_waited += waited_s
        self._new_deadlines += deadline_missed
        if time.monotonic() >= self._show_at:
            self.show()

    def show(self) -> None:
        """Let the counters show all rounds so far."""
        self._show_at = time.monotonic() + _SHOW_EVERY_S
        for counter, count in zip(self._by_kind, self._new_by_kind.tolist(), strict=True):
            if count:
                counter.inc(count)
        self._tokens.inc(self._new_tokens)
        self._waited.inc(self._new_waited)
        self._deadlines.inc(self._new_deadlines)
        self._new_by_kind[:] = 0
        self._new_tokens, self._new_waited, self._new_deadlines = 0, 0.0, 0
