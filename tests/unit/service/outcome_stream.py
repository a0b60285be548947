"""Outcomes drawn from a known law for whatever a planner plans, as a speculator would report them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from speculator_service.planner import Planner
from speculator_service.saguaro.allocation import expected_hit_rate
from speculator_service.saguaro.fan_out_lists import conditioned
from speculator_service.saguaro.sources import Source


@dataclass
class OutcomeStream:
    """A target that accepts token k + 1 with ``acceptance[k]``; the bonus token has rank j with ``ranks[k, j]``.

    ``acceptance`` is [K]. ``ranks`` is [K + 1, R], rows may sum to less than 1; row K: where nothing was rejected.
    """

    acceptance: NDArray[np.float64]
    ranks: NDArray[np.float64]
    seed: int = 0
    suffix_tokens: float = 0.0
    """Tokens that the suffix automaton sends; they are all accepted. Fractions: so often one more."""
    num_hits: int = 0
    generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = np.random.default_rng(self.seed)
        self.source: NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def lookahead(self) -> int:
        return len(self.acceptance)

    @property
    def curves(self) -> NDArray[np.float64]:
        """[K + 1, R + 1] true hit curves."""
        return np.concatenate([np.zeros((self.lookahead + 1, 1)), self.ranks.cumsum(1)], axis=1)

    def hit_rate(self, fan_out: tuple[int, ...]) -> float:
        """True hit rate of a list while K tokens are verified."""
        return expected_hit_rate(fan_out, *conditioned(self.acceptance, self.curves, self.lookahead))

    def run(self, planner: Planner, rounds: int, batch_size: int = 8, downweight: float = np.nan) -> None:
        """Rounds in which the planner is asked and told as a speculator does it."""
        if len(self.source) != batch_size:
            self.source = np.full(batch_size, Source.HIT)
        for _ in range(rounds):
            self.source = np.where(self._round(planner, downweight), Source.HIT, self._backup(planner, batch_size))
            if planner.is_due():
                planner.replan()

    def _backup(self, planner: Planner, batch_size: int) -> int:
        return planner.choose_backup(batch_size, num_missed=1)

    def _round(self, planner: Planner, downweight: float) -> NDArray[np.bool_]:
        plan, size, draw = planner.plan, len(self.source), self.generator.random
        by_suffix = self.suffix_tokens + draw(size)
        depths = (np.full(size, plan.depth), np.full(size, plan.jit_depth), by_suffix.astype(int), np.zeros(size, int))
        sent = np.choose(self.source, depths)
        accepted = np.logical_and.accumulate(draw((size, self.lookahead)) < self.acceptance, axis=1).sum(1)
        accepted = np.where(self.source == Source.SUFFIX, sent, np.minimum(accepted, sent))
        position = np.where(accepted < sent, accepted, self.lookahead)
        rank = (draw(size)[:, None] >= self.ranks.cumsum(1)[position]).sum(1)
        hit = rank < plan.counts[self.source, sent, accepted]
        known = np.full(size, plan.num_candidates - 1)  # of those kept, the token sent is left out
        rank = np.where(rank < known, rank, -1)
        planner.observe(self.source, accepted, sent, rank, known, np.full(size, downweight), hit)
        self.num_hits += int(hit.sum())
        return hit


def power_law_ranks(lookahead: int, constant: float, exponent: float, count: int = 64) -> NDArray[np.float64]:
    """[K + 1, count] for the miss law ``c F^-r``."""
    misses = np.append(1.0, constant * np.arange(1.0, count + 1) ** -exponent)
    return np.tile(-np.diff(misses), (lookahead + 1, 1))
