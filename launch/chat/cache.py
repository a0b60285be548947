"""Where checkpoints that are made here are kept, each made once per machine."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ssd_proto.errors import ConfigError

VARIABLE = "SGLANG_SSD_MODEL_CACHE"


def model_cache() -> Path:
    """`$SGLANG_SSD_MODEL_CACHE`, else beside the environments of `launch/env`."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sglang-ssd" / "models"


def made_once(name: str, needed_bytes: int, make: Callable[[Path], None]) -> Path:
    """The folder ``name`` of the cache. If there is none, ``make`` fills it; it appears when it is complete.

    Args:
        needed_bytes: free disk that making it needs.

    Raises:
        ConfigError: there is no room, or the place cannot be written.
    """
    folder = model_cache() / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _make(folder, needed_bytes, make)
    except OSError as error:
        raise ConfigError(
            f"The models cannot be kept in {folder.parent} ({error.strerror or error}): free some room, or choose "
            f"another place with {VARIABLE}."
        ) from error
    return folder


def _make(folder: Path, needed_bytes: int, make: Callable[[Path], None]) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < needed_bytes:
        raise ConfigError(
            f"{folder.parent} has {free / 1e9:.1f} GB free and {needed_bytes / 1e9:.1f} GB are needed: free some, or "
            f"choose another place with {VARIABLE}."
        )
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.making-") as place:
        made = Path(place) / folder.name
        made.mkdir()
        make(made)
        made.rename(folder)


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """One process at a time; the others wait."""
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
