"""Text that the target wrote, with what it thought of each next token: in files, so that a long run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ssd_proto.errors import ConfigError

NUM_LIKELIEST = 64
"""Next tokens kept of each distribution."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Rows of T tokens, each made of documents that do not see each other."""

    tokens: NDArray[np.int32]
    """[n, T]"""
    starts: NDArray[np.int16]
    """[n, T] where in the row the token's document begins."""
    is_written: NDArray[np.bool_]
    """[n, T] whether the token *after* this one was drawn by the target, not given by an instruction."""
    likeliest: NDArray[np.uint16]
    """[n, T, 64] tokens that the target finds likeliest to come after this one."""
    log_probs: NDArray[np.float16]
    """[n, T, 64] their log-probabilities at temperature 1, of the whole vocabulary."""

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """All parts in a folder.

        Raises:
            ConfigError: there are none.
        """
        parts = [np.load(path) for path in sorted(folder.glob("part-*.npz"))]
        if not parts:
            raise ConfigError(f"There is no training text in {folder}: run launch/distill write first.")
        return cls(*(np.concatenate([part[name] for part in parts]) for name in cls.__dataclass_fields__))

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """One after the other."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))

    def write(self, folder: Path, number: int, about: dict[str, object]) -> None:
        """As part ``number`` of the corpus in ``folder``; a part that is there was written completely."""
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / "unfinished.npz"
        np.savez(unfinished, **{name: getattr(self, name) for name in self.__dataclass_fields__})
        unfinished.rename(folder / f"part-{number:04d}.npz")
        (folder / "about.json").write_text(json.dumps(about, indent=1))

    def split(self, num_held_out: int) -> tuple[Self, Self]:
        """Training rows, and the last ``num_held_out`` rows."""
        at = len(self) - num_held_out
        arrays = [getattr(self, name) for name in self.__dataclass_fields__]
        return type(self)(*(array[:at] for array in arrays)), type(self)(*(array[at:] for array in arrays))
