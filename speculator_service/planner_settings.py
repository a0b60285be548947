"""What a user may fix of the plan, and what is left to measurements. Nothing heavy: the command line imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from speculator_service.saguaro.sources import BACKUPS
from speculator_service.ways import Way
from ssd_proto.channel import MAX_OUTCOMES
from ssd_proto.errors import ConfigError

AUTO: Final = "auto"
"""Value of an option that is left to measurements."""

AVERAGE_FAN_OUT: Final = 3
"""Outcomes for each k, on average, that there is room for if nothing else is said."""

FanOutOption = int | tuple[int, ...] | str
"""One F for all k; the list F_0..F_K; or `AUTO`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Options of the planner.

    Raises:
        ConfigError: a value is not allowed. What depends on K or the vocabulary is checked by `hit_list`, `miss_list`,
            `num_outcomes` and `check_vocabulary`.
    """

    fan_out: FanOutOption = AUTO
    """Outcomes prepared while a speculation from the table is verified."""
    fan_out_after_miss: FanOutOption | None = None
    """Outcomes prepared while a backup is verified; None: as ``fan_out``."""
    branch_budget: int | None = None
    """B, at most, where a fan-out is `AUTO`; None: as many as `AVERAGE_FAN_OUT`, or a hand-written list, asks for."""
    backup: str = AUTO
    """One of `BACKUPS`, or `AUTO`."""
    downweight: float | str = 1.0
    """Saguaro's C in [0, 1], or `AUTO`."""
    adapt_depth: bool = True
    """Whether fewer than K tokens are drafted, for fewer outcomes than B, where times and acceptance say so."""
    rest: bool = True
    """Whether less is done, or nothing, where that was measured to be faster."""

    def __post_init__(self) -> None:
        for name, value in (("fan_out", self.fan_out), ("fan_out_after_miss", self.fan_out_after_miss)):
            if value is not None:
                _check_fan_out(name, value)
        if self.branch_budget is not None:
            _check_number("branch_budget", self.branch_budget, 0, MAX_OUTCOMES, whole=True)
            if AUTO not in (self.fan_out, self.fan_out_after_miss):
                raise ConfigError("branch_budget is for fan_out auto; leave it out beside a hand-written fan_out.")
        if self.backup != AUTO and self.backup not in BACKUPS:
            raise ConfigError(f"backup must be one of {', '.join([AUTO, *BACKUPS])}, got {self.backup!r}.")
        if self.downweight != AUTO:
            _check_number("downweight", self.downweight, 0, 1, otherwise=AUTO)

    def hit_list(self, lookahead: int) -> tuple[int, ...] | None:
        """The hand-written F_0..F_K after a hit; None: `AUTO`.

        Raises:
            ConfigError: there are not K + 1 entries, or too many outcomes in all.
        """
        return _written("fan_out", self.fan_out, lookahead)

    def miss_list(self, lookahead: int) -> tuple[int, ...] | None:
        """The hand-written F_0..F_K after a miss; None: `AUTO`. Raises as `hit_list`."""
        if self.fan_out_after_miss is None:
            return self.hit_list(lookahead)
        return _written("fan_out_after_miss", self.fan_out_after_miss, lookahead)

    def num_outcomes(self, lookahead: int) -> int:
        """B: outcomes prepared per sequence at most, which is what the draft model must have room for.

        Raises:
            ConfigError: see `hit_list`; or a hand-written list is larger than ``branch_budget``.
        """
        lists = (self.hit_list(lookahead), self.miss_list(lookahead))
        written = max(sum(counts or ()) for counts in lists)
        if None not in lists:
            return written
        if self.branch_budget is None:
            return max(written, AVERAGE_FAN_OUT * (lookahead + 1))
        if written > self.branch_budget:
            raise ConfigError(
                f"branch_budget must be at least {written}, the sum of the hand-written list, got {self.branch_budget}."
            )
        return self.branch_budget

    def ways(self, lookahead: int) -> tuple[Way, ...]:
        """How far speculation may go, the first choice first. Raises as `num_outcomes`."""
        if not self.rest:
            return (Way.AHEAD,)
        if self.num_outcomes(lookahead) == 0 or self.backup == "empty":
            return (Way.AHEAD, Way.REST)  # without tables, or without backups, the third would be one of these
        return (Way.AHEAD, Way.REST, Way.JUST_IN_TIME)

    def check_vocabulary(self, lookahead: int, vocab_size: int) -> None:
        """Refuse hand-written lists that ask for more bonus tokens than there are.

        Raises:
            ConfigError: F_k > V - 1 for k < K, where one token was sent, or F_K > V.
        """
        for name, counts in (
            ("fan_out", self.hit_list(lookahead)),
            ("fan_out_after_miss", self.miss_list(lookahead)),
        ):
            if counts and (max(counts[:-1]) >= vocab_size or counts[-1] > vocab_size):
                raise ConfigError(
                    f"{name} must be at most {vocab_size - 1} for k < K = {lookahead} and {vocab_size} for k = K, as "
                    f"the vocabulary has {vocab_size} tokens, got {list(counts)}."
                )


def _check_fan_out(name: str, value: FanOutOption) -> None:
    """What can be said without K."""
    counts = value if isinstance(value, tuple) else (value,)
    if value != AUTO and not all(type(count) is int for count in counts):
        raise ConfigError(f"{name} must be {AUTO}, a number, or a list of K + 1 numbers, got {value!r}.")
    if any(count < 0 for count in counts if isinstance(count, int)):
        raise ConfigError(f"{name} must have no entry below 0, got {value!r}.")


def _written(name: str, value: FanOutOption, lookahead: int) -> tuple[int, ...] | None:
    if isinstance(value, str):
        return None
    counts = (value,) * (lookahead + 1) if isinstance(value, int) else value
    if len(counts) != lookahead + 1:
        raise ConfigError(
            f"{name} must have lookahead + 1 = {lookahead + 1} entries, one for each k = 0..{lookahead}, "
            f"or be one number, got {len(counts)}."
        )
    if sum(counts) > MAX_OUTCOMES:
        raise ConfigError(
            f"{name} must prepare at most {MAX_OUTCOMES} outcomes per sequence, got {sum(counts)}: lower it."
        )
    return counts


def _check_number(
    name: str, value: float | str, least: float, most: float, *, whole: bool = False, otherwise: str | None = None
) -> None:
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not least <= float(value) <= most:
        choice = f", or {otherwise}" if otherwise else ""
        raise ConfigError(f"{name} must be {least} to {most}{choice}, got {value!r}.")
