"""Where a row of the draft engine stands between two outcomes."""

from __future__ import annotations

from typing import Final


class Phase:
    """What a row needs next. Plain numbers: numpy takes ten times as long to compare with members of an enum."""

    FREE: Final = 0
    PREFILL: Final = 1
    """Its prompt is being computed."""
    DRAFT: Final = 2
    """Its speculation is drafted just in time: the verifier waits."""
    FORK: Final = 3
    """It has a complete speculation; its table is not begun."""
    TABLE: Final = 4
    """Its table is being built."""
    DONE: Final = 5
    """Its table is complete: only an outcome can move it on."""
    REST: Final = 6
    """Its text is kept, nothing is computed: plain decoding is faster at the moment (`speculator_service.ways`)."""
