"""Named shared memory: a file in the shared memory file system, mapped by two processes.

The name lives only from creation until both have mapped it (`Segment.unlink`): from then on nothing is
left in the system whatever dies.  The creator holds a lock (`flock`) on the file, which the kernel
releases with the process, so `remove_stale_segments` can tell an orphan from a channel being set up,
also when a process identifier was given to somebody else or belongs to another container.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from typing import Final

from ssd_proto.errors import ChannelClosed, ConfigError, ProtocolError
from ssd_proto.host import SHARED_MEMORY_DIRECTORY

NAME_PREFIX: Final = "sglang_ssd_"


class Segment:
    """One end of a piece of shared memory. `close` releases this end; `unlink` removes the name."""

    def __init__(self, name: str, descriptor: int, nbytes: int) -> None:
        """Takes ownership of ``descriptor``, also if it raises."""
        self.name = name
        try:
            # The map keeps a duplicate, and with it the creator's lock: whoever drops this object drops both.
            self._map = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Zeroed memory with a new name, for this user only. `ConfigError` if the system has not enough."""
        name = f"{NAME_PREFIX}{os.getpid()}_{secrets.token_hex(8)}"
        path = SHARED_MEMORY_DIRECTORY / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(_no_memory(nbytes, error)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Without this, a full file system shows as a bus error at some later write.
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            os.close(descriptor)
            path.unlink()
            raise ConfigError(_no_memory(nbytes, error)) from error
        try:
            return cls(name, descriptor, nbytes)
        except OSError as error:
            path.unlink()
            raise ConfigError(_no_memory(nbytes, error)) from error

    @classmethod
    def attach(cls, name: str) -> Segment:
        """The memory of another process. `ChannelClosed` if the name is gone, `ProtocolError` if it is none of ours."""
        if not name.startswith(NAME_PREFIX) or "/" in name or "\0" in name:
            raise ProtocolError(f"{name!r} is not the name of a channel")
        try:
            descriptor = os.open(SHARED_MEMORY_DIRECTORY / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ChannelClosed(f"cannot map the shared memory {name}: {error.strerror}") from error
        try:
            return cls(name, descriptor, 0)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"cannot map the shared memory {name}: {error}") from error

    @property
    def buffer(self) -> memoryview:
        """All of the memory, writable."""
        return memoryview(self._map)

    def unlink(self) -> None:
        """Remove the name; mappings stay. May be called twice, by either end."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SHARED_MEMORY_DIRECTORY / self.name)

    def close(self) -> None:
        """Release this end. May be called twice."""
        # Somebody may still hold a view (an array of the table): then the mapping goes with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()


def remove_stale_segments() -> int:
    """Remove the names that creators left behind which died during set-up; how many. For the start of a service."""
    return sum(_remove_if_stale(name) for name in os.listdir(SHARED_MEMORY_DIRECTORY))


def _remove_if_stale(name: str) -> bool:
    creator, _, rest = name.removeprefix(NAME_PREFIX).partition("_")
    if not name.startswith(NAME_PREFIX) or not rest or not creator.isdecimal() or _is_alive(int(creator)):
        return False
    try:
        descriptor = os.open(SHARED_MEMORY_DIRECTORY / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # gone in the meantime, or another user's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(SHARED_MEMORY_DIRECTORY / name)
    except OSError:
        return False  # its creator lives, in another container
    finally:
        os.close(descriptor)
    return True


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _no_memory(nbytes: int, error: OSError) -> str:
    need = f"{-(-nbytes >> 20)} MiB of shared memory are needed in {SHARED_MEMORY_DIRECTORY}"
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        return f"{need} and not free; enlarge it (docker: --shm-size) or let the channel be zmq"
    return f"{need} and cannot be had ({error.strerror}); make it writable or let the channel be zmq"
