"""Compiled loops over the state of rows.

A round touches few numbers, but in many ways: as calls of numpy it costs many times what it costs as a loop, and every
instruction here is one that a target on the same physical core waits for.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import config, njit

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent
_SOURCES = (
    "compiled",
    "outcome_batch",
    "phase",
    "row_arrays",
    "saguaro/outcomes",
    "saguaro/sources",
    "settling",
    "tables",
)
"""Modules with compiled functions, or with constants that these use."""


def compiled(function: F) -> F:
    """Compile ``function`` when it is first called (up to some seconds, then kept on disk by Numba).

    Whoever uses it calls it once with nothing to do when it is made, so that this never happens within a round.
    Indices are not checked: callers pass what is in range.
    """
    before, config.CACHE_DIR = config.CACHE_DIR, config.CACHE_DIR or _FOLDER
    try:
        result: F = njit(cache=True)(function)
    finally:
        config.CACHE_DIR = before
    return result


def _make_folder() -> str:
    """A folder for these very sources: Numba alone would not notice when a function that another one calls changes.

    Where none can be made Numba takes a folder of the user.
    """
    digest = hashlib.sha256(b"".join((_PACKAGE / f"{name}.py").read_bytes() for name in _SOURCES)).hexdigest()
    folder = _PACKAGE / "__pycache__" / f"compiled-{digest[:16]}"
    if not folder.exists():
        for old in folder.parent.glob("compiled-*"):
            shutil.rmtree(old, ignore_errors=True)
    return str(folder)


_FOLDER = _make_folder()
