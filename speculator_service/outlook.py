"""What fan-out lists promise under the measurements: hit rates, qualities of the speculators, and the best depths."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculator_service.measurements import Measurements, RelativeTimes
from speculator_service.saguaro.allocation import expected_hit_rate
from speculator_service.saguaro.batch_speedup import SpeculatorQuality, planned_speedup
from speculator_service.saguaro.depth import best_depth, finishing_time
from speculator_service.saguaro.discounted import scaled_odds
from speculator_service.saguaro.estimates import PowerLaw
from speculator_service.saguaro.fan_out_lists import conditioned
from speculator_service.saguaro.sources import BACKUPS, NUM_SOURCES, Source
from speculator_service.saguaro.speedup import unconditional_hit_rate

_MARGIN = 0.03
"""Relative gain that is worth another depth."""
_LEAST_SHARE = 0.001
"""Of outcomes that lists may promise to hit, or to miss: odds are finite."""


class Forecast(NamedTuple):
    """Qualities of the speculators at one batch size: what Theorem 7 and Corollary 16 need."""

    batch_size: int
    times: RelativeTimes
    primary: SpeculatorQuality
    backups: dict[str, SpeculatorQuality]


class SourceReport(NamedTuple):
    """What is known of the speculations of one source."""

    num_outcomes: float
    """That still count."""
    acceptance_rate: float
    expected_tokens: float
    """E, of all its rounds."""
    hit_rate: float
    law: PowerLaw
    """Fitted to its hit curve."""
    fan_out: tuple[int, ...]
    """F_0..F_K while a speculation of the planned depth is verified."""


class Outlook:
    """Fan-out lists under the measurements of the moment.

    Args:
        measured: not changed.
        counts: [S, K + 1, K + 1] lists by source and depth.
        curves: [S, K + 1, B + 1] hit curves by source.
    """

    def __init__(self, measured: Measurements, counts: NDArray[np.int64], curves: NDArray[np.float64]) -> None:
        self.counts = counts
        self._measured, self._lookahead = measured, measured.lookahead
        self._tokens = {source: measured.tokens_by_depth(source) for source in (Source.HIT, Source.PRIMARY)}
        self._promised = np.array([self._promise(source, curves[source]) for source in (Source.HIT, Source.PRIMARY)])
        """[2, K + 1] hit rates by source and depth."""
        # The bonus token after an empty speculation comes from p itself, as where all tokens were accepted.
        self._promised_empty = float(curves[Source.HIT, -1, counts[Source.EMPTY, 0, 0]])

    def _promise(self, source: int, curves: NDArray[np.float64]) -> list[float]:
        acceptance = self._measured.estimates.acceptance_by_position(source)
        return [
            expected_hit_rate(self.counts[source, depth, : depth + 1].tolist(), *conditioned(acceptance, curves, depth))
            for depth in range(self._lookahead + 1)
        ]

    def _promised_by_source(self, depth: int, jit_depth: int) -> NDArray[np.float64]:
        primary = self._promised[Source.PRIMARY, jit_depth]
        return np.array([self._promised[Source.HIT, depth], primary, primary, self._promised_empty])

    def hit_rates(self, depth: int, jit_depth: int) -> list[float]:
        """[S] measured as far as there is data, for speculations of these depths."""
        measured = self._measured
        primary = measured.hit_rate(Source.PRIMARY, self._promised[Source.PRIMARY, jit_depth])
        return [
            measured.hit_rate(Source.HIT, self._promised[Source.HIT, depth]),
            primary,
            measured.hit_rate(Source.SUFFIX, primary),
            measured.hit_rate(Source.EMPTY, self._promised_empty),
        ]

    def forecast(self, batch_size: int, depth: int, jit_depth: int) -> Forecast | None:
        """Qualities near a batch size; None until times are known."""
        rates = self.hit_rates(depth, jit_depth)
        times = self._measured.relative_times(batch_size, _num_missed(batch_size, rates[Source.HIT]))
        if times is None:
            return None
        primary = self._tokens[Source.PRIMARY]
        expected = {
            Source.PRIMARY: float(primary[jit_depth - 1]),
            Source.SUFFIX: self._measured.suffix_tokens(),
            Source.EMPTY: 1.0,
        }
        duration = {Source.PRIMARY: jit_depth * times.draft_step, Source.SUFFIX: 0.0, Source.EMPTY: 0.0}
        return Forecast(
            batch_size,
            times,
            SpeculatorQuality(
                finishing_time(depth, times.table_step, times.draft_step),
                float(self._tokens[Source.HIT][depth - 1]),
                rates[Source.HIT],
            ),
            {
                name: SpeculatorQuality(duration[source], expected[source], rates[source])
                for name, source in BACKUPS.items()
            },
        )

    def speedups(
        self, batch_size: int, depth: int, jit_depth: int, backup: str, lists: Outlook
    ) -> NDArray[np.float64] | None:
        """[K] predicted for ``lists`` instead of these, by the tokens drafted for each outcome; None: nothing is known.

        ``depth`` and ``jit_depth`` are the current ones.
        """
        now, promised = self.forecast(batch_size, depth, jit_depth), self._promised[Source.HIT, depth]
        if now is None or promised == 0:
            return None
        rates = scaled_odds(np.array(now.primary.hit_rate), _odds(lists._promised[Source.HIT, 1:]) / _odds(promised))
        num_missed, fallback = _num_missed(batch_size, now.primary.hit_rate), now.backups[backup]
        gain = self.gain(lists, depth, jit_depth)[BACKUPS[backup]]
        rate_after_miss = float(scaled_odds(np.array(fallback.hit_rate), gain))
        unconditional = [unconditional_hit_rate(now.primary.hit_rate, fallback.hit_rate)]
        unconditional += [unconditional_hit_rate(rate, rate_after_miss) for rate in rates.tolist()]
        fallback_depth = {"primary": jit_depth, "suffix": self._lookahead, "empty": 0}[backup]
        depths = np.array([depth, *range(1, self._lookahead + 1)])
        width, *widths = _widths(depths, np.array(unconditional), batch_size, fallback_depth)
        verifications = self._measured.relative_verification(batch_size, width, np.array(widths))
        glue = self._measured.relative_glue(batch_size) if backup != "primary" else 0.0
        speedups = []
        for d, (expected, rate, unit) in enumerate(
            zip(self._tokens[Source.HIT].tolist(), rates.tolist(), verifications.tolist(), strict=True), 1
        ):
            # Times are in units of a verification, which is shorter where it has less to verify.
            num_rows = batch_size * (1 + int(lists.counts[Source.HIT, d].sum()))
            step = now.times.table_step * self._measured.relative_table_step(batch_size, num_missed, num_rows)
            took = finishing_time(d, step / unit, now.times.draft_step / unit)
            took += (1 - unconditional[d] ** batch_size) * glue / unit
            scaled = fallback._replace(time=fallback.time / unit, hit_rate=rate_after_miss)
            speedups.append(planned_speedup(SpeculatorQuality(took, expected, rate), scaled, batch_size) / unit)
        return np.array(speedups)

    def gain(self, lists: Outlook, depth: int, jit_depth: int) -> NDArray[np.float64]:
        """[S] how many times the odds of a hit ``lists`` promise after speculations of these depths."""
        mine, theirs = (outlook._promised_by_source(depth, jit_depth) for outlook in (self, lists))
        return _odds(theirs) / _odds(mine)

    def best_jit_depth(self, batch_size: int, depth: int, jit_depth: int) -> int:
        """Tokens of a primary backup with the highest speedup. ``depth`` and ``jit_depth`` are the current ones."""
        now = self.forecast(batch_size, depth, jit_depth)
        if now is None:
            return jit_depth
        hit_rate = now.backups["primary"].hit_rate
        speedups = [
            planned_speedup(
                now.primary, SpeculatorQuality(tokens * now.times.draft_step, expected, hit_rate), batch_size
            )
            for tokens, expected in enumerate(self._tokens[Source.PRIMARY].tolist(), 1)
        ]
        return best_depth(np.array(speedups), jit_depth, _MARGIN)

    def best_lone_depth(self, batch_size: int, depth: int, lone_depth: int) -> int:
        """Tokens of each speculation with the highest speed where all are drafted just in time.

        ``depth``: the current one with tables, which most verifications are wide; ``lone_depth``: the one without.
        """
        times = self._measured.relative_times(batch_size, batch_size)
        if times is None:
            return lone_depth
        depths = np.arange(1, self._lookahead + 1)
        rounds = (
            self._measured.relative_verification(batch_size, depth, depths.astype(np.float64))
            + times.draft_step * depths
        )
        return best_depth(self._tokens[Source.PRIMARY] / rounds, lone_depth, _MARGIN)

    def sources(self, depth: int, jit_depth: int) -> tuple[SourceReport, ...]:
        """What is known of each source."""
        estimates, rates = self._measured.estimates, self.hit_rates(depth, jit_depth)
        depths = (depth, jit_depth, self._lookahead, 0)
        of_draft = [estimates.expected_tokens(source) for source in (Source.HIT, Source.PRIMARY)]
        tokens = (*of_draft, self._measured.suffix_tokens(), 1.0)
        return tuple(
            SourceReport(
                estimates.num_outcomes(source),
                estimates.acceptance_rate(source),
                tokens[source],
                rates[source],
                estimates.power_law(source),
                tuple(self.counts[source, depths[source]].tolist()),
            )
            for source in range(NUM_SOURCES)
        )


def _odds(probability: NDArray[np.float64]) -> NDArray[np.float64]:
    """p / (1 - p), never 0 and never infinite."""
    clipped = np.clip(probability, _LEAST_SHARE, 1 - _LEAST_SHARE)
    return np.asarray(clipped / (1 - clipped), np.float64)


def _widths(
    depths: NDArray[np.int64], hit_rates: NDArray[np.float64], batch_size: int, fallback_depth: int
) -> NDArray[np.float64]:
    """[n] mean drafts of a verification, which is as wide as the longest speculation of its batch.

    Args:
        depths: [n] of prepared speculations.
        hit_rates: [n] p, unconditional.
        fallback_depth: of the backup's speculations, at most; 0: a batch of misses verifies nothing and does not count.
    """
    all_hit, all_miss = hit_rates**batch_size, (1 - hit_rates) ** batch_size
    mixed = 1 - all_hit - all_miss
    total = all_hit * depths + all_miss * fallback_depth + mixed * np.maximum(depths, fallback_depth)
    verified = np.maximum(1 - all_miss, _LEAST_SHARE) if fallback_depth == 0 else 1.0
    return np.asarray(total / verified, np.float64)


def _num_missed(batch_size: int, hit_rate: float) -> int:
    """Sequences that a batch has to draft for just in time, where it has to for any."""
    return max(1, round(batch_size * (1 - hit_rate)))
