"""The embedded speculator service: a child process of the launcher, on a device of its own.

It lives exactly as long as the server: its standard input is a pipe that only the launcher holds, and it
ends when that closes, however the launcher ended.  A monitor starts it again when it dies in between.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_ssd.client import request_info
from sglang_ssd.flags import use_embedded, verifier_config
from ssd_proto.errors import ConfigError, SSDError
from ssd_proto.host import new_incarnation

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 600.0
_ATTACH_TIMEOUT_S = 60.0
_CHECK_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0
_RESTART_AFTER_S = (1.0, 5.0, 30.0)
_POLL_S = 0.1

_services: dict[str, EmbeddedService] = {}
"""By endpoint, since the arguments that name it must be picklable."""


def launch_with_embedded(
    original: Callable[..., Any], cls: type, server_args: ServerArgs, *args: Any, **kwargs: Any
) -> Any:
    """Hook around ``Engine._launch_subprocesses``: the service loads its weights beside the server."""
    server_args.resolve_once()
    options = _service_options(server_args)
    if options is None:
        return original(cls, server_args, *args, **kwargs)
    _check(options)
    service = EmbeddedService(options)
    use_embedded(server_args, service.endpoint)
    _services[service.endpoint] = service
    try:
        result = original(cls, server_args, *args, **kwargs)
        service.wait_ready(num_verifiers=_num_verifiers(server_args))
    except BaseException:
        service.stop()
        raise
    return result


def stop_with_engine(engine: Any) -> None:
    """Hook before ``Engine.shutdown``, which kills all child processes: this one is not to be started again."""
    service = _services.pop(getattr(engine.server_args, "_ssd_embedded", ""), None)
    if service is not None:
        service.stop()


class EmbeddedService:
    """The child process. ``endpoint`` is an abstract socket: it leaves no file behind."""

    def __init__(self, options: list[str]) -> None:
        self.endpoint = f"ipc://@sglang-ssd-{os.getpid()}-{new_incarnation():x}"
        self._command = [
            sys.executable,
            "-m",
            "speculator_service",
            "--endpoint",
            self.endpoint,
            "--exit-with-stdin",
            *options,
        ]
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # of ``_process`` and the decision to start another one
        self._process = self._start()
        self._monitor = threading.Thread(target=self._keep_alive, name="ssd-embedded", daemon=True)
        self._monitor.start()
        atexit.register(self.stop)

    def wait_ready(self, num_verifiers: int) -> None:
        """Wait until the service has loaded its weights and the server's schedulers are attached.

        Raises `ConfigError` if it gave up; its own last line on stderr says why.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._stopping.is_set():
                raise ConfigError("the embedded speculator did not start; the reason is the line above that it printed")
            try:
                info = request_info(self.endpoint, 1.0)
            except SSDError:
                continue
            if info.num_verifiers >= num_verifiers:
                return
            deadline = min(deadline, time.monotonic() + _ATTACH_TIMEOUT_S)
            self._stopping.wait(_POLL_S)
        logger.warning("the embedded speculator is not ready; decoding starts without speculation")

    def stop(self) -> None:
        """End the child and start no other. May be called twice."""
        atexit.unregister(self.stop)
        with self._lock:
            self._stopping.set()
            process = self._process
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        # A group of its own: Ctrl-C in the terminal is for the launcher, the child ends when the launcher does.
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)

    def _keep_alive(self) -> None:
        attempts = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            code = self._process.wait()
            if self._stopping.is_set():
                return
            if code == 2:  # a user's mistake: the next attempt would fail the same way
                self._stopping.set()
                return
            attempts = 0 if time.monotonic() - started > 60.0 else attempts + 1
            self._stopping.wait(_RESTART_AFTER_S[min(attempts, len(_RESTART_AFTER_S) - 1)])
            with self._lock:
                if not self._stopping.is_set():
                    logger.warning("the embedded speculator ended with code %d; starting it again", code)
                    self._process = self._start()


def _service_options(server_args: ServerArgs) -> list[str] | None:
    """Command line of the embedded service; None if this server needs none."""
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    config = verifier_config(server_args)
    if cfg.speculative_algorithm != "SSD" or config.endpoint is not None or cfg.node_rank != 0:
        return None
    options = {
        "model_path": server_args.speculative_draft_model_path,
        "revision": server_args.speculative_draft_model_revision,
        "token_map": cfg.speculative_token_map,
        "lookahead": cfg.speculative_num_steps,
        "num_kept": config.num_kept,
        "max_sequences": cfg.max_running_requests,
        # On a CPU the service knows better: the draft's precision never decides about the text.
        "dtype": "auto" if cfg.device == "cpu" else cfg.dtype,
        "device": _free_device(cfg),
        "trust_remote_code": cfg.trust_remote_code,
        "log_level": cfg.log_level,
        "http_port": -1,
        "trace": config.trace,
        **config.service,
    }
    return [word for name, value in options.items() for word in _flag(name, value)]


def _check(options: list[str]) -> None:
    """Raise `ConfigError` with the service's own sentence if it would refuse its options."""
    command = [sys.executable, "-m", "speculator_service", "--check", *options]
    try:
        check = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return  # its files are far away; the service itself will find out
    if check.returncode == 2:
        _, _, reason = check.stderr.rstrip().rpartition("error: ")
        raise ConfigError(f"SSD config, service: {reason}")


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    return [flag, ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)]


def _free_device(cfg: Any) -> str:
    """The first GPU after those of the target, or the CPU beside a target on the CPU."""
    if cfg.device == "cpu":
        return "cpu"
    import torch

    index = cfg.base_gpu_id + cfg.tp_size * cfg.dp_size * cfg.gpu_id_step
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"the embedded speculator needs a GPU of its own and the target takes all {torch.cuda.device_count()}: "
            'name a device in --speculative-ssd-config \'{"service": {"device": "cuda:0"}}\', make more GPUs visible, '
            "or run the speculator elsewhere and give its --speculative-ssd-endpoint"
        )
    return f"cuda:{index}"


def _num_verifiers(server_args: ServerArgs) -> int:
    from sglang.srt.arg_groups.overrides import resolving_view

    return int(resolving_view(server_args).dp_size)
