"""How loops are compiled.

A round touches few numbers, but in many ways: as calls of numpy it costs many times what it costs as a loop, and every
instruction here is one that a target on the same physical core waits for.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import config, njit

from ssd_proto import records

logger = logging.getLogger(__name__)

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
"""Modules with compiled functions that call each other, or with constants that these use."""


def compiled(function: F) -> F:
    """Compile ``function`` when it is first called (up to some seconds, then kept on disk by Numba).

    Whoever uses it calls it once with nothing to do when it is made, so that this never happens within a round.
    Indices are not checked: callers pass what is in range.
    """
    before, config.CACHE_DIR = config.CACHE_DIR, _FOLDER
    try:
        return _kept_on_disk(function)
    finally:
        config.CACHE_DIR = before


def compiled_for(signature: str, **options: Any) -> Callable[[F], F]:
    """Compile a function for these types alone, at once: others are an error, not a compilation within a round.

    It must not call compiled functions of other modules. ``options`` are Numba's.
    """
    return lambda function: _kept_on_disk(function, signature, **options)


def _kept_on_disk(function: F, *signature: str, **options: Any) -> F:
    try:
        result: F = njit(*signature, cache=True, **options)(function)
    except RuntimeError:  # neither our folder nor the user's can be written
        _warn()
        result = njit(*signature, **options)(function)
    return result


@cache
def _warn() -> None:
    logger.warning("every start compiles some functions (seconds): give NUMBA_CACHE_DIR a folder that can be written")


def _make_folder() -> str:
    """A folder for these very sources: Numba alone would not notice when a function that another one calls changes.

    It is in `NUMBA_CACHE_DIR`, beside the sources, or in the user's cache.
    """
    sources = [*(_PACKAGE / f"{name}.py" for name in _SOURCES), Path(records.__file__)]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    ours = _PACKAGE if os.access(_PACKAGE, os.W_OK) else Path.home() / ".cache" / "sglang-ssd"
    parent = Path(config.CACHE_DIR) if config.CACHE_DIR else ours / "__pycache__"
    folder = parent / f"compiled-{digest[:16]}"
    for old in parent.glob("compiled-*"):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
    return str(folder)


_FOLDER = _make_folder()
