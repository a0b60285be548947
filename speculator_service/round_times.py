"""How long the parts of a round take, by batch size."""

from __future__ import annotations

from statistics import median

from speculator_service.saguaro.domain import check_at_least

VERIFICATION = "verification"
"""Kind of the time from the last answer to a verifier's batch to its next outcomes; others are `StepKind`."""

PLAIN = "plain"
"""Kind of the same time where nothing was verified but the bonus token."""

TABLE_ROWS = "rows of a table step"
"""Kind of the number of rows of a step of tables: no seconds, but kept like them, beside the step's own."""

_WINDOW = 32
"""Samples kept of a kind and bucket: enough for a median that one late step does not move, few enough to follow."""


class RoundTimes:
    """Medians of the last times by kind and by bucket of the batch size: 1, 2, 3 to 4, 5 to 8, ...

    >>> times = RoundTimes()
    >>> for seconds in (.01, .02, .9):
    ...     times.add("table", 4, seconds)
    >>> times.median("table", 3), times.median("table", 64), times.median("draft", 3)
    (0.02, 0.02, None)
    """

    def __init__(self) -> None:
        self._samples: dict[str, dict[int, list[float]]] = {}
        self._counts: dict[tuple[str, int], int] = {}

    @staticmethod
    def bucket(batch_size: int) -> int:
        """Number of the bucket: sizes up to 2^n that are in no smaller one have n.

        >>> [RoundTimes.bucket(size) for size in (1, 2, 3, 4, 5, 8, 9)]
        [0, 1, 2, 2, 3, 3, 4]
        """
        return max(0, batch_size - 1).bit_length()

    def add(self, kind: str, batch_size: int, seconds: float) -> None:
        """Keep a time.

        Raises:
            ValueError: ``batch_size`` is less than 1, or ``seconds`` negative or not finite.
        """
        check_at_least(1, batch_size=batch_size)
        check_at_least(0, seconds=seconds)
        bucket = self.bucket(batch_size)
        samples = self._samples.setdefault(kind, {}).setdefault(bucket, [])
        count = self._counts.get((kind, bucket), 0)
        self._counts[kind, bucket] = count + 1
        if count < _WINDOW:
            samples.append(seconds)
        else:
            samples[count % _WINDOW] = seconds

    def median(self, kind: str, batch_size: int) -> float | None:
        """Seconds in the bucket of the batch size, or else in the nearest one with data; None: none at all."""
        by_bucket = self._samples.get(kind)
        if not by_bucket:
            return None
        wanted = self.bucket(batch_size)
        nearest = min(by_bucket, key=lambda bucket: (abs(bucket - wanted), bucket))
        return median(by_bucket[nearest])

    def buckets(self, kind: str) -> list[int]:
        """Buckets with data, ascending."""
        return sorted(self._samples.get(kind, {}))
