"""What a planner knows: counted outcomes and measured times."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculator_service.round_times import PLAIN, TABLE_ROWS, VERIFICATION, RoundTimes
from speculator_service.saguaro.depth import expected_tokens_by_depth
from speculator_service.saguaro.discounted import DiscountedMeans
from speculator_service.saguaro.estimates import OutcomeEstimates
from speculator_service.saguaro.sources import NUM_SOURCES, Source
from speculator_service.statistics import StepKind

_HALF_LIFE = 2000.0
_PRIOR_WEIGHT = 20.0
"""Outcomes that a prior weighs."""
_SUFFIX_PRIOR_WEIGHT = 50.0
"""The same for the suffix automaton's tokens: rounds in which it is given a chance."""
_SUFFIX_OPTIMISM = 0.5
"""Tokens that it is believed to yield before it was tried, as a share of the primary's."""
_LEAST_SECONDS = 1e-9
"""Keeps ratios finite, whatever a clock said."""
_SUFFIX_HALF_LIFE = 20_000.0
"""Outcomes of any source after which half of what is known of it is forgotten: then it gets another chance."""


class RelativeTimes(NamedTuple):
    """Times near a batch size."""

    verification: float
    """Seconds; the others are in units of it."""
    table_step: float
    draft_step: float


class Measurements:
    """Estimates by source, and times.

    Args:
        lookahead: K.
        max_fan_out: ranks counted.
        times: shared with the measurements of other kinds of outcomes.
    """

    def __init__(self, lookahead: int, max_fan_out: int, times: RoundTimes | None = None) -> None:
        self.lookahead = lookahead
        self.estimates = OutcomeEstimates(lookahead, max_fan_out, num_sources=NUM_SOURCES, half_life=_HALF_LIFE)
        self.times = RoundTimes() if times is None else times
        self._hits = DiscountedMeans(NUM_SOURCES, _HALF_LIFE)
        self._tokens = DiscountedMeans(NUM_SOURCES, _SUFFIX_HALF_LIFE, forget_together=True)

    def observe(
        self,
        source: NDArray[np.integer],
        num_accepted: NDArray[np.integer],
        num_sent: NDArray[np.integer],
        rank: NDArray[np.integer],
        num_known: NDArray[np.integer],
        hit: NDArray[np.bool_],
        has_table: NDArray[np.bool_],
    ) -> None:
        """Count outcomes [b]; see `Planner.observe`."""
        self.estimates.observe(source, num_accepted, num_sent, rank, num_known)
        self._hits.observe(source[has_table], hit[has_table])
        self._tokens.observe(source, num_accepted + 1.0)

    def hit_rate(self, source: int, prior: float) -> float:
        """Share of prepared outcomes after a speculation of the source; ``prior``: what the plan promises."""
        return min(max(self._hits.mean(source, prior, _PRIOR_WEIGHT), 0.0), 1.0)

    def change_lists(self, factor: NDArray[np.floating]) -> None:
        """From now on other lists are in use, which promise hit rates of ``factor`` [S] times the odds of those before.

        What was counted is taken for rates of so much better odds.
        """
        self._hits.scale_odds(factor)

    def tokens_by_depth(self, source: int) -> NDArray[np.float64]:
        """[K] E(D) of speculations of D = 1..K tokens by the draft model, `Source.HIT` or `Source.PRIMARY`.

        The model is the same, so hits say something of just-in-time speculations of which little is known.
        """
        tokens = expected_tokens_by_depth(self.estimates.acceptance_by_position(source))
        if source == Source.HIT:
            return tokens
        weight = self.estimates.num_outcomes(source)
        result: NDArray[np.float64] = (weight * tokens + _PRIOR_WEIGHT * self.tokens_by_depth(Source.HIT)) / (
            weight + _PRIOR_WEIGHT
        )
        return result

    def suffix_tokens(self) -> float:
        """E of the suffix automaton, rounds in which it found nothing included; hopeful until it was tried."""
        hope = 1 + _SUFFIX_OPTIMISM * (float(self.tokens_by_depth(Source.HIT)[-1]) - 1)
        return max(1.0, self._tokens.mean(Source.SUFFIX, hope, _SUFFIX_PRIOR_WEIGHT))

    def relative_verification(self, batch_size: int, width: float, widths: NDArray[np.floating]) -> NDArray[np.float64]:
        """[n] time of verifications of ``widths`` [n] drafts, in units of those of ``width``, which are measured.

        Along the line through these and a round without drafts. Ones where no such round was seen, and where it was not
        faster, as with CUDA graphs for K + 1 tokens.
        """
        full = self.times.median(VERIFICATION, batch_size)
        plain = self.times.median(PLAIN, batch_size)
        bucket = RoundTimes.bucket(batch_size)
        is_known = all(bucket in self.times.buckets(kind) for kind in (VERIFICATION, PLAIN))
        if not is_known or not full or not plain or plain >= full:
            return np.ones(len(widths))
        share = plain / full
        return np.asarray(share + (1 - share) * widths / width, np.float64)

    def relative_glue(self, batch_size: int) -> float:
        """Time of a step for what backups drafted without the model, in units of a verification; 0 while unknown."""
        glue, verification = (self.times.median(kind, batch_size) for kind in (StepKind.GLUE, VERIFICATION))
        return glue / max(verification, _LEAST_SECONDS) if glue and verification else 0.0

    def relative_times(self, batch_size: int, num_missed: int) -> RelativeTimes | None:
        """Times near a batch of which ``num_missed`` rows are drafted for; None until they are known.

        A step of one kind stands for the other until that was measured, too.
        """
        verification = self.times.median(VERIFICATION, batch_size)
        table = self.times.median(StepKind.TABLE, batch_size)
        draft = self.times.median(StepKind.DRAFT, num_missed)
        if not verification or (table is None and draft is None):
            return None
        verification = max(verification, _LEAST_SECONDS)
        table_step = table if table is not None else draft
        draft_step = draft if draft is not None else table
        assert table_step is not None
        assert draft_step is not None
        return RelativeTimes(verification, table_step / verification, draft_step / verification)

    def relative_table_step(self, batch_size: int, num_missed: int, num_rows: int) -> float:
        """Time of a step of tables that computes ``num_rows`` tokens, in units of those that were measured.

        Along the line through these and the steps of ``num_missed`` tokens just in time: with the number of tokens on
        a CPU, hardly on a GPU. 1 while too little is known.
        """
        table, rows = (self.times.median(kind, batch_size) for kind in (StepKind.TABLE, TABLE_ROWS))
        draft = self.times.median(StepKind.DRAFT, num_missed)
        if not table or rows is None or draft is None or rows <= num_missed:
            return 1.0
        share = max(0.0, 1 - draft / table)  # of the rows beyond num_missed
        return 1 + share * (num_rows - rows) / (rows - num_missed)
