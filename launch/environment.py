"""Make the Python environment of this checkout, once, and print the path of its Python.

Two layers, so that the 11 GB of dependencies are installed once per machine while the code that runs is always the
code of the checkout at hand:

* shared:  `$SGLANG_SSD_ENV_CACHE/<key>` (default `~/.cache/sglang-ssd/<key>`), a virtual environment that holds the
  dependencies of pyproject.toml and nothing of this project. The key covers the dependency lists and the Python.
* thin:    `.venv` in the checkout, which sees the shared packages and holds the project in editable form with its
  entry points and commands.

Both are built in place under a lock and end with a `.complete` stamp; whatever lacks the stamp is built again, so an
interrupted run costs time only. The file uses the standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

CHECKOUT = Path(__file__).resolve().parent.parent
EXTRAS = ("test", "dev", "figures", "chat")
NEEDED_BYTES = 12 * 1024**3
LAYOUT = 1  # raise when the layout of either layer changes: existing environments are then built again
COMPLETE = ".complete"
OURS = ".made-by-launch-env"
REPORT_EVERY_S = 10.0

# What could send an installation elsewhere, or another checkout's code into ours.
UNWANTED_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "VIRTUAL_ENV")

UNREACHABLE = "The package index could not be reached: check the network and pip's index and proxy settings."
HINTS = {
    "No space left on device": "The disk is full: free about 12 GB, or choose another place with SGLANG_SSD_ENV_CACHE.",
    "NewConnectionError": UNREACHABLE,
    "name resolution": UNREACHABLE,
    "No matching distribution": "The package index has no build for this Python and platform: Linux x86-64 or aarch64 "
    "with Python 3.11 or newer is needed.",
}


class SetupError(Exception):
    """The environment cannot be made; the message says what to change."""


def say(message: str) -> None:
    """Progress goes to stderr: the last line of stdout is the result."""
    sys.stderr.write(f"launch/env: {message}\n")
    sys.stderr.flush()


def dependency_lists(pyproject: dict[str, Any]) -> dict[str, list[str]]:
    """The parts of pyproject.toml that decide what is installed."""
    project = pyproject["project"]
    lists = {"requires-python": [project["requires-python"]], "build": pyproject["build-system"]["requires"]}
    lists["project"] = project["dependencies"]
    for extra in EXTRAS:
        lists[extra] = project["optional-dependencies"][extra]
    return lists


def environment_key(pyproject: dict[str, Any]) -> str:
    """Name of the shared environment: equal for equal dependency lists, Python version and machine type."""
    identity = [LAYOUT, sys.implementation.cache_tag, platform.machine(), dependency_lists(pyproject)]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def cache_root() -> Path:
    """Where the shared environments of this user live."""
    named = os.environ.get("SGLANG_SSD_ENV_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sglang-ssd"


def usable(environment: Path, stamp: str) -> bool:
    """Whether the environment was finished with this stamp and its Python is still there."""
    try:
        finished = (environment / COMPLETE).read_text() == stamp
    except FileNotFoundError:
        return False
    return finished and os.access(environment / "bin" / "python", os.X_OK)


@contextlib.contextmanager
def locked(lock: Path) -> Iterator[int]:
    """Hold an exclusive lock; yields its descriptor, for children to inherit: so it outlives a killed parent."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is making this environment, waiting for it to end")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def run(arguments: list[str], *, lock: int, log: Path, what: str) -> None:
    """Run one step with its output in `log`, reporting every ten seconds; raises SetupError with the output's end."""
    environment = {name: value for name, value in os.environ.items() if name not in UNWANTED_VARIABLES}
    started, free = time.monotonic(), shutil.disk_usage(log.parent).free
    with log.open("ab") as output:
        offset = output.tell()
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, pass_fds=(lock,)
        )
    try:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(REPORT_EVERY_S)
                continue
            lines = log.read_bytes()[offset:].decode(errors="replace").splitlines()
            newest = next((line.strip() for line in reversed(lines) if line.strip() and "WARNING" not in line), "")
            grown = max(0, free - shutil.disk_usage(log.parent).free) / 1024**3
            say(f"{what}, {time.monotonic() - started:.0f} s, {grown:.1f} GB on disk: {newest[:80]}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode != 0:
        text = log.read_bytes()[offset:].decode(errors="replace")
        hint = next((hint for symptom, hint in HINTS.items() if symptom in text), "See the output above.")
        lines = text.rstrip().splitlines()
        end = "\n".join(line[:300] for line in [line for line in lines if line.startswith("ERROR")] or lines[-20:])
        raise SetupError(f"{what} failed with exit status {process.returncode}.\n{end}\n{hint} Full output: {log}")


def require_venv_module() -> None:
    """Debian and Ubuntu package `ensurepip` apart from Python: install it as root, otherwise say how."""
    if importlib.util.find_spec("ensurepip") is not None:
        return
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    command = f"apt-get update && apt-get install -y --no-install-recommends {package}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(f"this Python cannot make virtual environments; as root: {command}")
    say(f"installing {package}, which this Python lacks")
    settings = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    finished = subprocess.run(
        ["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=sys.stderr, env=settings, check=False
    )
    importlib.invalidate_caches()
    if finished.returncode != 0 or importlib.util.find_spec("ensurepip") is None:
        raise SetupError(f"{package} could not be installed; as root: {command}")


def make_shared(shared: Path, pyproject: dict[str, Any]) -> None:
    """Build the shared environment: every dependency of the project and its extras, nothing of the project."""
    shared.parent.mkdir(parents=True, exist_ok=True)
    with locked(shared.with_suffix(".lock")) as lock:
        if usable(shared, shared.name):
            return
        require_venv_module()
        if shared.exists():
            say(f"removing an unfinished environment: {shared}")
            (shared / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(shared)
        free = shutil.disk_usage(shared.parent).free
        if free < NEEDED_BYTES:
            raise SetupError(
                f"{shared.parent} has {free / 1024**3:.1f} GB free and about {NEEDED_BYTES // 1024**3} GB are needed: "
                "free some, or choose another place with SGLANG_SSD_ENV_CACHE"
            )
        say(f"installing the dependencies into {shared} (once per machine: about 11 GB, some minutes)")
        log = shared.with_suffix(".log")
        log.write_bytes(b"")
        run([sys.executable, "-I", "-m", "venv", str(shared)], lock=lock, log=log, what="making the environment")
        lists = dependency_lists(pyproject)
        requirements = lists["project"] + [item for name in ("build", *EXTRAS) for item in lists[name]]
        pip = [str(shared / "bin" / "python"), "-I", "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
        run([*pip, *requirements], lock=lock, log=log, what="installing the dependencies")
        (shared / COMPLETE).write_text(shared.name)


def make_thin(thin: Path, shared: Path, stamp: str) -> None:
    """Build the checkout's own environment over the shared one."""
    with locked(thin.with_suffix(".lock")) as lock:
        if usable(thin, stamp):
            return
        if thin.exists() and any(thin.iterdir()) and not (thin / OURS).exists():
            raise SetupError(f"{thin} exists and is not from launch/env: rename it or remove it")
        say(f"installing this checkout into {thin}")
        if thin.exists():
            (thin / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(thin)
        thin.mkdir()
        (thin / OURS).write_text("Made by launch/env, which may remove it and make it again.\n")
        log = thin / "launch-env.log"
        python = str(shared / "bin" / "python")
        run([python, "-I", "-m", "venv", "--without-pip", str(thin)], lock=lock, log=log, what="making .venv")
        packages = Path("lib") / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        # addsitedir rather than a plain path: the .pth files of the shared packages must be read, too.
        (thin / packages / "zz_shared_packages.pth").write_text(
            f"import site; site.addsitedir({str(shared / packages)!r})\n"
        )
        pip = [str(thin / "bin" / "python"), "-I", "-m", "pip", "install", "--no-input", "--no-deps", "--no-index"]
        run(
            [*pip, "--no-build-isolation", "--editable", str(CHECKOUT)],
            lock=lock,
            log=log,
            what="installing sglang-ssd",
        )
        adopt_commands(thin, shared)
        (thin / COMPLETE).write_text(stamp)


def adopt_commands(thin: Path, shared: Path) -> None:
    """Offer the shared environment's commands (sglang, pytest, ruff, ...) in the thin one, run by its Python."""
    for command in sorted((shared / "bin").iterdir()):
        ours = thin / "bin" / command.name
        if ours.exists() or ours.is_symlink() or command.name.startswith(("python", "activate", "Activate")):
            continue
        content = command.read_bytes()
        shebang, _, rest = content.partition(b"\n")
        if shebang.startswith(b"#!" + os.fsencode(shared / "bin" / "python")):
            ours.write_bytes(b"#!" + os.fsencode(thin / "bin" / "python") + b"\n" + rest)
            ours.chmod(0o755)
        else:
            ours.symlink_to(command)


def make_environment() -> Path:
    """Both layers, made where missing; returns the path of the checkout's Python."""
    text = (CHECKOUT / "pyproject.toml").read_text()
    pyproject = tomllib.loads(text)
    key = environment_key(pyproject)
    shared = cache_root() / key
    thin = CHECKOUT / ".venv"
    project = hashlib.sha256(json.dumps(pyproject["project"], sort_keys=True).encode()).hexdigest()
    stamp = json.dumps({"layout": LAYOUT, "shared": str(shared), "checkout": str(CHECKOUT), "project": project})
    if not usable(shared, key):
        make_shared(shared, pyproject)
    if not usable(thin, stamp):
        make_thin(thin, shared, stamp)
    return thin / "bin" / "python"


def stop(number: int, frame: FrameType | None) -> NoReturn:
    """A termination signal ends the run as an exception, so that children are ended and locks released."""
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="launch/env",
        description="Make the Python environment of this checkout if needed, and print the path of its Python as the "
        "last line of stdout (progress goes to stderr).",
        epilog="Environment variables: SGLANG_SSD_ENV_CACHE, the folder of the shared dependency environments (default "
        "~/.cache/sglang-ssd; about 11 GB each, safe to delete); PYTHON, the Python 3.11+ to build with.",
    )
    parser.parse_args()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)
    try:
        python = make_environment()
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run starts the unfinished part again")
        return 130
    sys.stdout.write(f"{python}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
