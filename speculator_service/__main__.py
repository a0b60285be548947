"""Command line of the speculator service: ``python -m speculator_service --help``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from speculator_service.config import SpeculatorConfig, from_mapping, read_file
from ssd_proto.errors import ConfigError

if TYPE_CHECKING:
    from speculator_service.draft.base import DraftModel
    from speculator_service.draft.config import DraftConfig

logger = logging.getLogger("speculator_service")

PROGRAM = "sglang-ssd-speculator"


def main(argv: Sequence[str] | None = None, load: Callable[[DraftConfig], DraftModel] | None = None) -> int:
    """Run the service; returns its exit code: 0 after SIGTERM or SIGINT, 1 after a fault, 2 after a user's mistake.

    ``load`` makes the draft model, by default on SGLang.
    """
    try:
        config = parse_arguments(argv)
        logging.basicConfig(
            level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        if config.check:
            config.draft_config()
            return 0
        # Imports torch, which --help and most mistakes need not wait for.
        from speculator_service.draft.engine import load_engine
        from speculator_service.service import SpeculatorService

        SpeculatorService(config, _reserve_stdout(config.announce), load or load_engine).run()
    except ConfigError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while the weights are being loaded
        return 0
    except Exception:  # the boundary of this process
        logger.exception("the service ends because of a fault")
        return 1
    return 0


def parse_arguments(argv: Sequence[str] | None) -> SpeculatorConfig:
    """The configuration of a command line; flags override ``--config``.

    Raises:
        ConfigError: a setting is wrong.
    """
    given = vars(_parser().parse_args(argv))
    file = given.pop("config")
    values = read_file(file) if file is not None else {}
    return from_mapping({key.replace("-", "_"): value for key, value in values.items()} | given)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Speculator of SSD: drafts for SGLang servers that run with --speculative-algorithm SSD.",
        epilog="Every flag can also be a key of the --config file.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML or JSON file with settings; flags override it")
    for item in fields(SpeculatorConfig):
        # Only what is given becomes an attribute, so that defaults do not override the file.
        options: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": _help(item)}
        kind = str(item.type)
        if kind == "bool":
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"], options["metavar"] = _converter(item.name, kind)
        parser.add_argument("--" + item.name.replace("_", "-"), **options)
    return parser


def _help(item: Any) -> str:
    text = str(item.metadata["help"]).replace("%", "%%")
    shown = item.default is not MISSING and item.default is not None and item.default is not False
    return f"{text} (default: {item.default})" if shown else text


def _converter(name: str, kind: str) -> tuple[Callable[[str], Any], str]:
    if "str" in kind.split(" | "):  # parsed with the file's values
        return str, {"fan_out": "F", "fan_out_after_miss": "F", "downweight": "C"}.get(name, name.upper())
    if kind.startswith("int"):
        return int, "N"
    return float, "SECONDS" if name.endswith("_s") else "X"


def _reserve_stdout(announce: bool) -> Callable[[str, str | None], None]:
    """Keep stdout for the announcement: what libraries print goes to stderr."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def ready(endpoint: str, http: str | None) -> None:
        if announce:
            output.write(f"ready {endpoint} {http or '-'}\n")
        output.close()

    return ready


if __name__ == "__main__":
    sys.exit(main())
