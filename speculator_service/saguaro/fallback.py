"""Which backup answers a miss (the paper, section 4.3): the slow one below the critical batch size, else a fast one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from speculator_service.saguaro.batch_speedup import SpeculatorQuality, critical_batch_size, speedup_with
from speculator_service.saguaro.domain import check_at_least
from speculator_service.saguaro.speedup import unconditional_hit_rate

PRIMARY = "primary"
"""Name of the backup that is the primary speculator itself, just in time."""


class FallbackDecision(NamedTuple):
    """A choice and all it was made of, for metrics."""

    backup: str
    batch_size: int
    critical_batch_size: float
    """b* between `PRIMARY` and the best of the others for large batches; infinity without measurements."""
    primary: SpeculatorQuality | None
    backups: dict[str, SpeculatorQuality]
    speedups: dict[str, float]
    """Predicted at this batch size, against autoregressive decoding."""


class FallbackPolicy:
    """Chooses the backup with the highest predicted speedup, and stays with it until another is clearly better.

    For two backups this is Theorem 17: `PRIMARY` iff b < b*, with a hit rate and a time for each. Comparing the
    speedups themselves also covers more than two, and T_p >= 1. A switch needs a gain of ``margin``; so a load that
    swings around b*, where the two are nearly equal, causes none, and the choice is never worse than the best by
    more than ``margin``.

    Args:
        backups: names to choose from; the first is the answer until there are measurements.
        margin: least relative gain that is worth a switch, >= 0.

    >>> policy = FallbackPolicy([PRIMARY, "empty"])
    >>> quality = SpeculatorQuality(time=.3, expected_tokens=4, hit_rate=.9)
    >>> policy.update(quality, {PRIMARY: quality, "empty": SpeculatorQuality(0, 1, .9)})
    >>> [policy.choose(batch_size) for batch_size in (1, 3, 8, 3, 1)]
    ['primary', 'primary', 'empty', 'empty', 'primary']
    >>> round(policy.decision.critical_batch_size, 4)
    2.9905
    """

    def __init__(self, backups: Sequence[str], *, margin: float = 0.03) -> None:
        if not backups:
            raise ValueError("backups must have at least 1 name, got none.")
        check_at_least(0, margin=margin)
        self._names, self._margin = tuple(backups), margin
        self._primary: SpeculatorQuality | None = None
        self._backups: dict[str, SpeculatorQuality] = {}
        self._critical = float("inf")
        self._decision = FallbackDecision(self._names[0], 0, self._critical, None, {}, {})

    @property
    def decision(self) -> FallbackDecision:
        """The last choice."""
        return self._decision

    def update(self, primary: SpeculatorQuality, backups: Mapping[str, SpeculatorQuality]) -> None:
        """New measurements, near the current batch size.

        Args:
            primary: E_hit, T_p and p_hit,p.
            backups: E_miss, T_b and p_hit,b of all backups, also of those not in use. `PRIMARY` draws level with
                ``primary`` in all three, unless measured otherwise.

        Raises:
            ValueError: a backup is missing, or a value is out of range.
        """
        missing = set(self._names) - set(backups)
        if missing:
            raise ValueError(f"backups must have a value for each of {list(self._names)}, {sorted(missing)} missing.")
        for quality in (primary, *backups.values()):
            speedup_with(primary, quality, 1)  # checks the ranges
        self._primary, self._backups = primary, {name: backups[name] for name in self._names}
        self._critical = _critical_batch_size(primary, self._backups)

    def choose(self, batch_size: int) -> str:
        """The backup for the coming round's misses."""
        check_at_least(0, batch_size=batch_size)
        primary, chosen = self._primary, self._decision.backup
        speedups: dict[str, float] = {}
        if primary is not None:
            speedups = {name: speedup_with(primary, backup, batch_size) for name, backup in self._backups.items()}
            best = max(speedups, key=speedups.__getitem__)
            if speedups[best] > speedups[chosen] * (1 + self._margin):
                chosen = best
        self._decision = FallbackDecision(chosen, batch_size, self._critical, primary, self._backups, speedups)
        return chosen


def _critical_batch_size(primary: SpeculatorQuality, backups: Mapping[str, SpeculatorQuality]) -> float:
    """b* for the fast backup that is best where every batch has a miss; infinity if there is no other than the slow."""
    others = {name: backup for name, backup in backups.items() if name != PRIMARY}
    if not others or PRIMARY not in backups:
        return float("inf") if PRIMARY in backups else 0.0
    fast = max(others.values(), key=lambda backup: speedup_with(primary, backup, float("1e9")))
    slow_hit_rate = unconditional_hit_rate(primary.hit_rate, backups[PRIMARY].hit_rate)
    return critical_batch_size(
        slow_hit_rate,
        primary.expected_tokens,
        min(fast.expected_tokens, primary.expected_tokens),
        primary.time,
        # Measured, hence possibly out of order by chance:
        fast_hit_rate=min(slow_hit_rate, unconditional_hit_rate(primary.hit_rate, fast.hit_rate)),
        fast_time=fast.time,
    )
