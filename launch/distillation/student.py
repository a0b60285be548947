"""The draft that learns: some layers of the target between its embedding and a part of its output layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from chat.packing import packed, unpacked
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from distillation.corpus import Corpus
from ssd_proto.errors import ConfigError

TOKEN_MAP = "token_map"
"""Name of the tokens of the output layer among the weights."""


class Student(nn.Module):
    """Logits over the tokens of a token map. Embedding and output layer are the target's and do not change."""

    def __init__(self, target: PreTrainedModel, layers: Sequence[int], token_map: NDArray[np.int64]) -> None:
        """``layers``: of the target, what the student's layers begin as; ``token_map`` [V']: what it may say."""
        super().__init__()
        config = copy.deepcopy(target.config)
        config.num_hidden_layers = len(layers)
        self.model = type(target.model)(config).float()
        self.model.set_attn_implementation("sdpa")
        self.model.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
        self.model.embed_tokens.requires_grad_(False)
        for mine, theirs in zip(self.model.layers, layers, strict=True):
            mine.load_state_dict(target.model.layers[theirs].state_dict())
        self.model.norm.load_state_dict(target.model.norm.state_dict())
        self.token_map = torch.from_numpy(token_map)
        self.head = target.get_output_embeddings().weight.detach()[self.token_map].float()

    @classmethod
    def read(cls, target: PreTrainedModel, path: Path) -> Self:
        """The student that `save` wrote.

        Raises:
            ConfigError: the file cannot be read, or is not of this target's student.
        """
        try:
            weights = unpacked(load_file(path))
            token_map = weights.pop(TOKEN_MAP).to(torch.int64).numpy()
            num_layers = len({name.split(".")[2] for name in weights if name.startswith("model.layers.")})
            student = cls(target, range(num_layers), token_map)
            student.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"The weights {path} cannot be gone on from ({reason}): leave out --resume.") from error
        return student

    def forward(self, tokens: torch.Tensor, starts: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Logits [n, V'] after the n wanted tokens of rows [b, T] of documents that begin at ``starts`` [b, T]."""
        places = torch.arange(tokens.shape[1])
        is_seen = (places <= places[:, None]) & (places >= starts[..., None])
        mask = torch.where(is_seen, 0.0, -torch.inf)[:, None]
        output = self.model(input_ids=tokens, attention_mask=mask, position_ids=places - starts, use_cache=False)
        logits: torch.Tensor = output.last_hidden_state[wanted] @ self.head.t()
        return logits

    def learned(self) -> list[tuple[str, nn.Parameter]]:
        """What changes."""
        return [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]

    def save(self, path: Path, about: dict[str, str]) -> None:
        """What differs from the target: the token map, and layers and norm, packed and named as in a checkpoint."""
        weights = packed({f"model.{name}": weight.detach() for name, weight in self.learned()})
        weights[TOKEN_MAP] = self.token_map.to(torch.int32)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        save_file(weights, unfinished, metadata=about)
        unfinished.rename(path)


def choose_tokens(corpus: Corpus, vocab_size: int, always: Sequence[int], count: int) -> NDArray[np.int64]:
    """The ``count`` tokens that got most of the target's probability in answers, ``always`` included, ascending."""
    weight = np.zeros(vocab_size)
    likeliest = corpus.likeliest[corpus.is_written]
    probs = np.exp(corpus.log_probs[corpus.is_written], dtype=np.float32)
    np.add.at(weight, likeliest, probs)
    weight[list(always)] = np.inf
    return np.sort(np.argsort(-weight, kind="stable")[:count])
