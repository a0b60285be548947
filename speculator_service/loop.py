"""The model thread: serves channels and makes model steps until it is told to stop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from speculator_service.speculator import Speculator
from ssd_proto.channels.zmq import ZmqHub
from ssd_proto.doorbell import Bell, Doorbell

_SLEEP_WITH_SEQUENCES_S = 0.002
"""Bounds what a lost ring of the doorbell costs."""
_SLEEP_WITHOUT_SEQUENCES_S = 0.02
_BEAT_INTERVAL_S = 0.1
_COLLECT_INTERVAL_S = 10.0

T = TypeVar("T")


class ModelLoop:
    """Owns the speculator, its channels and the hub while `run` is active, in the thread that calls it.

    Args:
        spin_s: how long to poll before sleeping when there is nothing to do.
    """

    def __init__(self, speculator: Speculator, hub: ZmqHub, doorbell: Doorbell, spin_s: float) -> None:
        self._speculator, self._hub, self._doorbell, self._spin_s = speculator, hub, doorbell, spin_s
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._bell = Bell(doorbell.address)  # used by the control thread
        self._stopping = False
        self._error: BaseException | None = None
        self._last_beat = time.monotonic()
        self._last_collection = self._last_beat

    @property
    def beat_age(self) -> float:
        """Seconds since the loop last went round; for any thread."""
        return time.monotonic() - self._last_beat

    def call(self, function: Callable[[], T]) -> Future[T]:
        """For the control thread: have ``function`` called in the model thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:  # belongs to the caller, who gets it from the future
                future.set_exception(error)

        self.post(run)
        return future

    def close(self) -> None:
        """Release what `post` needs; no other thread may use the loop any more."""
        self._bell.close()

    def post(self, function: Callable[[], None]) -> None:
        """Like `call`, for what returns nothing: its errors are the loop's."""
        self._calls.put(function)
        self._bell.ring()

    def stop(self) -> None:
        """Make `run` return soon; for signal handlers and any thread."""
        self._stopping = True

    def fail(self, error: BaseException) -> None:
        """Make `run` raise soon, because of ``error`` in another thread."""
        self._error = error
        self._stopping = True

    def run(self) -> None:
        """Serve until `stop`.  An error of the draft engine ends it, as does one that `fail` was told of."""
        self._tune_collector()
        busy = False
        try:
            while not self._stopping:
                self._make_calls()
                self._beat()
                was_busy, busy = busy, self._speculator.poll()
                busy |= self._speculator.advance()
                if not busy and not (was_busy and self._spin()):
                    self._rest()
            self._make_calls()
        finally:
            gc.enable()
        if self._error is not None:
            raise RuntimeError("a thread of the service failed") from self._error

    def _make_calls(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            call()

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_beat < _BEAT_INTERVAL_S:
            return
        self._last_beat = now
        for verifier in self._speculator.verifiers:
            verifier.channel.beat()

    def _has_work(self) -> bool:
        return self._stopping or not self._calls.empty() or self._speculator.pending()

    def _spin(self) -> bool:
        """Poll for a short while, as an outcome often follows soon; returns whether there is work."""
        deadline = time.monotonic() + self._spin_s
        while time.monotonic() < deadline:
            if self._has_work():
                return True
        return False

    def _rest(self) -> None:
        """Sleep until somebody rings or it is time to look again."""
        if any(verifier.num_sequences for verifier in self._speculator.verifiers):
            self._sleep(_SLEEP_WITH_SEQUENCES_S)
        else:
            self._collect_garbage()
            self._sleep(_SLEEP_WITHOUT_SEQUENCES_S)

    def _sleep(self, timeout_s: float) -> None:
        channels = [verifier.channel for verifier in self._speculator.verifiers]
        for channel in channels:
            channel.set_sleeping(True)
        try:
            if not self._has_work():
                self._hub.wait(timeout_s, self._doorbell)
        finally:
            for channel in channels:
                channel.set_sleeping(False)

    def _tune_collector(self) -> None:
        """A collection walks all objects of SGLang and torch (0.2 s): take them out, and collect when idle only."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def _collect_garbage(self) -> None:
        now = time.monotonic()
        if now - self._last_collection > _COLLECT_INTERVAL_S:
            gc.collect()
            self._last_collection = now
