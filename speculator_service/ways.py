"""How far to speculate, by experiment: tables ahead, drafts just in time only, or not at all, by kind of batch.

Where drafts are rarely accepted or a verification of many tokens costs much more than one of one token (large batches
on a CPU, high temperatures), plain decoding is faster.  Where target and draft share what they compute with, as two
virtual cores may, a table can slow the target down by more than it saves.  No formula is needed for that: now and then
a few rounds are done in another way, and the fastest way is kept.  The better known the result is, the rarer the
others are tried again.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from speculator_service.round_times import RoundTimes

logger = logging.getLogger(__name__)

_FIRST_ROUNDS, _FIRST_OUTCOMES = 16, 48
"""Rounds of a kind, and outcomes after them, before another way is tried for the first time."""
_PAUSE: Final = 16
"""Rounds between the trials of two ways."""
_LEARNING: Final = 256
"""The same before the first trial of drafts just in time: what is prepared in a table is learnt meanwhile."""
_INTERVAL: Final = 256
"""Rounds before all are tried again; doubled whenever that changes nothing."""
_LAST_INTERVAL: Final = 4096
_WINDOW: Final = 64
"""Rounds that are remembered of each way."""
_OUTLIER: Final = 4.0
"""A round does not count for longer than so many median ones: others' prefills are not its fault."""
_PATIENCE: Final = 64
"""Rounds without drafts after a rest that are not held against speculation."""
_MARGIN: Final = 0.02
"""Least relative gain that is worth a change."""


class Way(StrEnum):
    """What the speculator does for a batch."""

    AHEAD = "ahead"
    """Tables while the target verifies, and backups."""
    JUST_IN_TIME = "just in time"
    """Every outcome is a miss: the draft model computes while the target waits, as in ordinary speculative decoding."""
    REST = "not at all"


class Decision(NamedTuple):
    """How a batch goes on."""

    batch_size: int
    is_sampled: bool
    way: Way
    """Of its next round."""


class _Trial(NamedTuple):
    """Rounds spent on a way."""

    num_skipped: int
    """At its beginning: what is under way is of another kind, and tables are empty."""
    num_measured: int


_TRIALS: Final = {Way.AHEAD: _Trial(6, 12), Way.JUST_IN_TIME: _Trial(3, 10), Way.REST: _Trial(2, 6)}


class Ways:
    """Decides for batches of each size (`RoundTimes.bucket`), sampled or not.

    Args:
        ways: to choose from; the first one is in use until another turns out to be faster.

    >>> ways = Ways([Way.AHEAD, Way.REST])
    >>> for _ in range(1000):  # twice the tokens in three times the time
    ...     decision = ways.decide(8, True)
    ...     ways.round_took(decision, *((1, 0.01) if decision.way is Way.REST else (2, 0.03)))
    >>> [str(ways.decide(*kind).way) for kind in ((8, True), (8, False), (1, True))]
    ['not at all', 'ahead', 'ahead']
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self._ways = ways
        self._cases: dict[tuple[int, bool], _Case] = {}

    def decide(self, batch_size: int, is_sampled: bool) -> Decision:
        """How such a batch goes on."""
        return Decision(batch_size, is_sampled, self._case(batch_size, is_sampled).present)

    def round_took(self, decision: Decision, tokens: float, seconds: float, is_plain: bool = False) -> None:
        """A round that was decided about took so long, from outcomes to outcomes.

        Args:
            tokens: that a sequence of the batch got, or may expect of such a round, on average.
            is_plain: whether most of its sequences had no drafts.
        """
        case = self._case(decision.batch_size, decision.is_sampled)
        if case.present is decision.way:  # otherwise another verifier's round has changed it
            case.add(tokens, seconds, is_plain)

    def choices(self) -> dict[Way, int]:
        """By way, the kinds of batches for which it is the best one."""
        chosen = [case.choice for case in self._cases.values()]
        return {way: chosen.count(way) for way in self._ways}

    def _case(self, batch_size: int, is_sampled: bool) -> _Case:
        key = RoundTimes.bucket(batch_size), is_sampled
        if key not in self._cases:
            kind = "sampled" if is_sampled else "greedy"
            first = _FIRST_ROUNDS + -(-_FIRST_OUTCOMES // batch_size)
            self._cases[key] = _Case(f"{kind} batches of up to {1 << key[0]}", self._ways, first)
        return self._cases[key]


class _Case:
    """Batches of one kind."""

    def __init__(self, name: str, ways: Sequence[Way], first_interval: int) -> None:
        self._name, self._ways = name, ways
        self.choice = self.present = ways[0]
        """The best way; the one in use, which is another in a trial."""
        self._to_try, self._has_changed = list(ways[1:]), False
        """Of the search that is under way, or the next one: what is left to try, and whether it found a better way."""
        self._rounds: dict[Way, deque[tuple[float, float]]] = {way: deque(maxlen=_WINDOW) for way in ways}
        self._interval = _INTERVAL // 2
        self._left = first_interval if self._to_try else math.inf
        self._to_skip, self._patience = _TRIALS[self.present].num_skipped, 0

    def add(self, num_tokens: float, seconds: float, is_plain: bool) -> None:
        """A round of the present way: tokens of a sequence, and seconds."""
        if self._patience > 0 and is_plain:
            self._patience -= 1  # the texts that were put out meanwhile are still being computed
            return
        self._patience = 0
        if self._to_skip > 0:
            self._to_skip -= 1
        else:
            self._rounds[self.present].append((num_tokens, seconds))
        self._left -= 1
        if self._left <= 0:
            self._change()

    def _change(self) -> None:
        """Begin a trial, or end it and decide."""
        if self.present is self.choice:
            self.present = self._to_try.pop(0)
            self._rounds[self.present].clear()  # of another load, perhaps
            self._left = sum(_TRIALS[self.present])
        else:
            self._judge()
            self.present = self.choice
            self._left = self._pause() if self._to_try else self._end_search()
        self._to_skip = _TRIALS[self.present].num_skipped
        self._patience = 0 if self.present is Way.REST else _PATIENCE

    def _judge(self) -> None:
        """Choose the present way if it is faster."""
        tried, best = self._speed(self.present), self._speed(self.choice)
        is_better = tried > best * (1 + _MARGIN)
        logger.log(
            logging.INFO if is_better else logging.DEBUG,
            "%s: %.1f tokens/s of a sequence when speculating %s, %.1f %s: %s",
            self._name,
            best,
            self.choice,
            tried,
            self.present,
            "changing" if is_better else "staying",
        )
        if is_better:
            self.choice, self._has_changed = self.present, True

    def _pause(self) -> int:
        """Rounds before the next trial of a search."""
        is_first = Way.JUST_IN_TIME in self._to_try and not self._rounds[Way.JUST_IN_TIME]
        return _LEARNING if is_first and self.choice is Way.AHEAD else _PAUSE

    def _end_search(self) -> int:
        """All ways were tried; returns the rounds before that begins again."""
        self._interval = _INTERVAL if self._has_changed else min(2 * self._interval, _LAST_INTERVAL)
        self._to_try, self._has_changed = [way for way in self._ways if way is not self.choice], False
        return self._interval

    def _speed(self, way: Way) -> float:
        tokens, seconds = np.array(self._rounds[way]).T
        total = np.minimum(seconds, _OUTLIER * np.median(seconds)).sum()
        return float(tokens.sum() / total) if total > 0 else 0.0
