"""Closed loop of speculator and verifier over tabular models, vectorised over many independent sequences.

Target and draft are Markov chains: what follows a token depends on that token. So the exact law of the first
tokens is known, and millions of sequences take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from speculator_service.saguaro.outcomes import top_candidates
from speculator_service.saguaro.rejection import Verified, verify_chain
from speculator_service.saguaro.sampling import SparseDistribution, draft_distribution, sample


@dataclass(frozen=True)
class Speculation:
    """What is sent to be verified; [n, ...]."""

    tokens: torch.Tensor
    """[n, K]."""
    num_sent: torch.Tensor
    """[n]."""
    sampled: torch.Tensor
    """[n] bool."""


@dataclass
class TabularLoop:
    """One experiment. ``run`` gives the first tokens of every sequence.

    Args:
        vocab_size: V.
        lookahead: K.
        fan_out: F_0..F_K.
        backup: what a miss is answered with: ``primary``, ``greedy`` (argmax of the draft), ``random``, ``stale``
            (the tokens sent before), ``short`` (primary, cut at random), ``empty``.
        downweight: C.
        num_kept: m.
        temperature, draft_temperature: of target and draft.
        ties: round the draft's logits, so that many are equal.
        greedy: the target at temperature 0.
    """

    vocab_size: int = 5
    lookahead: int = 3
    fan_out: tuple[int, ...] = (2, 1, 1, 2)
    backup: str = "primary"
    downweight: float = 1.0
    num_kept: int = 5
    temperature: float = 1.0
    draft_temperature: float = 1.0
    ties: bool = False
    greedy: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        shape = self.vocab_size, self.vocab_size
        target = torch.randn(shape, generator=generator)
        self.draft_logits = target + 0.7 * torch.randn(shape, generator=generator)
        if self.ties:
            self.draft_logits = self.draft_logits.round()
        self.target = (target.double() / self.temperature).softmax(-1)
        if self.greedy:
            self.target = torch.nn.functional.one_hot(target.argmax(-1), self.vocab_size).double()
        self._counts = torch.tensor(self.fan_out)
        self._candidates = torch.from_numpy(top_candidates(self.draft_logits, self.vocab_size))
        self._q = [self._draft(int(count)) for count in self._counts[:-1]]
        self._generator = torch.Generator().manual_seed(self.seed + 1)
        self.hit_rate = 0.0

    def law(self, length: int) -> np.ndarray:
        """[V^length] exact probability of each sequence of first tokens after token 0."""
        law = self.target[0]
        for _ in range(length - 1):
            last = torch.arange(len(law)) % self.vocab_size
            law = (law[:, None] * self.target[last]).flatten()
        return law.numpy()

    def run(self, count: int, length: int) -> torch.Tensor:
        """[count, length] the first tokens after token 0."""
        emitted = torch.zeros(count, length + self.lookahead + 1, dtype=torch.int64)
        last = torch.zeros(count, dtype=torch.int64)
        written = torch.zeros(count, dtype=torch.int64)
        speculation = self._first(count)
        hits = []
        while int(written.min()) < length:
            verified = self._verify(last, speculation)
            self._emit(emitted, written.clamp(max=length), speculation, verified)
            written += verified.num_accepted + 1
            hit = self._is_hit(last, speculation, verified)
            hits.append(float(hit.double().mean()))
            last = verified.bonus
            speculation = self._next(last, hit, speculation)
        self.hit_rate = float(np.mean(hits))
        return emitted[:, :length]

    def _uniforms(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator, dtype=torch.float64)

    def _draft(self, fan_out: int) -> SparseDistribution:
        """[V, m] what is sampled from after each token, at a position of this fan-out."""
        temperature = torch.full((self.vocab_size,), self.draft_temperature)
        return draft_distribution(
            self.draft_logits, temperature, num_kept=self.num_kept, fan_out=fan_out, downweight=self.downweight
        )

    def _sampled(self, last: torch.Tensor) -> torch.Tensor:
        """[n, K] tokens sampled from the draft."""
        tokens = []
        for q in self._q:
            last = sample(SparseDistribution(q.ids[last], q.probs[last]), self._uniforms(len(last)))
            tokens.append(last)
        return torch.stack(tokens, 1)

    def _contexts(self, last: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[n, K + 1] the token before each position."""
        return torch.cat([last[:, None], tokens], 1)

    def _verify(self, last: torch.Tensor, speculation: Speculation) -> Verified:
        contexts = self._contexts(last, speculation.tokens)
        ids = torch.stack([q.ids[contexts[:, i]] for i, q in enumerate(self._q)], 1)
        probs = torch.stack([q.probs[contexts[:, i]] for i, q in enumerate(self._q)], 1)
        return verify_chain(
            self.target[contexts],
            speculation.tokens,
            speculation.num_sent,
            self._uniforms(*speculation.tokens.shape),
            self._uniforms(len(last)),
            q=SparseDistribution(ids, probs),
            sampled=speculation.sampled,
        )

    def _emit(self, emitted: torch.Tensor, written: torch.Tensor, speculation: Speculation, verified: Verified) -> None:
        """Write the accepted tokens and the bonus token; later rounds write over what is behind the bonus token."""
        places = written[:, None] + torch.arange(self.lookahead + 1)
        tokens = torch.cat([speculation.tokens, verified.bonus[:, None]], 1)
        tokens.scatter_(1, verified.num_accepted[:, None], verified.bonus[:, None])
        emitted.scatter_(1, places, tokens)

    def _is_hit(self, last: torch.Tensor, speculation: Speculation, verified: Verified) -> torch.Tensor:
        """[n] whether (k, t*) was prepared: among the F_k first candidates without the token sent there."""
        k, bonus = verified
        rows = torch.arange(len(last))
        contexts = self._contexts(last, speculation.tokens)
        candidates = self._candidates[contexts[rows, k]]
        rank = (candidates == bonus[:, None]).int().argmax(1)
        rejected = k < speculation.num_sent
        sent = speculation.tokens[rows, k.clamp(max=self.lookahead - 1)]
        sent_rank = (candidates == sent[:, None]).int().argmax(1)
        rank = rank - (rejected & (sent_rank < rank)).long()
        return rank < self._counts[k]

    def _first(self, count: int) -> Speculation:
        return self._next(torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.bool), None)

    def _next(self, last: torch.Tensor, hit: torch.Tensor, before: Speculation | None) -> Speculation:
        """Hits get tokens sampled from the draft; misses what the backup makes."""
        count = len(last)
        tokens, full = self._sampled(last), torch.full((count,), self.lookahead)
        num_sent, sampled = full, torch.ones(count, dtype=torch.bool)
        if self.backup == "greedy":
            tokens, sampled = torch.where(hit[:, None], tokens, self._greedy(last)), hit
        elif self.backup == "random":
            noise = (self._uniforms(count, self.lookahead) * self.vocab_size).long()
            tokens, sampled = torch.where(hit[:, None], tokens, noise), hit
        elif self.backup == "stale" and before is not None:
            tokens, sampled = torch.where(hit[:, None], tokens, before.tokens), hit
        elif self.backup == "short":
            num_sent = torch.where(hit, full, (self._uniforms(count) * (self.lookahead + 1)).long())
        elif self.backup == "empty":
            num_sent = torch.where(hit, full, 0)
        return Speculation(tokens, num_sent, sampled)

    def _greedy(self, last: torch.Tensor) -> torch.Tensor:
        tokens = []
        for _ in range(self.lookahead):
            last = self._candidates[last, 0]
            tokens.append(last)
        return torch.stack(tokens, 1)
