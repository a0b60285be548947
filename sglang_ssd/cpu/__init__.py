"""CPU as a device: what SGLang's PyPI wheel lacks to serve, and to speculate, without a GPU."""

from __future__ import annotations

import glob
import importlib.util
import logging
import os
import sys

logger = logging.getLogger(__name__)

_activated = False


def activate() -> bool:
    """Make SGLang run on the CPU of this process, where nothing better exists; returns whether it was done.

    Call it from the plugin in every SGLang process, before ``sgl_kernel`` is imported. It does nothing where torch
    sees an accelerator, or where ``sgl_kernel`` comes with native CPU operators. The second call does nothing new.
    """
    global _activated
    if _activated:
        return True
    if _has_accelerator() or _has_native_operators():
        return False
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # A few of SGLang's layers and its seeded sampler are compiled; on CPU that takes minutes and needs a C++ compiler.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _forget_earlier_answers()

    from sglang_ssd.cpu import operators, sglang_hooks

    operators.register()
    # sgl_kernel finds no library for this machine and then imports `common_ops`. Child processes inherit sys.path.
    # Other programs that are started inherit the switch above, and may import sgl_kernel before any plugin.
    folder = os.path.join(os.path.dirname(__file__), "importable")
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
    sglang_hooks.install()
    _activated = True
    logger.info("no accelerator and no native CPU operators: SGLang runs on the torch_cpu operators of sglang-ssd")
    return True


def _forget_earlier_answers() -> None:
    """`import sglang; sglang.Engine(...)` imports most of SGLang before plugins, and SGLang remembers is_cpu()."""
    common = sys.modules.get("sglang.srt.utils.common")
    if common is not None:
        common.is_cpu.cache_clear()


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def _has_native_operators() -> bool:
    """Whether ``sgl_kernel`` is a CPU build: its library lies directly in the package, not in a folder per GPU kind."""
    spec = importlib.util.find_spec("sgl_kernel")
    folders = spec.submodule_search_locations if spec is not None else None
    return any(glob.glob(os.path.join(folder, "common_ops.*")) for folder in folders or ())
