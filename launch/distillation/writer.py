"""The target writes: many rows in step, each a sequence of documents one after the other.

A row feeds its documents' instructions token by token and then draws the answer, and begins the next document at once
when one ends.  So no row ever waits for another one, and every forward has the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import AttentionInterface, PreTrainedModel

from distillation.corpus import NUM_LIKELIEST, Corpus
from speculator_service.saguaro.sampling import draft_distribution, sample

_ATTENTION = "lockstep"
_TEMPERATURES = (0.3, 0.7, 1.0)
"""Of the documents, in turn."""
_GOES_ON = 0.15
"""Share of documents that are continued after their end, as benchmarks do that want answers of one length."""


class Prompt(NamedTuple):
    """What a document begins with."""

    tokens: Sequence[int]
    num_ends: int = 1
    """Ends of a message that the target writes before the document ends: 2 where it writes the user's, too."""


class Cache:
    """Keys and values of all rows by layer, and which of them the next token sees."""

    def __init__(self, model: PreTrainedModel, rows: int, length: int) -> None:
        config = model.config
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, length, config.head_dim)
        self.keys = torch.zeros(shape, dtype=model.dtype)
        self.values = torch.zeros(shape, dtype=model.dtype)
        self.at = 0
        self.mask = torch.zeros(rows, 1, 1, length, dtype=model.dtype)

    def look_from(self, starts: torch.Tensor) -> None:
        """The next token sees places [starts [rows], at]."""
        places = torch.arange(self.mask.shape[-1])
        self.mask = torch.where(places >= starts[:, None], 0.0, -torch.inf).to(self.keys.dtype)[:, None, None]


class Writer:
    """Draws texts from a Llama-like model of transformers on a CPU."""

    def __init__(self, model: PreTrainedModel, stop_token: int, rows: int, length: int, max_answer: int) -> None:
        """``length`` T of all rows; a document has at most ``max_answer`` drawn tokens."""
        self._model, self._stop, self._max_answer = model, stop_token, max_answer
        self._rows, self._length = rows, length
        self._cache = Cache(model, rows, length)
        AttentionInterface.register(_ATTENTION, self._attend)
        model.set_attn_implementation(_ATTENTION)

    @torch.inference_mode()
    def write(
        self, prompts: Iterator[Prompt], generator: np.random.Generator, advance: Callable[[int], None]
    ) -> Corpus:
        """Rows full of documents, each of which begins with the next of the ``prompts``."""
        n, length = self._rows, self._length
        corpus = _empty(n, length)
        documents = [_Document(next(prompts), 0, generator) for _ in range(n)]
        for at in range(length):
            tokens = np.array([document.next_token() for document in documents], np.int64)
            starts = np.array([document.start for document in documents], np.int64)
            likeliest, log_probs, drawn = self._step(tokens, starts, at, documents, generator)
            corpus.tokens[:, at], corpus.starts[:, at] = tokens, starts
            corpus.likeliest[:, at], corpus.log_probs[:, at] = likeliest, log_probs
            for row, document in enumerate(documents):
                corpus.is_written[row, at] = document.is_answering
                if document.is_answering and not document.take(int(drawn[row]), self._stop, self._max_answer):
                    documents[row] = _Document(next(prompts), at + 1, generator)
            advance(n)
        return corpus

    def _step(
        self,
        tokens: NDArray[np.int64],
        starts: NDArray[np.int64],
        at: int,
        documents: Sequence[_Document],
        generator: np.random.Generator,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
        self._cache.at = at
        self._cache.look_from(torch.from_numpy(starts))
        output = self._model(
            input_ids=torch.from_numpy(tokens)[:, None],
            position_ids=torch.from_numpy(at - starts)[:, None],
            use_cache=False,
        )
        logits = output.logits[:, 0].float()
        normaliser = logits.logsumexp(-1, keepdim=True)
        temperature = torch.tensor([document.temperature for document in documents])
        q = draft_distribution(logits, temperature, num_kept=NUM_LIKELIEST)
        ids = q.ids.to(torch.int64)
        drawn = sample(q, torch.from_numpy(generator.random(len(tokens))))
        return ids.numpy(), (logits.gather(1, ids) - normaliser).numpy(), drawn.numpy()

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **others: Any
    ) -> tuple[torch.Tensor, None]:
        """Attention of one new token per row. The query heads of a key head are its rows: nothing is repeated."""
        cache, layer = self._cache, module.layer_idx
        keys, values = cache.keys[layer], cache.values[layer]
        keys[:, :, cache.at], values[:, :, cache.at] = key[:, :, 0], value[:, :, 0]
        n, heads, _, size = query.shape
        end = cache.at + 1
        folded = query.reshape(n, keys.shape[1], -1, size)
        mixed = F.scaled_dot_product_attention(
            folded, keys[:, :, :end], values[:, :, :end], attn_mask=cache.mask[..., :end], scale=module.scaling
        )
        return mixed.reshape(n, 1, heads, size), None


class _Document:
    """A prompt that is fed, then an answer that is drawn."""

    def __init__(self, prompt: Prompt, start: int, generator: np.random.Generator) -> None:
        self.start = start
        self._ends_left = prompt.num_ends
        self.temperature = float(generator.choice(_TEMPERATURES))
        self._goes_on = generator.random() < _GOES_ON
        self._given = list(reversed(prompt.tokens))
        self._num_drawn = 0

    @property
    def is_answering(self) -> bool:
        """Whether the next token is to be drawn."""
        return not self._given

    def next_token(self) -> int:
        """To be fed now."""
        return self._given.pop()

    def take(self, token: int, stop: int, max_answer: int) -> bool:
        """Go on with a drawn token; False if the document ends with it."""
        self._num_drawn += 1
        self._given.append(token)
        self._ends_left -= token == stop
        return self._num_drawn < max_answer and (self._ends_left > 0 or self._goes_on)


def _empty(rows: int, length: int) -> Corpus:
    shape = (rows, length)
    return Corpus(
        np.empty(shape, np.int32),
        np.empty(shape, np.int32),
        np.empty(shape, np.bool_),
        np.empty((*shape, NUM_LIKELIEST), np.uint32),
        np.empty((*shape, NUM_LIKELIEST), np.float16),
    )
