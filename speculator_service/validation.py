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
