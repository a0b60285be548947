"""What made the speculation that a round verified; its outcome, and the next hit, depend on it."""

from __future__ import annotations

from typing import Final


class Source:
    """Numbers of the sources, for arrays."""

    HIT: Final = 0
    """Taken from the table: drafted ahead by the primary speculator."""
    PRIMARY: Final = 1
    """Backup: the draft model, just in time."""
    SUFFIX: Final = 2
    """Backup: the suffix automaton. Also where it found nothing to continue with."""
    EMPTY: Final = 3
    """Backup: nothing."""


NUM_SOURCES: Final = 4
SOURCE_NAMES: Final = ("hit", "primary", "suffix", "empty")
"""By number."""
BACKUPS: Final = {"primary": Source.PRIMARY, "suffix": Source.SUFFIX, "empty": Source.EMPTY}
"""The sources that answer a miss, by name."""
