"""Training steps, and what is measured on rows that were not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import AdamW, Muon, Optimizer

from distillation.corpus import Corpus
from distillation.muon import Muon32
from distillation.student import Student

_WARM_UP = 0.04
"""Share of the steps over which the learning rate rises."""
_LEAST_RATE = 0.03
"""Share of the learning rate that is left at the end."""


class Batch(NamedTuple):
    """Rows as the student wants them."""

    tokens: torch.Tensor
    """[b, T]"""
    starts: torch.Tensor
    """[b, T]"""
    wanted: torch.Tensor
    """[b, T] after which tokens the target wrote."""
    columns: torch.Tensor
    """[n, 64] of the likeliest tokens in the student's logits; 0 where they are not among them."""
    probs: torch.Tensor
    """[n, 64] of the target; 0 there."""
    first: torch.Tensor
    """[n] column of the likeliest token of all; -1 if the student cannot say it."""


class Score(NamedTuple):
    """Of predictions on held-out rows."""

    loss: float
    """Cross entropy, nats a token."""
    same_first: float
    """Share of positions at which both find the same token likeliest: greedy acceptance."""
    overlap: float
    """Mean sum of min(p, q): acceptance at temperature 1."""


class Batches:
    """Rows of a corpus for one student."""

    def __init__(self, corpus: Corpus, token_map: NDArray[np.int64], vocab_size: int) -> None:
        self._corpus = corpus
        self._column = np.full(vocab_size, -1, np.int64)
        self._column[token_map] = np.arange(len(token_map))

    def take(self, rows: NDArray[np.int64]) -> Batch:
        """These rows."""
        corpus = self._corpus
        wanted = corpus.is_written[rows]
        columns = self._column[corpus.likeliest[rows][wanted]]
        probs = np.exp(corpus.log_probs[rows][wanted].astype(np.float32))
        arrays = (
            corpus.tokens[rows].astype(np.int64),
            corpus.starts[rows].astype(np.int64),
            wanted,
            columns.clip(0),
            np.where(columns >= 0, probs, 0),
            columns[:, 0],
        )
        return Batch(*map(torch.from_numpy, arrays))

    def shuffled(self, size: int, generator: np.random.Generator) -> Iterator[Batch]:
        """Batches of ``size`` rows without end, every row once in each pass."""
        while True:
            order = generator.permutation(len(self._corpus))
            for begin in range(0, len(order) - size + 1, size):
                yield self.take(order[begin : begin + size])


def train(
    student: Student,
    batches: Iterator[Batch],
    num_steps: int,
    learning_rate: float,
    advance: Callable[[int, float], None],
) -> None:
    """Lower the cross entropy with the target's distributions; ``advance`` gets the step and its loss."""
    optimizers = _optimizers(student, learning_rate)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    student.train()
    for step in range(num_steps):
        factor = rate_factor(step, num_steps)
        for optimizer, of_groups in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, of_groups, strict=True):
                group["lr"] = rate * factor
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
            logits = student(batch.tokens, batch.starts, batch.wanted)
        loss = _cross_entropy(logits.float().log_softmax(-1), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([weight for _, weight in student.learned()], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        advance(step + 1, loss.item())


@torch.no_grad()
def score(student: Student, batches: Batches, num_rows: int, size: int) -> Score:
    """Mean over the first ``num_rows`` rows, ``size`` at a time."""
    student.eval()
    sums, count = np.zeros(3), 0
    for begin in range(0, num_rows, size):
        batch = batches.take(np.arange(begin, min(begin + size, num_rows)))
        log_q = student(batch.tokens, batch.starts, batch.wanted).log_softmax(-1)
        of_likeliest = log_q.gather(1, batch.columns).exp()
        same = (log_q.argmax(-1) == batch.first).sum()
        overlap = torch.minimum(of_likeliest, batch.probs).sum()
        sums += np.array([_cross_entropy(log_q, batch).item() * len(log_q), same.item(), overlap.item()])
        count += len(log_q)
    student.train()
    return Score(*(sums / max(count, 1)).tolist())


def has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16, with which products take a quarter of the time."""
    return torch.cpu._is_avx512_bf16_supported()


def rate_factor(step: int, num_steps: int) -> float:
    """Up within the first steps, then down along a cosine.

    >>> [round(rate_factor(step, 100), 2) for step in (0, 3, 4, 52, 99)]
    [0.25, 1.0, 1.0, 0.51, 0.03]
    """
    warm_up = max(1, round(_WARM_UP * num_steps))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, num_steps - warm_up)
    return _LEAST_RATE + (1 - _LEAST_RATE) * (1 + math.cos(math.pi * progress)) / 2


def _cross_entropy(log_q: torch.Tensor, batch: Batch) -> torch.Tensor:
    return -(batch.probs * log_q.gather(1, batch.columns)).sum(-1).mean()


def _optimizers(student: Student, learning_rate: float) -> list[Optimizer]:
    """Muon for matrices, AdamW for the norms."""
    weights = [weight for _, weight in student.learned()]
    matrices, vectors = [w for w in weights if w.dim() == 2], [w for w in weights if w.dim() != 2]
    muon: Optimizer
    if has_bfloat16():
        muon = Muon(matrices, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    else:
        muon = Muon32(matrices, lr=learning_rate, weight_decay=0.01)
    return [muon, AdamW(vectors, lr=learning_rate, weight_decay=0.0)]
