"""Who we are: the identity of a host for shared memory, and of a connection."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

SHARED_MEMORY_DIRECTORY = Path("/dev/shm")


def host_identity() -> str:
    """Equal for two processes exactly if the `shm` channel can work between them.

    Made of the boot (same kernel), the device number of the shared memory file system (same mount,
    whatever container it is seen from), the network namespace (doorbells are abstract sockets) and the
    user (the memory is readable for its owner only).
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    device = os.stat(SHARED_MEMORY_DIRECTORY).st_dev
    network = os.stat("/proc/self/ns/net").st_ino
    return f"{boot}/{device:x}/{network:x}/{os.geteuid()}"


def new_incarnation() -> int:
    """A random number of 63 bits, never 0: the name of one connection of one process."""
    return secrets.randbits(63) | 1
