"""Which runs each figure needs, and how large they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

FIGURES = ("fan-out", "temperature", "downweight", "backup")
"""Figures 3, 4, 5 and 6 of the paper."""
BACKUPS = ("primary", "suffix", "empty")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is varied between runs."""

    temperature: float
    backup: str = "primary"
    """Who answers a miss: ``primary`` (the draft, just in time), ``suffix`` or ``empty``."""
    rule: str = "ratio"
    """``ratio``: sampled drafts and the ratio rule. ``shared-noise``: draft and target each take the token with the
    largest log-probability plus Gumbel noise, the same noise for both; a draft token is accepted where both took it."""
    downweight: float = 1.0
    """C of sigma_{F,C}, by which the drafts of the ratio rule are sampled."""
    downweight_fan_out: int = 0
    """F of sigma_{F,C}."""


class DownweightCase(NamedTuple):
    """One curve of the down-weighting figure."""

    temperature: float
    fan_out: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes and grids of everything that is run."""

    lookahead: int = 4
    """K."""
    fan_out: int = 3
    """F of the runs and of the uniform allocation; the budget B is (K + 1) F."""
    num_prompts: int = 36
    num_rounds: int = 24
    """Rounds after each prompt."""
    seed: int = 0
    fan_out_temperatures: tuple[float, ...] = (0.0, 1.0)
    """Also of the backup figure."""
    temperatures: tuple[float, ...] = (0.0, 0.3, 0.6, 1.0, 1.3)
    downweights: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    """C; 1 must be among them."""
    downweight_cases: tuple[DownweightCase, ...] = (
        DownweightCase(1.0, 1),
        DownweightCase(1.0, 3),
        DownweightCase(1.0, 8),
        DownweightCase(0.6, 3),
    )
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    backup_fan_outs: tuple[int, ...] = (1, 3)
    """F of the backup figure's panels."""
    time_repeats: int = 15
    """Measurements of each step time; their median counts."""
    primary_time: float = 0.5
    """T_p of the speedups predicted beside hit rates."""
    backup_time: float = 0.5
    """T_b of the same."""

    @property
    def budget(self) -> int:
        """B."""
        return (self.lookahead + 1) * self.fan_out

    def quick(self) -> Plan:
        """The same in less than a minute: enough to see that it works, too little to read numbers off."""
        return replace(
            self,
            num_prompts=min(self.num_prompts, 8),
            num_rounds=min(self.num_rounds, 8),
            temperatures=(0.0, 1.0),
            downweights=(0.0, 0.5, 1.0),
            downweight_cases=(DownweightCase(1.0, 3),),
            batch_sizes=(1, 4),
            time_repeats=3,
        )


def settings_of(figure: str, plan: Plan) -> list[Setting]:
    """The runs that a figure is made of."""
    if figure in ("fan-out", "backup"):
        return [Setting(temperature, backup) for temperature in plan.fan_out_temperatures for backup in BACKUPS]
    if figure == "temperature":
        return [setting for temperature in plan.temperatures for setting in both_rules(temperature)]
    settings = []
    for case in plan.downweight_cases:
        settings += both_rules(case.temperature)
        settings += [downweighted(case, downweight) for downweight in plan.downweights]
    return settings


def all_settings(figures: Iterable[str], plan: Plan) -> list[Setting]:
    """The runs of several figures, each once."""
    return list(dict.fromkeys(setting for figure in figures for setting in settings_of(figure, plan)))


def both_rules(temperature: float) -> list[Setting]:
    """Ratio rule and shared noise, which are the same where nothing is random."""
    rules = ("ratio", "shared-noise") if temperature > 0 else ("ratio",)
    return [Setting(temperature, rule=rule) for rule in rules]


def downweighted(case: DownweightCase, downweight: float) -> Setting:
    """The run with this C; with C = 1 the one that has no down-weighting."""
    if downweight == 1:
        return Setting(case.temperature)
    return Setting(case.temperature, downweight=downweight, downweight_fan_out=case.fan_out)
