"""Fan-out lists: how many bonus tokens are prepared for each number of accepted tokens (F_k, k = 0..K)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ssd_proto.channel import MAX_OUTCOMES
from ssd_proto.errors import ConfigError

DEFAULT_FAN_OUT = 3


def uniform_fan_out(lookahead: int, fan_out: int = DEFAULT_FAN_OUT) -> tuple[int, ...]:
    """The list of K + 1 equal entries F_0..F_K.

    >>> uniform_fan_out(2, 3)
    (3, 3, 3)
    """
    return (fan_out,) * (lookahead + 1)


def _empty() -> NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class FanOut:
    """A fan-out list and the layout of the table columns that follows from it.

    Columns are in ascending order of k.  The columns of k = K come last because their outcomes are known
    one step later than the others: they need the forward pass over s_K.

    Raises:
        ConfigError: an entry is negative, or the list is empty, too long, or prepares too many outcomes.
    """

    counts: tuple[int, ...]
    """F_0..F_K."""
    accepted: NDArray[np.int64] = field(init=False, repr=False, compare=False, default_factory=_empty)
    """[num_outcomes] k of each column."""
    rank: NDArray[np.int64] = field(init=False, repr=False, compare=False, default_factory=_empty)
    """[num_outcomes] place of each column's token among the candidates of its k, from 0."""

    def __post_init__(self) -> None:
        if len(self.counts) < 2:
            raise ConfigError("fan_out must have lookahead + 1 entries, at least 2.")
        if min(self.counts) < 0:
            raise ConfigError(f"fan_out entries must be 0 or more, got {list(self.counts)}.")
        if sum(self.counts) > MAX_OUTCOMES:
            raise ConfigError(
                f"fan_out must prepare at most {MAX_OUTCOMES} outcomes per sequence, got {sum(self.counts)}: lower it."
            )
        object.__setattr__(self, "accepted", np.repeat(np.arange(len(self.counts)), self.counts))
        ranks = [np.arange(count) for count in self.counts]
        object.__setattr__(self, "rank", np.concatenate(ranks).astype(np.int64))

    @classmethod
    def parse(cls, value: int | Sequence[int], lookahead: int) -> FanOut:
        """One number for every k, or the list F_0..F_K.

        Raises:
            ConfigError: the list has not ``lookahead + 1`` entries, or see the class.
        """
        counts = uniform_fan_out(lookahead, value) if isinstance(value, int) else tuple(value)
        if len(counts) != lookahead + 1:
            raise ConfigError(
                f"fan_out must have lookahead + 1 = {lookahead + 1} entries (or be one number), got {len(counts)}."
            )
        return cls(counts)

    @property
    def lookahead(self) -> int:
        """K."""
        return len(self.counts) - 1

    @property
    def num_outcomes(self) -> int:
        """B: columns of a table."""
        return len(self.accepted)

    @property
    def first_late(self) -> int:
        """First column with k = K (``num_outcomes`` if there is none)."""
        return self.num_outcomes - self.counts[-1]

    @property
    def num_candidates(self) -> int:
        """Candidates needed per position: one more than F_k where the token that was sent is left out; at least 1."""
        return max(1, self.counts[-1], *(count + 1 for count in self.counts[:-1]))
