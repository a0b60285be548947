"""Target and draft under Hugging Face transformers, with KV caches that forget rejected tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from ssd_proto.errors import ConfigError


class Pair(NamedTuple):
    """Two models of one vocabulary in float32 on the CPU."""

    target: Any
    draft: Any
    tokenizer: Any


def load_pair(target: str, draft: str) -> Pair:
    """Load both models and the target's tokenizer.

    Raises:
        ConfigError: a model cannot be loaded, or the vocabularies have different sizes.
    """
    pair = Pair(_load(target), _load(draft), AutoTokenizer.from_pretrained(target))
    sizes = [model.config.vocab_size for model in (pair.target, pair.draft)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{target} has {sizes[0]} tokens in its vocabulary and {draft} {sizes[1]}: name a draft of its family."
        )
    return pair


class Start(NamedTuple):
    """Where every run begins: both models have computed the prompts."""

    prompts: list[list[int]]
    target: CachedModel
    draft: CachedModel


def prefill(pair: Pair, prompts: Sequence[Sequence[int]]) -> Start:
    """Compute the prompts (token ids) with both models."""
    return Start(
        [list(prompt) for prompt in prompts], CachedModel(pair.target, prompts), CachedModel(pair.draft, prompts)
    )


def _load(path: str) -> Any:
    if Path(path).is_absolute() and not Path(path, "config.json").is_file():
        raise ConfigError(f"There is no model in {path}: name a folder with a config.json.")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ConfigError(f"The model {path} cannot be loaded: {str(error).splitlines()[0]}") from error
    return model.eval()


class CachedModel:
    """A model and the KV cache of b sequences of different lengths, their prompts computed.

    Every call appends one column of cells per token for all sequences. Cells of rejected tokens stay where they are and
    are masked, so that nothing is moved; positions are counted over the others.

    Args:
        model: causal language model.
        prompts: token ids of b prompts, at least one each.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._mask = torch.empty(len(prompts), 0, dtype=torch.long)
        """[b, cells] 1: the cell holds a token of the sequence."""
        length = max(map(len, prompts))
        tokens = torch.zeros(len(prompts), length, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, length - len(prompt) :] = torch.tensor(prompt)
            mask[row, length - len(prompt) :] = 1
        self.prompt_logits = self._forward(tokens, mask, logits_to_keep=1)[:, -1]
        """[b, V] after each prompt."""
        self._num_kept = length
        """Columns that are decided on; those after it are of the current round."""

    def fork(self) -> CachedModel:
        """An independent copy of the sequences; the model is shared."""
        other = copy.copy(self)
        other._cache = copy.deepcopy(self._cache)
        return other

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute n more tokens [b, n] of every sequence; returns the logits [b, n, V] after each."""
        return self._forward(tokens, torch.ones_like(tokens), logits_to_keep=0)

    def keep(self, counts: NDArray[np.int64]) -> None:
        """End a round: of the tokens since the last call the first ``counts`` [b] are kept, the others forgotten."""
        columns = torch.arange(self._mask.shape[1] - self._num_kept)
        kept = (columns < torch.from_numpy(counts)[:, None]).long()
        self._mask = torch.cat([self._mask[:, : self._num_kept], kept], 1)
        self._num_kept = self._mask.shape[1]

    def drop(self) -> None:
        """Take the current round's tokens back, their cells too."""
        self._cache.crop(self._num_kept - self._mask.shape[1])  # a negative count: so many cells from the end
        self._mask = self._mask[:, : self._num_kept]

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor, mask: torch.Tensor, logits_to_keep: int) -> torch.Tensor:
        self._mask = torch.cat([self._mask, mask], 1)
        positions = (self._mask.cumsum(1)[:, -tokens.shape[1] :] - 1).clamp(min=0)
        output = self._model(
            tokens,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        logits: torch.Tensor = output.logits
        return logits
