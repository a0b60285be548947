"""The control thread: handshakes, signs of life and farewells of verifiers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from speculator_service.loop import ModelLoop
from speculator_service.saguaro.sources import Source
from speculator_service.sessions import Verifier, VerifierRegistry
from speculator_service.speculator import Speculator
from ssd_proto import PROTOCOL_VERSION
from ssd_proto.channel import SpeculatorChannel
from ssd_proto.channels.shm import ShmSpeculatorChannel
from ssd_proto.channels.zmq import ZmqHub
from ssd_proto.control import ControlServer
from ssd_proto.errors import SSDError
from ssd_proto.fingerprint import mismatch
from ssd_proto.messages import (
    Attached,
    Bye,
    ChannelOffer,
    Hello,
    Info,
    InfoRequest,
    ModelFingerprint,
    Ping,
    Pong,
    Refusal,
    ServiceMessage,
    VerifierMessage,
    Welcome,
)
from ssd_proto.table import TableShape

logger = logging.getLogger(__name__)

_RECEIVE_TIMEOUT_S = 0.1
_ATTACH_TIMEOUT_S = 4.0
"""How long a handshake waits for the model thread to finish its step."""
_STOPPED_S = 5.0
"""A longer gap between two looks at the socket means that this process did not run (SIGSTOP, a suspended machine)."""
_HEARTBEATS_PER_EXPIRY = 10
_MAX_VERIFIERS = 64
_MAX_SLOTS = 1 << 16
_MAX_TABLE_BYTES = 1 << 31


@dataclass(frozen=True, slots=True)
class Identity:
    """What the service says of itself in the handshake."""

    incarnation: int
    draft: ModelFingerprint
    device: str
    host: str
    """`ssd_proto.host.host_identity`; empty if there is no shared memory here."""
    expiry_s: float

    @property
    def channels(self) -> list[str]:
        """Channel kinds that can be offered, best first."""
        return ["shm", "zmq"] if self.host else ["zmq"]


class ControlThread:
    """Answers control messages in a thread of its own, which also closes ``server``.

    What belongs to the model thread (speculator, hub, channels) is touched through `ModelLoop.call` only.
    """

    def __init__(
        self,
        server: ControlServer,
        loop: ModelLoop,
        speculator: Speculator,
        hub: ZmqHub,
        doorbell_address: str,
        identity: Identity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._loop, self._speculator, self._hub = server, loop, speculator, hub
        self._doorbell_address, self._identity, self._clock = doorbell_address, identity, clock
        self._registry = VerifierRegistry(identity.expiry_s)
        self._mapped: set[int] = set()  # incarnations that have said Attached
        self._connections = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Answer no more. The model loop need not run any longer."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def silence(self) -> float:
        """Seconds since the verifier that is silent for longest was heard; for any thread."""
        return self._registry.oldest_silence(self._clock())

    def info(self) -> Info:
        """What the service serves; for any thread."""
        speculator = self._speculator
        return Info(
            version=PROTOCOL_VERSION,
            incarnation=self._identity.incarnation,
            draft=self._identity.draft,
            lookahead=speculator.engine.lookahead,
            fan_out=speculator.planner.plan.counts[Source.HIT, -1].tolist(),
            num_kept=speculator.num_kept,
            max_sequences=speculator.engine.max_slots,
            context_length=speculator.engine.context_length,
            device=self._identity.device,
            channels=self._identity.channels,
            num_verifiers=len(self._mapped),
        )

    def _run(self) -> None:
        try:
            looked = self._clock()
            while not self._stop.is_set():
                received = self._server.receive(_RECEIVE_TIMEOUT_S)
                gap, looked = self._clock() - looked, self._clock()
                if gap > _STOPPED_S:
                    self._registry.forgive(gap)
                if received is not None:
                    self._serve(*received)
                for verifier in self._registry.take_expired(self._clock()):
                    logger.warning("verifier %s is gone", verifier.name)
                    self._detach(verifier)
        except Exception as error:  # the boundary of this thread: without it the service cannot go on
            self._loop.fail(error)
        finally:
            self._server.close()

    def _serve(self, address: bytes, message: VerifierMessage) -> None:
        answer = self._answer(message)
        if answer is not None:
            self._server.send(address, answer)

    def _answer(self, message: VerifierMessage) -> ServiceMessage | None:
        if isinstance(message, Hello):
            return self._welcome(message)
        if isinstance(message, InfoRequest):
            return self.info()
        known = self._registry.heard(message.incarnation, self._clock())
        if isinstance(message, Ping):
            return Pong(message.incarnation, known)
        if isinstance(message, Attached) and known:
            self._mark_mapped(message.incarnation)
        if isinstance(message, Bye):
            verifier = self._registry.remove(message.incarnation)
            if verifier is not None:
                logger.info("verifier %s said goodbye", verifier.name)
                self._detach(verifier)
        return None

    # -- handshake ---------------------------------------------------------------------------------

    def _welcome(self, hello: Hello) -> Welcome | Refusal | None:
        for verifier in self._registry.take_namesakes(hello.name):
            self._detach(verifier)
        reason = self._objection(hello)
        if reason is None:
            try:
                offer, verifier = self._attached(hello)
            except FutureTimeout:
                return None  # busy with a long step: the verifier tries again when its patience ends
            except (SSDError, OSError) as error:
                reason = str(error)
        if reason is not None:
            logger.warning("refused verifier %s: %s", hello.name, reason)
            return Refusal(PROTOCOL_VERSION, reason)
        self._registry.add(verifier, self._clock())
        logger.info("verifier %s connected through %s", hello.name, offer.kind)
        return Welcome(
            version=PROTOCOL_VERSION,
            incarnation=self._identity.incarnation,
            draft=self._identity.draft,
            lookahead=hello.lookahead,
            num_outcomes=self._speculator.planner.num_outcomes,
            num_kept=hello.num_kept,
            max_sequences=self._speculator.engine.max_slots,
            context_length=self._speculator.engine.context_length,
            channel=offer,
            heartbeat_s=self._identity.expiry_s / _HEARTBEATS_PER_EXPIRY,
            expiry_s=self._identity.expiry_s,
        )

    def _attached(self, hello: Hello) -> tuple[ChannelOffer, Verifier]:
        attaching = self._loop.call(lambda: self._attach(hello))
        try:
            return attaching.result(_ATTACH_TIMEOUT_S)
        except FutureTimeout:
            if attaching.cancel():
                raise
            return attaching.result(_ATTACH_TIMEOUT_S)  # it runs at this moment

    def _objection(self, hello: Hello) -> str | None:
        """Why this verifier cannot be served, in one sentence that says what to change; None if it can."""
        lookahead, num_kept = self._speculator.engine.lookahead, self._speculator.num_kept
        if hello.lookahead != lookahead:
            return (
                f"the verifier speculates {hello.lookahead} tokens and the service {lookahead}: start the server with "
                f"--speculative-num-steps {lookahead} or the service with --lookahead {hello.lookahead}"
            )
        if hello.num_kept != num_kept:
            return (
                f"the verifier wants {hello.num_kept} probabilities per token and the service sends {num_kept}: "
                f"set num_kept to {num_kept} in the server's SSD config, "
                f"or start the service with --num-kept {hello.num_kept}"
            )
        if not 1 <= hello.max_slots <= _MAX_SLOTS:
            slots = f"1 to {_MAX_SLOTS}"
            return f"the verifier has {hello.max_slots} slots, {slots} are possible: lower --max-running-requests"
        if self._shape(hello).nbytes > _MAX_TABLE_BYTES:
            return "the speculation table would be too large: lower the server's --max-running-requests or the fan-out"
        if not any(self._is_possible(kind, hello) for kind in hello.channels):
            return f"none of the channels {hello.channels} works between these hosts: allow zmq"
        if len(self._registry) >= _MAX_VERIFIERS:
            return f"the service has {_MAX_VERIFIERS} verifiers already: start another service"
        return mismatch(hello.target, self._identity.draft)

    def _is_possible(self, kind: str, hello: Hello) -> bool:
        same_host = bool(self._identity.host) and hello.host == self._identity.host
        return kind == "zmq" or (kind == "shm" and same_host)

    def _shape(self, hello: Hello) -> TableShape:
        engine, num_outcomes = self._speculator.engine, self._speculator.planner.num_outcomes
        return TableShape(hello.max_slots, num_outcomes, engine.lookahead, hello.num_kept, engine.max_slots)

    def _attach(self, hello: Hello) -> tuple[ChannelOffer, Verifier]:
        """In the model thread: make the data channel and serve it."""
        kind = next(kind for kind in hello.channels if self._is_possible(kind, hello))
        shape = self._shape(hello)
        channel: SpeculatorChannel
        if kind == "shm":
            channel = memory = ShmSpeculatorChannel.create(shape, hello.incarnation, self._doorbell_address)
            offer = ChannelOffer(kind, memory.address, memory.doorbell_address)
        else:
            channel = self._hub.channel(shape, hello.incarnation)
            offer = ChannelOffer(kind, self._hub.endpoint, "")
        self._connections += 1
        verifier = Verifier(self._connections, hello.incarnation, hello.name, shape, channel)
        channel.beat()
        self._speculator.attach(verifier)
        return offer, verifier

    def _mark_mapped(self, incarnation: int) -> None:
        self._mapped.add(incarnation)
        channel = self._registry[incarnation].channel
        if isinstance(channel, ShmSpeculatorChannel):
            self._loop.post(channel.unlink)

    def _detach(self, verifier: Verifier) -> None:
        self._mapped.discard(verifier.incarnation)
        self._loop.post(lambda: self._speculator.detach(verifier))
