"""The speculator service: its parts put together, from the first check to a clean end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from speculator_service.config import NO_HTTP, SpeculatorConfig
from speculator_service.control import ControlThread, Identity
from speculator_service.draft.base import DraftModel
from speculator_service.draft.config import DraftConfig
from speculator_service.draft.engine import load_engine
from speculator_service.http import HttpServer
from speculator_service.loop import ModelLoop
from speculator_service.metrics import SpeculatorCollector, metrics_registry
from speculator_service.planner import Planner
from speculator_service.speculator import Speculator
from ssd_proto.channels.memory import remove_stale_segments
from ssd_proto.channels.zmq import ZmqHub
from ssd_proto.control import ControlServer
from ssd_proto.doorbell import Doorbell
from ssd_proto.fingerprint import fingerprint
from ssd_proto.host import host_identity, new_incarnation
from ssd_proto.trace import open_trace

logger = logging.getLogger(__name__)

_HEALTHY_BEAT_AGE_S = 10.0
"""A step or a chunk of a prompt must not take longer."""


class SpeculatorService:
    """One service process.  `run` is called once, in the main thread.

    Args:
        config: settings.
        announce: called with the control endpoint and the HTTP address (or None) when the service is ready.
        load: makes the draft model.
    """

    def __init__(
        self,
        config: SpeculatorConfig,
        announce: Callable[[str, str | None], None],
        load: Callable[[DraftConfig], DraftModel] = load_engine,
    ) -> None:
        self._config, self._announce, self._load = config, announce, load
        self._loop: ModelLoop | None = None
        self._control: ControlThread | None = None
        self._leaving = False

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises:
            ConfigError: the settings cannot work; before weights are read where possible.
        """
        config = self._config
        with contextlib.ExitStack() as stack:
            draft = config.draft_config()
            model = fingerprint(config.model_path, config.revision, config.trust_remote_code)
            server = ControlServer(config.endpoint)
            stack.callback(server.close)
            hub = ZmqHub(config.data_address())
            stack.callback(hub.close)
            doorbell = stack.enter_context(Doorbell())
            trace = open_trace(config.trace, "speculator")
            stack.callback(trace.close)
            registry = metrics_registry()
            http = None
            if config.http_port != NO_HTTP:
                http = HttpServer(config.http_host, config.http_port, self, registry)
                stack.callback(http.close)
                http.start()
            signal.signal(signal.SIGTERM, self._leave)
            if config.exit_with_stdin:
                _end_with_stdin()
            remove_stale_segments()
            engine = self._load(draft)
            speculator = Speculator(
                engine,
                Planner(config.planner_settings(), config.lookahead, engine.vocab_size),
                num_kept=config.num_kept,
                temperature_factor=config.draft_temperature,
                prefill_chunk=config.prefill_chunk,
                trace=trace,
            )
            stack.callback(_detach_all, speculator)
            loop = ModelLoop(speculator, hub, doorbell, config.spin_us * 1e-6)
            stack.callback(loop.close)
            identity = Identity(new_incarnation(), model, config.device, _host(), config.expiry_s)
            control = ControlThread(server, loop, speculator, hub, doorbell.address, identity)
            registry.register(SpeculatorCollector(speculator, lambda: loop.beat_age, control.silence))
            self._loop, self._control = loop, control
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: loop.stop())
            if self._leaving:
                return
            control.start()
            stack.callback(control.stop)
            logger.info("serving %s on %s at %s", config.model_path, config.device, server.endpoint)
            self._announce(server.endpoint, http.address if http is not None else None)
            loop.run()

    def _leave(self, *_: object) -> None:
        """SIGTERM while the weights are being loaded. Callbacks of libraries may swallow the exception."""
        self._leaving = True
        raise SystemExit(0)

    # -- status, for the pages ---------------------------------------------------------------------

    def is_healthy(self) -> bool:
        """Whether the model thread moves. Not before the weights are loaded."""
        return self._loop is not None and self._loop.beat_age < _HEALTHY_BEAT_AGE_S

    def info(self) -> dict[str, Any]:
        """What is served."""
        if self._control is None:
            return {"state": "loading", "draft": {"path": self._config.model_path}}
        details: dict[str, Any] = msgspec.to_builtins(self._control.info())
        draft = msgspec.structs.asdict(self._control.info().draft)
        return {"state": "ready", **details, "draft": draft}


def _detach_all(speculator: Speculator) -> None:
    for verifier in speculator.verifiers:
        speculator.detach(verifier)


def _host() -> str:
    try:
        return host_identity()
    except OSError as error:
        logger.warning("no shared memory here, verifiers must use zmq: %s", error)
        return ""


def _end_with_stdin() -> None:
    """Have this process terminated when stdin reaches its end: the parent is gone, however it ended."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        signal.raise_signal(signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()
