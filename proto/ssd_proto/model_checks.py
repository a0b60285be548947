"""What can be said about a model from its ``config.json``, before SGLang is imported or a weight is read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ssd_proto.errors import ConfigError

# A branch shares its trunk's KV cells. State that is kept per request instead (SSM, linear attention, convolutions)
# could not be shared, and could not be taken back to an earlier position.
_STATE_MARKS = (
    "mamba",
    "ssm",
    "rwkv",
    "linear",
    "recurrent",
    "griffin",
    "jamba",
    "zamba",
    "bamba",
    "hybrid",
    "retnet",
    "hyena",
    "falconh1",
    "nemotronh",
    "qwen3next",
    "qwen35",
    "lfm2",
    "deltanet",
    "gla",
)
_STATE_KEYS = (
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_cfg",
    "state_size",
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_key_heads",
    "full_attention_interval",
    "attn_type_list",
    "conv_L_cache",
)
_HEAD_MARKS = ("eagle", "mtp", "nextn", "medusa", "hydra", "dflash")
_HEAD_KEYS = (
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
    "draft_vocab_size",
    "medusa_num_heads",
    "dflash_config",
)
_CONTEXT_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
    "n_positions",
)
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# What the attention for CPU in this package does not compute. On CUDA SGLang's own backends do.
_CPU_KEYS = {
    "attn_logit_softcapping": "soft-capped attention scores",
    "kv_lora_rank": "multi-head latent attention",
    "alibi": "ALiBi",
    "attention_chunk_size": "chunked local attention",
}
_CPU_MODEL_TYPES = {
    "gpt_oss": "attention sinks",
    "llama4": "chunked local attention",
    "llama4_text": "chunked attention",
}


def read_model_config(model_path: str, revision: str | None = None) -> dict[str, Any]:
    """``config.json`` of a model directory or of a model on the Hugging Face hub.

    Raises:
        ConfigError: there is no such model, or its ``config.json`` cannot be read.
    """
    path = Path(model_path).expanduser()
    if path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise ConfigError(f"The model directory {model_path!r} has no config.json; give a complete model.")
        if not any(entry.suffix in _WEIGHT_SUFFIXES for entry in path.iterdir()):
            raise ConfigError(f"The model directory {model_path!r} has no weights; give a complete model.")
    elif path.exists() or not _is_hub_name(model_path):
        raise ConfigError(f"The model path {model_path!r} is not a directory; give one that holds a model.")
    else:
        file = _from_hub(model_path, revision)
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"The model's config.json cannot be read ({error}); give a complete model.") from error
    if not isinstance(config, dict):
        raise ConfigError("The model's config.json does not hold an object; give a complete model.")
    return config


def check_model_config(config: Mapping[str, Any], *, device: str) -> None:
    """Refuse models that cannot be a draft model here, by their ``config.json``.

    Raises:
        ConfigError: with one sentence that says which kind of model to use instead.
    """
    text = _text_config(config)
    architectures = [str(a) for a in config.get("architectures") or []]
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    names = [_plain(name) for name in (*architectures, model_type)]
    called = (architectures or [model_type or "the model"])[0]
    if any(mark in name for mark in _HEAD_MARKS for name in names) or _has(text, _HEAD_KEYS):
        raise ConfigError(
            f"{called} is a draft head that needs the target's hidden states (EAGLE, MTP, Medusa); "
            "give a complete language model as the draft model."
        )
    layer_types = [_plain(str(kind)) for kind in text.get("layer_types") or text.get("layers_block_type") or []]
    stateful = any(mark in name for mark in _STATE_MARKS for name in (*names, *layer_types))
    if stateful or "conv" in layer_types or _has(text, _STATE_KEYS):
        raise ConfigError(
            f"{called} keeps per-sequence state outside the KV cache (Mamba, linear attention or a hybrid), which "
            "branches cannot share; give a draft model with attention layers only."
        )
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"{called} is an encoder-decoder model; give a decoder-only draft model.")
    if device == "cpu":
        _check_cpu(called, model_type, text)


def check_context_length(config: Mapping[str, Any], context_length: int | None) -> int:
    """The context length to use: the given one, or the model's own.

    Raises:
        ConfigError: it is not positive or longer than the model allows.
    """
    limit = model_context_length(config)
    if context_length is None:
        return limit
    if not 2 <= context_length <= limit:
        raise ConfigError(
            f"The context length is {context_length}, the draft model allows 2 to {limit}; "
            "choose one in this range or another draft model."
        )
    return context_length


def model_vocab_size(config: Mapping[str, Any]) -> int:
    """V.

    Raises:
        ConfigError: the configuration does not say.
    """
    vocab_size = _text_config(config).get("vocab_size") or config.get("vocab_size")
    if not isinstance(vocab_size, int):
        called = (config.get("architectures") or [config.get("model_type") or "The model"])[0]
        raise ConfigError(f"{called} states no vocab_size in its config.json; give a language model.")
    return vocab_size


def model_context_length(config: Mapping[str, Any]) -> int:
    """Positions that the model was made for, by the same rule as SGLang."""
    text = _text_config(config)
    scaling = text.get("rope_scaling") or {}
    factor = float(scaling.get("factor") or 1)
    kind = scaling.get("rope_type") or scaling.get("type")
    if "original_max_position_embeddings" in scaling or kind == "llama3":
        factor = 1.0
    for key in _CONTEXT_KEYS:
        value = text.get(key)
        if value is not None:
            return int(factor * value)
    return 2048


def _check_cpu(called: str, model_type: str, text: Mapping[str, Any]) -> None:
    reason = _CPU_MODEL_TYPES.get(model_type)
    for key, what in _CPU_KEYS.items():
        if text.get(key):
            reason = what
    if reason is not None:
        raise ConfigError(f"{called} uses {reason}, which the draft engine has no CPU code for; use --device cuda:N.")


def _is_hub_name(model_path: str) -> bool:
    parts = model_path.split("/")
    return len(parts) <= 2 and all(parts) and not model_path.startswith((".", "~", os.sep))


def _from_hub(model_path: str, revision: str | None) -> Path:
    # Imported here: most callers give a directory, and the import costs more than all the checks together.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model_path, "config.json", revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"The model {model_path!r} is neither a directory nor a model that the Hugging Face hub or its "
            "local cache has; give the path of a model directory."
        ) from error


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal configuration, else the configuration itself."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            return cast(Mapping[str, Any], config[key])
    return config


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(".", "")


def _has(text: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    return any(text.get(key) for key in keys)
