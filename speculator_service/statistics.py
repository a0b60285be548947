"""What the speculator counts. Written by the model thread, read by anybody: single numbers, never torn."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from speculator_service.rows import Settled
from speculator_service.saguaro.sources import BACKUPS, NUM_SOURCES


class OutcomeKind(StrEnum):
    """What an outcome met. All but the first two are misses, by cause."""

    HIT = "hit"
    """Prepared, and no further token is drafted: K of them, or as many as were planned."""
    SHORT_HIT = "short_hit"
    """Prepared, but cut short: the rest was drafted just in time."""
    NOT_STARTED = "not_started"
    """Predicted, but it came before the first token was there."""
    NOT_PREDICTED = "not_predicted"
    """Not among the outcomes that were predicted."""
    UNUSED = "unused"
    """The verifier had no speculation in time, though its tokens were right."""
    DIVERGED = "diverged"
    """The verifier accepted tokens that were not sent to it."""
    STOPPED = "stopped"
    """A stop token: nothing follows."""
    UNSERVED = "unserved"
    """The sequence waits for room, is still being prefilled, or is lost: an empty speculation."""
    RESTED = "rested"
    """Plain decoding is faster at the moment: an empty speculation."""


class StepKind(StrEnum):
    """What a model step was for."""

    PREFILL = "prefill"
    DRAFT = "draft"
    GLUE = "glue"
    """Tokens of chains that the draft model did not make, before their tables."""
    TABLE = "table"


@dataclass(slots=True)
class Statistics:
    """Totals since start."""

    lookahead: int
    opened: int = 0
    closed: int = 0
    tables: int = 0
    """Begun."""
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    prefill_tokens_shared: int = 0
    """Prompt tokens that were computed for another sequence."""
    invalid: int = 0
    """Records that made no sense: their sequences are lost."""
    stale: int = 0
    """Records of sequences that are not open."""
    channel_errors: int = 0
    """Verifiers given up because of what they sent."""
    outcomes: dict[OutcomeKind, int] = field(default_factory=lambda: dict.fromkeys(OutcomeKind, 0))
    steps: dict[StepKind, int] = field(default_factory=lambda: dict.fromkeys(StepKind, 0))
    step_seconds: dict[StepKind, float] = field(default_factory=lambda: dict.fromkeys(StepKind, 0.0))
    backups: dict[int, int] = field(default_factory=lambda: dict.fromkeys(BACKUPS.values(), 0))
    """Misses answered, by `Source` of the answer."""
    accepted: NDArray[np.int64] = field(init=False)
    """[K + 1] outcomes by number of accepted tokens; those with a stop token are left out."""
    accepted_hits: NDArray[np.int64] = field(init=False)
    """[K + 1] of these, hits (short or not)."""
    accepted_full_hits: NDArray[np.int64] = field(init=False)
    """[K + 1] of these, `OutcomeKind.HIT`."""
    verified: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_SOURCES, np.int64))
    """Rounds of sequences, by `Source` of the speculation that was verified."""
    verified_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_SOURCES, np.int64))
    """Tokens that they yielded, the bonus tokens included."""
    rounds: list[int] = field(default_factory=lambda: [0, 0])
    """Rounds of verifiers; these and the next two: some outcome of the batch was no `OutcomeKind.HIT`, all were."""
    answer_seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """From the batch of outcomes to its last answer."""
    verification_seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """From there to the next outcomes."""

    def __post_init__(self) -> None:
        self.accepted = np.zeros(self.lookahead + 1, np.int64)
        self.accepted_hits = np.zeros(self.lookahead + 1, np.int64)
        self.accepted_full_hits = np.zeros(self.lookahead + 1, np.int64)

    def count_outcomes(self, accepted: NDArray[np.int64], settled: Settled, complete: NDArray[np.bool_]) -> None:
        """Count outcomes [b] of served sequences; ``complete``: the speculation needed no further draft step."""
        hit, miss = settled.adopted, ~settled.adopted & ~settled.stopped
        other = miss & ~settled.kept & ~settled.diverged
        for kind, rows in (
            (OutcomeKind.HIT, hit & complete),
            (OutcomeKind.SHORT_HIT, hit & ~complete),
            (OutcomeKind.UNUSED, miss & settled.kept),
            (OutcomeKind.DIVERGED, miss & settled.diverged),
            (OutcomeKind.STOPPED, settled.stopped),
            (OutcomeKind.NOT_STARTED, other & settled.predicted),
            (OutcomeKind.NOT_PREDICTED, other & ~settled.predicted),
        ):
            self.outcomes[kind] += int(np.count_nonzero(rows))
        self.accepted += np.bincount(accepted[~settled.stopped], minlength=self.lookahead + 1)
        self.accepted_hits += np.bincount(accepted[hit], minlength=self.lookahead + 1)
        self.accepted_full_hits += np.bincount(accepted[hit & complete], minlength=self.lookahead + 1)

    def count_verified(self, source: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Count rounds [b] of sequences that verified speculations of these sources."""
        self.verified += np.bincount(source, minlength=NUM_SOURCES)
        self.verified_tokens += np.bincount(source, accepted + 1, NUM_SOURCES).astype(np.int64)

    def count_round(self, all_hit: bool, answer_seconds: float, verification_seconds: float) -> None:
        """Count a round of a verifier: the answer to a batch of outcomes, and the verification that followed."""
        self.rounds[all_hit] += 1
        self.answer_seconds[all_hit] += answer_seconds
        self.verification_seconds[all_hit] += verification_seconds

    def count_step(self, kind: StepKind, seconds: float) -> None:
        """Count a model step."""
        self.steps[kind] += 1
        self.step_seconds[kind] += seconds
