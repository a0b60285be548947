"""Entry point ``sglang.srt.plugins``: SGLang calls `register` early in every one of its processes."""

from __future__ import annotations

import multiprocessing
import sys
from types import TracebackType


def register() -> None:
    """Make SGLang know SSD, its flags, and on machines without a GPU the CPU."""
    from sglang_ssd import cpu

    cpu.activate()
    if "speculator_service.draft.runner" in sys.modules:
        return  # this process runs a draft model with SGLang; it needs no more than that
    _register_algorithm()
    if multiprocessing.parent_process() is None:
        _register_launcher_hooks()


def _register_algorithm() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_ssd.algorithm import NAME, SSDAlgorithm, resolve_server_args

    register_resolution_hook("handle_speculative_decoding")(resolve_server_args)

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=SSDAlgorithm)
    def create_worker(server_args: object) -> type:
        from sglang_ssd.worker import SSDWorker

        return SSDWorker


def _register_launcher_hooks() -> None:
    """What only the process needs that reads the command line, starts the others."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_ssd import embedded, flags

    server_args = "sglang.srt.server_args.ServerArgs"
    HookRegistry.register(f"{server_args}.add_cli_args", flags.add_flags, HookType.AFTER)
    HookRegistry.register(f"{server_args}.from_cli_args", flags.keep_flags, HookType.AROUND)
    launcher = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"
    HookRegistry.register(launcher, embedded.launch_with_embedded, HookType.AROUND)
    HookRegistry.register("sglang.srt.entrypoints.engine.Engine.shutdown", embedded.stop_with_engine, HookType.BEFORE)
    _say_user_mistakes_in_one_sentence()


def _say_user_mistakes_in_one_sentence() -> None:
    from ssd_proto.errors import ConfigError

    previous = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, ConfigError):
            sys.stderr.write(f"error: {error}\n")
        else:
            previous(kind, error, traceback)

    sys.excepthook = say
