"""Whether to speculate at all, by experiment: tokens per second with and without speculation, by kind of batch.

Where drafts are rarely accepted or a verification of many tokens costs much more than one of one token (large batches
on a CPU, high temperatures), plain decoding is faster.  No formula is needed for that: now and then a few rounds are
done the other way, and the faster way is kept. The better known the result is, the rarer it is tried again.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Final, NamedTuple

import numpy as np

from speculator_service.round_times import RoundTimes

logger = logging.getLogger(__name__)

_FIRST_ROUNDS, _FIRST_OUTCOMES = 16, 48
"""Rounds of a kind, and outcomes after them, before the other way is tried for the first time."""
_INTERVAL: Final = 256
"""Rounds before the next trial; doubled with every trial that changes nothing."""
_LAST_INTERVAL: Final = 4096
_WINDOW: Final = 64
"""Rounds that are remembered of each way."""
_OUTLIER: Final = 4.0
"""A round does not count for longer than so many median ones: others' prefills are not its fault."""
_PATIENCE: Final = 64
"""Rounds without drafts after a rest that are not held against speculation."""
_MARGIN: Final = 0.02
"""Least relative gain that is worth a change."""


class Decision(NamedTuple):
    """How a batch goes on."""

    batch_size: int
    is_sampled: bool
    rests: bool
    """Whether its next round goes without speculation."""


class _Trial(NamedTuple):
    """Rounds spent on a way that is tried."""

    num_skipped: int
    """At its beginning: what is under way is of the other kind, and tables are empty."""
    num_measured: int


_TRIALS: Final = {True: _Trial(2, 6), False: _Trial(6, 12)}
"""By whether the trial is to rest."""


class Resting:
    """Decides for batches of each size (`RoundTimes.bucket`), sampled or not.

    >>> resting = Resting()
    >>> for _ in range(1000):  # twice the tokens in three times the time
    ...     decision = resting.decide(8, True)
    ...     resting.round_took(decision, *((1, 0.01) if decision.rests else (2, 0.03)))
    >>> [resting.decide(*kind).rests for kind in ((8, True), (8, False), (1, True))]
    [True, False, False]
    """

    def __init__(self) -> None:
        self._cases: dict[tuple[int, bool], _Case] = {}

    def decide(self, batch_size: int, is_sampled: bool) -> Decision:
        """How such a batch goes on."""
        return Decision(batch_size, is_sampled, self._case(batch_size, is_sampled).is_resting)

    def round_took(self, decision: Decision, tokens: float, seconds: float, is_plain: bool = False) -> None:
        """A round that was decided about took so long, from outcomes to outcomes.

        Args:
            tokens: that a sequence of the batch got on average.
            is_plain: whether most of its sequences had no drafts.
        """
        case = self._case(decision.batch_size, decision.is_sampled)
        if case.is_resting == decision.rests:  # otherwise another verifier's round has changed it
            case.add(tokens, seconds, is_plain)

    @property
    def num_resting(self) -> int:
        """Kinds of batches for which plain decoding is the faster way."""
        return sum(case.choice for case in self._cases.values())

    def _case(self, batch_size: int, is_sampled: bool) -> _Case:
        key = RoundTimes.bucket(batch_size), is_sampled
        if key not in self._cases:
            kind = "sampled" if is_sampled else "greedy"
            first = _FIRST_ROUNDS + -(-_FIRST_OUTCOMES // batch_size)
            self._cases[key] = _Case(f"{kind} batches of up to {1 << key[0]}", first)
        return self._cases[key]


class _Case:
    """Batches of one kind."""

    def __init__(self, name: str, first_interval: int) -> None:
        self._name = name
        self.choice = self.is_resting = False
        """The better way; the present one, which is another in a trial."""
        self._rounds: dict[bool, deque[tuple[float, float]]] = {way: deque(maxlen=_WINDOW) for way in (False, True)}
        self._interval = _INTERVAL // 2
        self._left, self._to_skip = first_interval, _TRIALS[False].num_skipped
        self._patience = 0

    def add(self, num_tokens: float, seconds: float, is_plain: bool) -> None:
        """A round of the present way: tokens of a sequence, and seconds."""
        if self._patience > 0 and is_plain:
            self._patience -= 1  # the texts that were put out meanwhile are still being computed
            return
        self._patience = 0
        if self._to_skip > 0:
            self._to_skip -= 1
        else:
            self._rounds[self.is_resting].append((num_tokens, seconds))
        self._left -= 1
        if self._left <= 0:
            self._change()

    def _change(self) -> None:
        """Begin a trial, or end it and decide."""
        if self.is_resting == self.choice:
            self.is_resting = not self.choice
            self._rounds[self.is_resting].clear()  # of another load, perhaps
            trial = _TRIALS[self.is_resting]
            self._left = trial.num_skipped + trial.num_measured
        else:
            speeds = self._speed(False), self._speed(True)
            is_better = speeds[self.is_resting] > speeds[self.choice] * (1 + _MARGIN)
            logger.log(
                logging.INFO if is_better else logging.DEBUG,
                "%s: %.1f tokens/s of a sequence with speculation, %.1f without: %s",
                self._name,
                *speeds,
                "resting" if self.choice != is_better else "speculating",
            )
            self._interval = _INTERVAL if is_better else min(2 * self._interval, _LAST_INTERVAL)
            self.choice = self.choice != is_better
            self.is_resting, self._left = self.choice, self._interval
        self._to_skip = _TRIALS[self.is_resting].num_skipped
        self._patience = 0 if self.is_resting else _PATIENCE

    def _speed(self, way: bool) -> float:
        tokens, seconds = np.array(self._rounds[way]).T
        total = np.minimum(seconds, _OUTLIER * np.median(seconds)).sum()
        return float(tokens.sum() / total) if total > 0 else 0.0
