"""What must agree between target and draft, read from a model's files, and the sentence for when it does not."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from ssd_proto.errors import ConfigError
from ssd_proto.messages import ModelFingerprint
from ssd_proto.model_checks import model_vocab_size, read_model_config


@lru_cache
def fingerprint(model_path: str, revision: str | None = None, trust_remote_code: bool = False) -> ModelFingerprint:
    """Fingerprint of a model directory or Hugging Face hub name.

    Raises `ConfigError` if there is no such model or its configuration cannot be read.
    """
    config = read_model_config(model_path, revision)
    architecture = (config.get("architectures") or ["unknown"])[0]
    tokenizer = _tokenizer_digest(model_path, revision, trust_remote_code)
    return ModelFingerprint(model_path, architecture, model_vocab_size(config), tokenizer)


def mismatch(target: ModelFingerprint, draft: ModelFingerprint) -> str | None:
    """Why ``draft`` cannot speculate for ``target``, in one sentence that says what to change; None if it can."""
    change = "give a draft model of the target's own family"
    if target.vocab_size != draft.vocab_size and not (target.tokenizer and target.tokenizer == draft.tokenizer):
        return (
            f"the draft model {draft.path!r} has {draft.vocab_size} tokens and the target {target.path!r} "
            f"has {target.vocab_size}: {change}"
        )
    if target.tokenizer and draft.tokenizer and target.tokenizer != draft.tokenizer:
        return f"the draft model {draft.path!r} has another tokenizer than the target {target.path!r}: {change}"
    return None


def _tokenizer_digest(model_path: str, revision: str | None, trust_remote_code: bool) -> str:
    file = Path(model_path).expanduser() / "tokenizer.json"
    if file.is_file():  # the common case, without the seconds that importing transformers takes
        from tokenizers import Tokenizer

        try:
            vocabulary: dict[str, int] = Tokenizer.from_file(str(file)).get_vocab()
        except Exception as error:  # the library raises plain Exception for what it cannot read
            raise ConfigError(f"the tokenizer.json of the model at {model_path!r} cannot be read: {error}") from error
    else:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                model_path, revision=revision, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError):  # no tokenizer beside the model: then it is not compared
            return ""
        vocabulary = tokenizer.get_vocab()
    entries = sorted(vocabulary.items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()
