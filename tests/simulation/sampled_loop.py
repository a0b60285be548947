"""The real speculator in a closed loop with a verifier that samples, over tabular models: the law of the output shows.

Many sequences at once, each new one after the same prompt; what is looked at are their first tokens, whose law under
plain sampling is known exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from closed_loop import local_channels

from speculator_service.draft.tabular import TabularDraft
from speculator_service.planner import Planner, PlannerSettings
from speculator_service.saguaro.rejection import Verified, verify_chain
from speculator_service.saguaro.sampling import SparseDistribution
from speculator_service.sessions import Verifier
from speculator_service.speculator import Speculator
from ssd_proto.noise import shared_noise
from ssd_proto.records import ProposalKind, Sampling, outcome_dtype, unpack_probs
from ssd_proto.table import TableShape

VOCAB = 5
PROMPT = [0, 3, 1]


@dataclass
class SampledLoop:
    """One experiment.

    Args:
        sampling: of all sequences; their seeds differ.
        batch: sequences at once.
        drop_probability: how often a proposal is lost on its way.
        settings: of the planner.
    """

    sampling: Sampling = Sampling(1.0)  # noqa: RUF009 - immutable
    lookahead: int = 3
    batch: int = 32
    num_kept: int = VOCAB
    drop_probability: float = 0.0
    disagreement: float = 0.5
    settings: dict[str, Any] | None = None
    token_map: tuple[int, ...] | None = None
    seed: int = 0
    ignore_q: bool = False
    """A wrong verifier, for tests that must fail: takes sampled drafts by the ratio rule with q = p."""

    def __post_init__(self) -> None:
        options = {"fan_out": 1, "backup": "primary", "adapt_depth": False, "rest": False, **(self.settings or {})}
        planner = Planner(PlannerSettings(**options), self.lookahead, VOCAB)
        self.draft = TabularDraft(
            self.batch,
            planner.num_outcomes,
            self.lookahead,
            64,
            vocab_size=VOCAB,
            seed=self.seed,
            order=1,
            token_map=self.token_map,
        )
        other = TabularDraft(1, 0, 1, 1, vocab_size=VOCAB, seed=self.seed + 50, order=1)
        tokens = range(VOCAB)
        draft = torch.stack([self.draft.next_logits([token]) for token in tokens])
        logits = (draft + self.disagreement * torch.stack([other.next_logits([token]) for token in tokens])) / 2
        self.target = (logits.double() / self.sampling.temperature).softmax(-1)  # [V, V] after each token
        self.speculator = Speculator(self.draft, planner, num_kept=self.num_kept)
        shape = TableShape(self.batch, planner.num_outcomes, self.lookahead, self.num_kept, self.batch)
        ours, self.channel = local_channels(shape, 77)
        self.speculator.attach(Verifier(0, 77, "sampling", shape, ours))
        self.generator = torch.Generator().manual_seed(self.seed + 1)
        self.rng = np.random.default_rng(self.seed)
        self.kinds = dict.fromkeys(ProposalKind, 0)
        self.accepted = self.rounds = 0

    def law(self, length: int) -> np.ndarray:
        """[V^length] exact probability of each sequence of first tokens after the prompt."""
        law = self.target[PROMPT[-1]]
        for _ in range(length - 1):
            last = torch.arange(len(law)) % VOCAB
            law = (law[:, None] * self.target[last]).flatten()
        return law.numpy()

    def counts(self, num_sequences: int, length: int) -> np.ndarray:
        """[V^length] how often each sequence of first tokens was put out."""
        found = np.zeros(VOCAB**length, np.int64)
        for _ in range(-(-num_sequences // self.batch)):
            for text in self._batch(length):
                found[int("".join(str(token) for token in text[:length]), VOCAB)] += 1
        return found

    def _batch(self, length: int) -> list[list[int]]:
        slots = np.arange(self.batch)
        generation = int(self.rng.integers(1, 2**31))
        seeds = self.rng.integers(0, 2**63, self.batch)
        for slot in slots.tolist():
            self.channel.open_sequence(
                slot, generation, np.array(PROMPT), self.sampling._replace(seed=int(seeds[slot]))
            )
        while self.speculator.pending() or self.speculator.advance():  # the prompts are computed meanwhile
            self.speculator.poll()
        texts: list[list[int]] = [[] for _ in slots]
        records = np.zeros(self.batch, outcome_dtype(self.lookahead))
        records["slot"], records["generation"], records["round"] = slots, generation, -1
        q = np.zeros((self.batch, self.lookahead, self.num_kept), np.int64)
        while min(map(len, texts)) < length:
            for _ in range(int(self.rng.integers(0, 8))):
                self._drive()
            self._verify(records, texts, q, seeds)
            self.channel.post(records)
            proposals = self.channel.lookup(records)
            for _ in range(400):
                if (proposals.depth >= 0).all():
                    break
                self._drive()
                proposals = self.channel.wait(records, proposals, timeout=0.0)
            assert (proposals.depth >= 0).all()
            depth = np.where(self.rng.random(self.batch) < self.drop_probability, 0, proposals.depth)
            sent = np.arange(self.lookahead) < depth[:, None]
            padding = self.rng.integers(0, VOCAB, sent.shape)
            records["tokens"] = np.where(sent, proposals.tokens, padding)
            records["num_sent"], records["proposal"] = depth, np.where(depth, proposals.kind, ProposalKind.EMPTY)
            q = (
                np.zeros((*sent.shape, 1), np.int64)
                if proposals.q is None
                else np.where(sent[..., None], proposals.q, 0)
            )
            for kind in proposals.kind.tolist():
                self.kinds[ProposalKind(kind)] += 1
        for slot in slots.tolist():
            self.channel.close_sequence(slot, generation)
        return texts

    def _drive(self) -> None:
        self.speculator.poll()
        self.speculator.advance()

    def _verify(self, records: np.ndarray, texts: Sequence[list[int]], q: np.ndarray, seeds: np.ndarray) -> None:
        """Verify what the records propose and put the outcomes into them."""
        records["round"] += 1
        tokens = torch.from_numpy(records["tokens"].astype(np.int64))
        if records["round"][0] == 0:  # the prompt's own first token
            tokens = torch.zeros_like(tokens)
            verified = self._draw(records, texts, tokens, q, torch.zeros(self.batch, dtype=torch.int64), seeds)
        else:
            every = torch.full((self.batch,), self.lookahead)  # padding may be accepted like any token
            verified = self._draw(records, texts, tokens, q, every, seeds)
            self.rounds += self.batch
            self.accepted += int(verified.num_accepted.sum())
        records["num_accepted"], records["bonus"] = verified.num_accepted.numpy(), verified.bonus.numpy()
        for text, record in zip(texts, records, strict=True):
            text += [*record["tokens"][: record["num_accepted"]].tolist(), int(record["bonus"])]

    def _draw(
        self,
        records: np.ndarray,
        texts: Sequence[list[int]],
        tokens: torch.Tensor,
        q: np.ndarray,
        num_sent: torch.Tensor,
        seeds: np.ndarray,
    ) -> Verified:
        last = torch.tensor([[*PROMPT, *text][-1] for text in texts])
        before = torch.cat([last[:, None], tokens], 1)
        p = self.target[before]  # [b, K + 1, V]
        if self.sampling.shared_noise:
            return self._draw_coupled(p, texts, tokens, num_sent, seeds)
        ids, probs = unpack_probs(np.pad(q, ((0, 0), (0, 0), (0, 1))))  # also where nothing is ever sampled
        if self.ignore_q:
            probs = p[:, :-1].gather(-1, torch.from_numpy(ids).long()).float().numpy()
        of_token = (probs * (ids == tokens.numpy()[..., None])).sum(-1, keepdims=True)
        # Where a token was not sampled, q is the point mass at it: the target-only rule.
        ids = np.where(of_token > 0, ids, tokens.numpy()[..., None])
        probs = np.where(of_token > 0, probs, np.arange(ids.shape[-1]) == 0)
        uniforms = torch.rand(self.batch, self.lookahead + 1, generator=self.generator, dtype=torch.float64)
        sparse = SparseDistribution(torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(probs.astype(np.float32)))
        return verify_chain(p, tokens, num_sent, uniforms[:, :-1], uniforms[:, -1], q=sparse)

    def _draw_coupled(
        self,
        p: torch.Tensor,
        texts: Sequence[list[int]],
        tokens: torch.Tensor,
        num_sent: torch.Tensor,
        seeds: np.ndarray,
    ) -> Verified:
        """The token at each position is argmax(log p + noise); drafts are accepted while they equal it."""
        first = np.array([len(PROMPT) + len(text) for text in texts])
        positions = (first[:, None] + np.arange(self.lookahead + 1)).ravel()
        every = np.tile(np.arange(VOCAB), (len(positions), 1))
        noise = shared_noise(np.repeat(seeds, self.lookahead + 1), positions, every).reshape(p.shape)
        drawn = (p.log() + torch.from_numpy(noise)).argmax(-1)
        equal = (drawn[:, :-1] == tokens) & (torch.arange(self.lookahead) < num_sent[:, None])
        accepted = equal.long().cumprod(1).sum(1)
        return Verified(accepted, drawn.gather(1, accepted[:, None])[:, 0])
