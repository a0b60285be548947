"""SSD's own options on SGLang's command line, and how they reach the processes that need them.

SGLang's parser is made from its own fields, so two hooks add ours and keep their values as bookkeeping
attributes of the server arguments, which are pickled to every process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_ssd.config import CONFIG_VARIABLE, ENDPOINT_VARIABLE, VerifierConfig

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def add_flags(result: Any, parser: argparse.ArgumentParser) -> None:
    """Hook after ``ServerArgs.add_cli_args``."""
    group = parser.add_argument_group("speculative speculative decoding (--speculative-algorithm SSD)")
    group.add_argument(
        "--speculative-ssd-endpoint",
        metavar="tcp://HOST:PORT|ipc://PATH",
        help="Control endpoint of a running speculator service. Without it the server starts one itself, on a device "
        f"of its own, for --speculative-draft-model-path. Environment: {ENDPOINT_VARIABLE}.",
    )
    group.add_argument(
        "--speculative-ssd-config",
        metavar="FILE|JSON",
        help="More options of SSD: a JSON or TOML file, or JSON itself, for example "
        f'\'{{"deadline_ms": 50, "service": {{"fan_out": 4}}}}\'. Environment: {CONFIG_VARIABLE}.',
    )


def keep_flags(original: Callable[..., ServerArgs], cls: type, args: argparse.Namespace) -> ServerArgs:
    """Hook around ``ServerArgs.from_cli_args``."""
    server_args = original(cls, args)
    server_args._ssd_endpoint = getattr(args, "speculative_ssd_endpoint", None)
    server_args._ssd_config = getattr(args, "speculative_ssd_config", None)
    return server_args


def use_embedded(server_args: ServerArgs, endpoint: str) -> None:
    """Make every process use the embedded service at ``endpoint``."""
    server_args._ssd_embedded = endpoint


def verifier_config(server_args: ServerArgs) -> VerifierConfig:
    """The options of this server; once an embedded service is started, with its endpoint."""
    config = VerifierConfig.load(getattr(server_args, "_ssd_endpoint", None), getattr(server_args, "_ssd_config", None))
    embedded = getattr(server_args, "_ssd_embedded", None)
    return config.embedded_at(embedded) if embedded is not None else config
