"""Does sampled text follow the target's law? Every token of every text tells, whatever the filters.

The target and the draft, run by Hugging Face over the finished texts, give p and q before every token. Given all
tokens before it, a token's place between 0 and 1 in the cumulated p (drawn within the token's own interval) is uniform
(Rosenblatt, 1952), and a score of tokens has the mean and the variance that p gives it. So n texts of L tokens make n L
comparisons with the exact law, and no text has to be drawn twice.

A verification that is biased lets the draft's opinion into the text, or keeps it out too well. So tokens are cumulated
by p/q, and scored by what the draft thinks of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.statistical.chi_square import chi_square_deviation
from tests.support.sglang_server import DRAFT, TARGET

LIMIT = 4.5
"""Standard deviations. Servers draw other numbers in every run: one comparison in 150 000 lies beyond."""

_PROMPTS = Path(__file__).with_name("prompts.json")
_CHUNK = 32
_MOST_IMPOSSIBLE = 1e-3
"""Share of tokens that rounding may bring over the edge of a filter."""
_PREPARED, _KEPT = 3, 32
"""The defaults of ``--fan-out`` and ``--num-kept``."""
_CELLS = 32
_LEAST = 1e-12


class Filtering(NamedTuple):
    """Sampling parameters of a request; the defaults are SGLang's."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """[..., V] float64, what is drawn from where a model gives ``logits`` [..., V]."""
        by_rank, ids = (logits.double() / self.temperature).softmax(-1).sort(dim=-1, descending=True)
        keep = (by_rank.cumsum(-1) - by_rank <= self.top_p) & (by_rank >= self.min_p * by_rank[..., :1])
        if self.top_k > 0:
            keep[..., self.top_k :] = False
        kept = torch.zeros_like(by_rank).scatter_(-1, ids, torch.where(keep, by_rank, 0.0))
        return kept / kept.sum(-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Texts beside the target's law."""

    uniforms: np.ndarray
    """[n, L] in [0, 1), independent and uniform if the texts follow the law."""
    scores: Mapping[str, float]
    """Sums over all tokens, in standard deviations from their means under the law."""
    num_impossible: int
    """Tokens that the filters exclude."""
    overlap: float
    """Mean of sum min(p, q): the share of drafts that the ratio rule accepts."""
    coincidence: float
    """Mean of sum p q: the share of sampled drafts that are accepted if q is not known."""

    @property
    def deviations(self) -> dict[str, float]:
        """Standard deviations from the law by several measures, all about standard normal if it holds."""
        cells = (_CELLS * self.uniforms).astype(int)
        quarters = (4 * self.uniforms[:, self.uniforms.shape[1] % 3 :]).astype(int).reshape(-1, 3)
        return {
            "all tokens": _chi_square(cells, _CELLS),
            "the first six tokens": _chi_square(cells[:, :6], _CELLS),
            "runs of three tokens": _chi_square(quarters @ [16, 4, 1], 64),
            **self.scores,
        }

    @property
    def deviation(self) -> float:
        """The largest of `deviations`; infinite if tokens are impossible that rounding does not explain."""
        if self.num_impossible > _MOST_IMPOSSIBLE * self.uniforms.size:
            return math.inf
        return max(map(abs, self.deviations.values()))


def openings(count: int, length: int = 12) -> list[list[int]]:
    """First tokens of the test prompts, in turn: [count, length]."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    ids = [tokenizer(text)["input_ids"][:length] for text in json.loads(_PROMPTS.read_text())]
    return [ids[index % len(ids)] for index in range(count)]


class TinyPair:
    """The tiny target and draft, run by Hugging Face in float32."""

    def __init__(self) -> None:
        self.target, self.draft = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (TARGET, DRAFT)
        )

    def compare(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        filtering: Filtering,
        downweight: float = 1.0,
    ) -> Comparison:
        """Compare n ``texts`` of equal length that were drawn after ``prompts``, n of equal length too.

        ``downweight``: C of the draft's q.
        """
        generator = torch.Generator().manual_seed(0)
        places, impossible, sums = [], 0, _Sums()
        overlap = coincidence = 0.0
        for first in range(0, len(texts), _CHUNK):
            tokens = torch.tensor(texts[first : first + _CHUNK])
            target, draft = self._logits(torch.tensor(prompts[first : first + _CHUNK]), tokens)
            prepared = torch.zeros_like(draft).scatter_(-1, draft.topk(_PREPARED).indices, 1.0)
            p, q = filtering.probs(target), _as_sent(filtering.probs(draft), prepared, downweight)
            overlap += float(torch.minimum(p, q).sum())
            coincidence += float((p * q).sum())
            places.append(_places(p, q, tokens, torch.rand(tokens.shape, generator=generator, dtype=torch.float64)))
            impossible += int((_of(p, tokens) == 0).sum())
            sums.add("tokens that the draft favours", (q - p) / (q + p + _LEAST), p, tokens)
            sums.add("tokens that the draft ranks first", prepared, p, tokens)
            sums.add("likely tokens", p.clamp_min(_LEAST).log(), p, tokens)
        uniforms = torch.cat(places).numpy()
        overlap, coincidence = overlap / uniforms.size, coincidence / uniforms.size
        return Comparison(uniforms, sums.deviations(), impossible, overlap, coincidence)

    @torch.inference_mode()
    def _logits(self, prompts: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, L, V] of target and draft, before each of ``tokens`` [n, L]."""
        sequences, keep = torch.cat([prompts, tokens], 1), tokens.shape[1] + 1
        target, draft = (
            model(sequences, use_cache=False, logits_to_keep=keep).logits[:, :-1] for model in (self.target, self.draft)
        )
        return target, draft


class _Sums:
    """Sums of scores of drawn tokens, and their means and variances under p."""

    def __init__(self) -> None:
        self._excess: dict[str, float] = {}
        self._variance: dict[str, float] = {}

    def add(self, name: str, scores: torch.Tensor, p: torch.Tensor, tokens: torch.Tensor) -> None:
        """Score ``tokens`` [n, L], drawn from p [n, L, V], with ``scores`` [n, L, V]."""
        mean = (p * scores).sum(-1)
        variance = (p * scores.square()).sum(-1) - mean.square()
        self._excess[name] = self._excess.get(name, 0.0) + float((_of(scores, tokens) - mean).sum())
        self._variance[name] = self._variance.get(name, 0.0) + float(variance.sum())

    def deviations(self) -> dict[str, float]:
        """What each sum lies above its mean, in standard deviations."""
        return {name: excess / math.sqrt(self._variance[name]) for name, excess in self._excess.items()}


def _as_sent(q: torch.Tensor, prepared: torch.Tensor, downweight: float) -> torch.Tensor:
    """What the speculator samples from: ``q`` [..., V] cut to the most likely tokens, C for the ``prepared`` ones."""
    kept = torch.zeros_like(q).scatter_(-1, q.topk(_KEPT).indices, 1.0) * q
    lowered = kept * torch.where(prepared > 0, downweight, 1.0)
    lowered = torch.where(lowered.sum(-1, keepdim=True) > 0, lowered, kept)
    return lowered / lowered.sum(-1, keepdim=True)


def _places(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
    """[n, L] places of ``tokens`` in p cumulated by falling p/q, ``within`` their intervals."""
    order = (p / (q + _LEAST)).argsort(-1, descending=True)
    ends = p.gather(-1, order).cumsum(-1)
    at = (order == tokens[..., None]).long().argmax(-1)
    return (_of(ends, at) - _of(p, tokens) * within).clamp(0, 1 - _LEAST)


def _of(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, tokens[..., None]).squeeze(-1)


def _chi_square(cells: np.ndarray, count: int) -> float:
    return chi_square_deviation(np.bincount(cells.ravel(), minlength=count), np.full(count, 1 / count))
