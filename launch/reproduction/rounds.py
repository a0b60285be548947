"""Speculation rounds of a real target and draft, run offline and counted.

Every round is the one of the algorithm: the draft proposes K tokens (or a backup does), the target verifies them with
one forward pass, and the outcome (k, t*) is looked for among the draft's candidates at position k, the token sent
there left out. Whether the last outcome was among the F first decides who proposes next. Nothing is timed here, and
nothing is approximated: logits, sampling, verification and candidates are those of the two models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from reproduction.pair import Start
from reproduction.plan import Setting
from speculator_service.backup.suffix import SuffixBackup
from speculator_service.saguaro.draws import inverse_cdf, seeded_uniforms
from speculator_service.saguaro.outcomes import bonus_rank, rank_candidates, top_candidates
from speculator_service.saguaro.rejection import verify_chain
from speculator_service.saguaro.sampling import SparseDistribution, draft_distribution, sample

NUM_RANKS = 64
"""Candidates looked at per position; a bonus token beyond them is a miss for every fan-out shown."""
PREPARED, BACKUP = 0, 1
"""Sources of a speculation: prepared before the outcome was known (a hit), or made by the backup (after a miss)."""

_DRAFT, _ACCEPT, _BONUS, _NOISE = range(4)
"""Streams of random numbers; draws for different purposes share none."""


class Rounds(NamedTuple):
    """Outcomes, one entry per sequence and round."""

    prompt: NDArray[np.int64]
    """[n] index of the prompt."""
    source: NDArray[np.int64]
    """[n] `PREPARED` or `BACKUP`."""
    num_accepted: NDArray[np.int64]
    """[n] k."""
    num_sent: NDArray[np.int64]
    """[n] tokens verified, k..K."""
    rank: NDArray[np.int64]
    """[n] place of the bonus token among the candidates at k, from 0; `NUM_RANKS` if it is none of them."""


def collect(
    start: Start,
    setting: Setting,
    *,
    lookahead: int,
    num_rounds: int,
    fan_out: int,
    seed: int,
    on_round: Callable[[], None],
) -> Rounds:
    """Run ``num_rounds`` rounds after every prompt, all prompts at once.

    Args:
        start: models and prompts, unchanged by the run.
        setting: see `Setting`.
        lookahead: K >= 1.
        num_rounds: at least 1.
        fan_out: candidates prepared at every position, which decides between hit and miss.
        seed: same seed, same text: noise depends on (seed, prompt, position) alone, whatever the setting.
        on_round: called after every round.

    Returns:
        number of prompts times ``num_rounds`` outcomes, rounds outermost.
    """
    batch = _Batch(start, setting, lookahead, seed)
    source = np.full(len(start.prompts), PREPARED)
    outcomes = []
    for _ in range(num_rounds):
        outcome = batch.round(source)
        outcomes.append(outcome)
        source = np.where(outcome.rank < fan_out, PREPARED, BACKUP)
        on_round()
    return Rounds(*(np.concatenate(column) for column in zip(*outcomes, strict=True)))


class _Batch:
    """The sequences of a run and the state between two rounds."""

    def __init__(self, start: Start, setting: Setting, lookahead: int, seed: int) -> None:
        prompts = start.prompts
        self._setting, self._lookahead = setting, lookahead
        self._seeds = seed * 1_000_003 + np.arange(len(prompts))
        self._lengths = np.array([len(prompt) for prompt in prompts])
        """[b] committed tokens."""
        self._temperature = torch.full((len(prompts),), setting.temperature)
        self._target, self._draft = start.target.fork(), start.draft.fork()
        self._bonus = self._first_tokens()
        self._suffixes = []
        if setting.backup == "suffix":
            self._suffixes = [SuffixBackup(prompt) for prompt in prompts]
            for suffix, token in zip(self._suffixes, self._bonus.tolist(), strict=True):
                suffix.append([token])

    def round(self, source: NDArray[np.int64]) -> Rounds:
        """Propose, verify, look the outcome up, commit.

        Args:
            source: [b] of the speculation that is verified now.
        """
        noise = self._shared_noise() if self._is_coupled else None
        proposed, num_sent = self._backup_proposals(source)
        tokens, draft_scores, q = self._speculate(proposed, noise)
        logits = self._target.extend(torch.cat([self._bonus[:, None], tokens], 1))
        if noise is None:
            accepted, bonus = self._verify(logits, tokens, num_sent, q, source)
        else:
            accepted, bonus = _verify_coupled(self._scores(logits, noise), tokens, num_sent)
        sent = np.where(np.arange(self._lookahead) < num_sent[:, None], tokens.numpy(), -1)
        rank = bonus_ranks(draft_scores, sent, accepted, bonus.numpy())
        self._commit(tokens, accepted, bonus)
        return Rounds(np.arange(len(source)), source, accepted, num_sent, rank)

    @property
    def _is_coupled(self) -> bool:
        """At temperature 0 there is no noise to share."""
        return self._setting.rule == "shared-noise" and self._setting.temperature > 0

    def _uniforms(self, offsets: NDArray[np.int64], stream: int) -> torch.Tensor:
        """[b, n] numbers for the tokens at these places after the committed ones."""
        positions = self._lengths[:, None] + offsets
        return torch.from_numpy(
            seeded_uniforms(np.broadcast_to(self._seeds[:, None], positions.shape), positions, stream)
        )

    def _first_tokens(self) -> torch.Tensor:
        """[b] the token after each prompt."""
        law = _law(self._target.prompt_logits, self._setting.temperature)
        first = inverse_cdf(law, self._uniforms(np.zeros(1, np.int64), _BONUS)[:, 0])
        self._lengths = self._lengths + 1
        return first

    def _backup_proposals(self, source: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens [b, K] of a backup that is not the draft (-1: none, the draft's own count), and num_sent [b]."""
        proposed = np.full((len(source), self._lookahead), -1, np.int64)
        num_sent = np.full(len(source), self._lookahead)
        if self._setting.backup == "primary":
            return proposed, num_sent
        num_sent[source == BACKUP] = 0
        if self._setting.backup == "suffix":
            for row in np.flatnonzero(source == BACKUP):
                continuation = self._suffixes[row].propose(self._lookahead)
                num_sent[row] = len(continuation)
                proposed[row, : len(continuation)] = continuation
        return proposed, num_sent

    def _speculate(
        self, proposed: NDArray[np.int64], noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, SparseDistribution]:
        """K draft tokens after the bonus token, replaced where a backup has proposed others.

        Returns:
            tokens [b, K], the scores [b, K + 1, V] by which candidates are ranked, and q [b, K, V].
        """
        setting, token = self._setting, self._bonus
        uniforms = self._uniforms(np.arange(self._lookahead), _DRAFT)
        tokens, scores, laws = [], [], []
        for depth in range(self._lookahead + 1):
            logits = self._draft.extend(token[:, None])[:, 0]
            scores.append(logits if noise is None else self._scores(logits, noise[:, depth]))
            if depth == self._lookahead:
                break
            if noise is None:
                law = draft_distribution(
                    logits,
                    self._temperature,
                    num_kept=logits.shape[-1],
                    fan_out=setting.downweight_fan_out,
                    downweight=setting.downweight,
                )
                laws.append(law)
                token = sample(law, uniforms[:, depth])
            else:
                token = scores[-1].argmax(-1)
            forced = torch.from_numpy(proposed[:, depth])
            token = torch.where(forced >= 0, forced, token)
            tokens.append(token)
        q = [torch.stack(column, 1) for column in zip(*laws, strict=True)] or [torch.empty(0), torch.empty(0)]
        return torch.stack(tokens, 1), torch.stack(scores, 1), SparseDistribution(*q)

    def _verify(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        num_sent: NDArray[np.int64],
        q: SparseDistribution,
        source: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], torch.Tensor]:
        """k [b] and t* [b]: ratio rule for the draft's proposals, target-only rule for the others."""
        by_draft = torch.from_numpy((source == PREPARED) | (self._setting.backup == "primary"))
        accept = self._uniforms(np.arange(self._lookahead), _ACCEPT)
        # One number a round, and no two rounds of a sequence begin at the same place.
        bonus = self._uniforms(np.zeros(1, np.int64), _BONUS)[:, 0]
        p = _law(logits, self._setting.temperature)
        verified = verify_chain(p, tokens, torch.from_numpy(num_sent), accept, bonus, q=q, sampled=by_draft)
        return verified.num_accepted.numpy(), verified.bonus

    def _shared_noise(self) -> torch.Tensor:
        """[b, K + 1, V] Gumbel noise of the next K + 1 places, the same in every round that looks at a place."""
        vocab_size = self._target.prompt_logits.shape[-1]
        places = self._lengths[:, None, None] + np.arange(self._lookahead + 1)[:, None]
        counters = places * vocab_size + np.arange(vocab_size)
        seeds = np.broadcast_to(self._seeds[:, None, None], counters.shape)
        uniforms = np.maximum(seeded_uniforms(seeds, counters, _NOISE), 2.0**-54)
        return torch.from_numpy(-np.log(-np.log(uniforms))).float()

    def _scores(self, logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Logits with noise: their largest is a sample of the softmax (Gumbel-max)."""
        return logits / self._setting.temperature + noise

    def _commit(self, tokens: torch.Tensor, accepted: NDArray[np.int64], bonus: torch.Tensor) -> None:
        self._target.keep(accepted + 1)
        self._draft.keep(accepted + 1)
        self._lengths = self._lengths + accepted + 1
        self._bonus = bonus
        for row, suffix in enumerate(self._suffixes):
            suffix.append([*tokens[row, : accepted[row]].tolist(), int(bonus[row])])


def bonus_ranks(
    scores: torch.Tensor, sent: NDArray[np.int64], num_accepted: NDArray[np.int64], bonus: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Place of each bonus token among the candidates of its position, from 0.

    Args:
        scores: [b, K + 1, V], by which the candidates of each position are ordered.
        sent: [b, K] tokens that were verified, -1: none; left out at their position.
        num_accepted: [b] k.
        bonus: [b] t*.

    Returns:
        [b] 0..`NUM_RANKS`; the last: not among the candidates looked at.
    """
    rows = np.arange(len(bonus))
    candidates = top_candidates(scores[rows, num_accepted], NUM_RANKS + 1)
    # Position K, where nothing is sent, as one more column.
    sent = np.pad(sent, ((0, 0), (0, 1)), constant_values=-1)[rows, num_accepted]
    no_stop_tokens = np.empty((len(rows), 0), np.int64)
    ranked = rank_candidates(candidates[:, None], sent[:, None], no_stop_tokens)[:, 0, :NUM_RANKS]
    rank, _ = bonus_rank(ranked, bonus)
    return np.where(rank >= 0, rank, NUM_RANKS)


def _law(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[..., V] probabilities; one-hot at temperature 0."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits / temperature).softmax(-1)


def _verify_coupled(
    scores: torch.Tensor, tokens: torch.Tensor, num_sent: NDArray[np.int64]
) -> tuple[NDArray[np.int64], torch.Tensor]:
    """k [b] and t* [b]: the target's own token at each place is the largest of its scores [b, K + 1, V]."""
    choice = scores.argmax(-1)
    is_sent = torch.arange(tokens.shape[1]) < torch.from_numpy(num_sent)[:, None]
    accepted = ((choice[:, :-1] == tokens) & is_sent).cumprod(1).sum(1)
    return accepted.numpy(), choice.gather(1, accepted[:, None])[:, 0]
