"""The pair that chats: SmolLM2-135M-Instruct, and a draft made of a few of its layers (`launch/distill`).

The repository holds what differs from the target: the draft's layers, and the tokens that it may propose. Embedding,
output layer and tokenizer are the target's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from chat.cache import made_once
from chat.smollm2 import NAME, target_checkpoint
from ssd_proto.errors import ConfigError

WEIGHTS = Path(__file__).resolve().parent / "draft.safetensors"
TOKEN_MAP = "token_map.pt"
_TOKENS = "token_map"
_EMBEDDING = "model.embed_tokens.weight"
_NEEDED_BYTES = 200_000_000


class Pair(NamedTuple):
    """Two models for the server."""

    target: str
    """Model path."""
    draft: str
    """Model path."""
    token_map: str | None
    """Tokens that the draft may propose, for ``--speculative-token-map``; None: all."""


def chat_pair(say: Callable[[str], None]) -> Pair:
    """Both checkpoints, made now where there are none.

    Raises:
        ConfigError: one cannot be made; says what to change.
    """
    target = target_checkpoint(say)
    draft = draft_checkpoint(target, WEIGHTS)
    return Pair(str(target), str(draft), str(draft / TOKEN_MAP))


def draft_checkpoint(target: Path, weights: Path) -> Path:
    """Folder of the draft with these ``weights``, as `launch/distill train` writes them.

    Raises:
        ConfigError: the weights cannot be read, or are not of a draft of this target.
    """
    try:
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise ConfigError(
            f"The draft's weights {weights} cannot be read ({error.strerror}): get them again."
        ) from error
    return made_once(f"{NAME}-draft-{digest}", _NEEDED_BYTES, lambda folder: _assemble(target, weights, folder))


def _assemble(target: Path, weights: Path, folder: Path) -> None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file, safe_open, save_file

    from chat.packing import unpacked

    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    try:
        learned = unpacked(load_file(weights))
    except (SafetensorError, KeyError) as error:
        raise ConfigError(f"The draft's weights {weights} are damaged ({error}): get the file again.") from error
    layers = {int(name.split(".")[2]) for name in learned if name.startswith("model.layers.")}
    norm = learned.get("model.norm.weight")
    if not layers or _TOKENS not in learned or norm is None or norm.shape[0] != config["hidden_size"]:
        raise ConfigError(f"The weights {weights} are not of a draft for {target.name}: launch/distill makes some.")
    tokens = learned.pop(_TOKENS).tolist()
    with safe_open(target / "model.safetensors", "pt") as whole:
        learned[_EMBEDDING] = whole.get_tensor(_EMBEDDING)
    learned = {name: weight.to(torch.bfloat16) for name, weight in learned.items()}
    save_file(learned, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": len(layers)}, indent=1))
    torch.save(tokens, folder / TOKEN_MAP)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (target / name).is_file():
            shutil.copyfile(target / name, folder / name)
