"""A reduced output vocabulary: the tokens that a draft may propose, in the manner of SGLang's token maps (FR-Spec).

A small draft of a large vocabulary spends most of a step on its output layer. Drafts and candidates that lie within
a few thousand frequent tokens cost little acceptance, and the rule that verifies them does not care: q is 0 elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ssd_proto.errors import ConfigError


def read_token_map(path: str, vocab_size: int, least: int) -> NDArray[np.int64]:
    """Tokens [V'] of a file that `torch.save` wrote: a list or a tensor of token ids, as SGLang reads them.

    Args:
        path: of the file, or ``OWNER/NAME/FILE`` on the Hugging Face hub.
        vocab_size: V of the model.
        least: tokens that there must be.

    Raises:
        ConfigError: there is no such file, or it does not hold ``least`` different tokens of the model.
    """
    import torch

    file = Path(path).expanduser()
    if not file.is_file():
        file = _from_hub(path)
    try:
        ids = torch.as_tensor(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # unpickling raises what it likes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"The token map {path!r} cannot be read ({reason}); give token ids saved by torch.save."
        ) from error
    is_integer = not ids.is_floating_point() and not ids.is_complex() and ids.dtype != torch.bool
    if ids.dim() != 1 or not is_integer:
        raise ConfigError(f"The token map {path!r} does not hold a list of token ids; give one saved by torch.save.")
    tokens: NDArray[np.int64] = ids.to(torch.int64).numpy()
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ConfigError(
            f"The token map {path!r} has tokens outside of 0 to {vocab_size - 1}; give one made for the draft model."
        )
    if len(np.unique(tokens)) != len(tokens):
        raise ConfigError(f"The token map {path!r} names a token twice; name each once.")
    if len(tokens) < least:
        raise ConfigError(
            f"The token map {path!r} has {len(tokens)} tokens, for this fan-out {least} are needed; "
            "give a larger one or lower the fan-out."
        )
    return tokens


def _from_hub(path: str) -> Path:
    repository, _, name = path.rpartition("/")
    if repository.count("/") != 1 or repository.startswith((".", "/", "~")):
        raise ConfigError(f"There is no token map {path!r}; give the path of a file, or OWNER/NAME/FILE on the hub.")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, name))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"The token map {path!r} is neither a file nor one that the Hugging Face hub or its local cache has; "
            "give the path of a file."
        ) from error
