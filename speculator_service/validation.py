"""What a verifier may send. Anything else must neither disturb other sequences nor reach the draft model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ssd_proto.records import OpenSequence


def is_valid_open(event: OpenSequence, max_slots: int) -> bool:
    """Whether slot and generation of an open can be entered."""
    return 0 <= event.slot < max_slots and event.generation >= 0


def are_tokens(tokens: NDArray[np.integer], vocab_size: int) -> bool:
    """Whether there are tokens and all are in the vocabulary."""
    return len(tokens) > 0 and bool(tokens.min() >= 0) and bool(tokens.max() < vocab_size)


def are_valid(outcomes: NDArray[np.void], vocab_size: int) -> NDArray[np.bool_]:
    """[b] whether an outcome's own fields make sense; tokens that were not accepted do not matter."""
    accepted, bonus, tokens = outcomes["num_accepted"], outcomes["bonus"], outcomes["tokens"]
    lookahead = tokens.shape[1]
    token_valid = (tokens >= 0) & (tokens < vocab_size) | (np.arange(lookahead) >= accepted[:, None])
    in_range = (accepted >= 0) & (accepted <= lookahead) & (bonus >= 0) & (bonus < vocab_size)
    result: NDArray[np.bool_] = in_range & token_valid.all(axis=1)
    return result


def later_of_each(slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of the records whose slot has occurred before in the batch, in the order of the batch."""
    return np.delete(np.arange(len(slots)), np.unique(slots, return_index=True)[1])
