"""Text that the target wrote, with what it thought of each next token: in files, so that a long run can be resumed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ssd_proto.errors import ConfigError

NUM_LIKELIEST = 64
"""Next tokens kept of each distribution."""


_ABOUT = "about.json"


def check_about(folder: Path, about: dict[str, object]) -> None:
    """Refuse to add text of another kind to a folder.

    Raises:
        ConfigError: what is there was written otherwise.
    """
    path = folder / _ABOUT
    if path.is_file() and (found := json.loads(path.read_text())) != about:
        raise ConfigError(f"The text in {folder} is of {found}, not of {about}: give another folder.")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Rows of T tokens, each made of documents that do not see each other."""

    tokens: NDArray[np.int32]
    """[n, T]"""
    starts: NDArray[np.int32]
    """[n, T] where in the row the token's document begins."""
    is_written: NDArray[np.bool_]
    """[n, T] whether the token *after* this one was drawn by the target, not given by an instruction."""
    likeliest: NDArray[np.uint32]
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
        paths = sorted(folder.glob("part-*.npz"))
        if not paths:
            raise ConfigError(f"There is no training text in {folder}: run launch/distill write first.")
        try:
            parts = [cls._read_part(path) for path in paths]
            return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"The parts in {folder} cannot be read together ({error}): write them anew into another folder."
            ) from error

    @classmethod
    def _read_part(cls, path: Path) -> Self:
        with np.load(path) as arrays:
            return cls(*(arrays[name] for name in cls.__dataclass_fields__))

    def write(self, folder: Path, number: int, about: dict[str, object]) -> None:
        """As part ``number`` of the corpus in ``folder``; a part that is there was written completely."""
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / "unfinished.npz"
        np.savez(unfinished, **{name: getattr(self, name) for name in self.__dataclass_fields__})
        unfinished.rename(folder / f"part-{number:04d}.npz")
        (folder / _ABOUT).write_text(json.dumps(about, indent=1))

    def split(self, num_held_out: int) -> tuple[Self, Self]:
        """Training rows, and the last ``num_held_out`` rows.

        Raises:
            ConfigError: there are not more rows than these.
        """
        at = len(self) - num_held_out
        if at < 1:
            raise ConfigError(f"There are {len(self)} rows of text, {num_held_out} to be held out: write more.")
        arrays = [getattr(self, name) for name in self.__dataclass_fields__]
        return type(self)(*(array[:at] for array in arrays)), type(self)(*(array[at:] for array in arrays))
