"""The verifier's half of a round: post outcomes, look speculations up, wait for missing ones, degrade.

`Speculation` exists on TP rank 0 only.  It deals in slots and token ids; of SGLang's requests it reads
``rid``, ``origin_input_ids`` and ``output_ids``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_ssd.client import Connection, SpeculatorClient, say_hello
from sglang_ssd.flags import verifier_config
from sglang_ssd.metrics import VerifierMetrics
from sglang_ssd.sessions import Sessions
from ssd_proto.channel import VerifierChannel
from ssd_proto.errors import ChannelClosed, ChannelFull, ProtocolError
from ssd_proto.records import Proposals

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_ssd.handoff import HandedOver

logger = logging.getLogger(__name__)

_REOPEN_AFTER_S = 1.0


class Request(Protocol):
    """What is read of SGLang's ``Req``."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]


def connect(
    server_args: ServerArgs, lookahead: int, max_slots: int, context_length: int, vocab_size: int
) -> Speculation:
    """Start the connection to the speculator that the server's options name; waits a little for it."""
    config = verifier_config(server_args)
    assert config.endpoint is not None, "the launcher starts an embedded service when none is given"
    hello = say_hello(server_args.model_path, lookahead, max_slots, context_length, config.channels)
    client = SpeculatorClient(config.endpoint, hello)
    client.start(config.connect_timeout_s)
    sessions = Sessions(max_slots, lookahead)
    return Speculation(client, sessions, VerifierMetrics(), config.deadline_ms / 1000, vocab_size)


class Speculation:
    """Speculations for the verifier's slots, from whatever speculator is attached at the moment.

    A deadline that passes without any answer makes the speculator suspect: rounds do not wait for it any
    more until it answers again.  So a dead or stuck speculator costs one deadline, not one per round.
    """

    def __init__(
        self,
        client: SpeculatorClient,
        sessions: Sessions,
        metrics: VerifierMetrics,
        deadline_s: float,
        vocab_size: int,
    ) -> None:
        self._client = client
        self._sessions = sessions
        self._metrics = metrics
        self._deadline_s = deadline_s
        self._vocab_size = vocab_size
        self._connection: Connection | None = None
        self._is_suspect = False
        self._reopen_at = 0.0

    # -- lifecycle of sequences --------------------------------------------------------------------

    def open(self, slots: NDArray[np.int64], requests: Sequence[Request]) -> None:
        """Open the sequences of a prefill batch; a later chunk of an open prompt changes nothing."""
        self._refresh()
        for slot, request in zip(slots.tolist(), requests, strict=True):
            if self._sessions.track(slot, request.rid):
                self._open(slot, [*request.origin_input_ids, *request.output_ids])

    def close(self, slots: Sequence[int]) -> None:
        """The requests of ``slots`` are gone. Slots that were never opened are ignored."""
        try:
            self._sessions.close(self._channel, slots)
        except (ChannelFull, ChannelClosed) as error:
            self._out_of_step(error)

    def close_all(self) -> None:
        """All requests are gone."""
        self.close(range(len(self._sessions.is_open)))

    # -- the round ---------------------------------------------------------------------------------

    def outcome(self, outcome: HandedOver) -> None:
        """Record an outcome and post it; this is what drives the speculator on."""
        if outcome.prefill_lengths is not None:
            self._sessions.first_tokens(outcome.slots, outcome.prefill_lengths, outcome.bonus)
        else:
            self._sessions.verified(outcome.slots, outcome.num_accepted, outcome.bonus)
        self._post(outcome.slots)

    def speculate(self, slots: NDArray[np.int64], requests: Sequence[Request]) -> NDArray[np.int32]:
        """Drafts [b, K] to verify next; where there are fewer, the rest is padding.

        Waits for missing rows at most until the deadline, and not at all for a suspect speculator.
        """
        sessions = self._sessions
        if self._refresh():
            self._reopen(slots, requests)
        proposals = Proposals(
            np.zeros(len(slots), np.int32),
            np.zeros((len(slots), sessions.lookahead), np.int32),
            np.zeros(len(slots), np.int32),
        )
        rows = np.flatnonzero(sessions.is_open[slots])
        if self._channel is not None and len(rows):
            self._look_up(self._channel, slots[rows], rows, proposals)
        else:
            self._metrics.round(proposals, 0.0, False)
        # Padding is verified like any draft; a repeated token is as good as another and exact all the same.
        # A draft model with a larger padded vocabulary may name tokens that the target does not have.
        is_padding = np.arange(sessions.lookahead) >= proposals.depth[:, None]
        is_padding |= proposals.tokens >= self._vocab_size
        drafts = np.where(is_padding, sessions.outcomes(slots)["bonus"][:, None], proposals.tokens)
        sessions.proposed(slots, drafts, proposals.depth, proposals.kind)
        return drafts

    # -- helpers -----------------------------------------------------------------------------------

    @property
    def _channel(self) -> VerifierChannel | None:
        return self._connection.channel if self._connection is not None else None

    def _refresh(self) -> bool:
        """Take over a new connection, drop a lost one; True if a speculator is attached."""
        newest = self._client.connection
        if self._connection is not None and (self._connection.lost or newest is not self._connection):
            self._connection.channel.close()
            self._connection = None
            self._sessions.lose_all()
            self._metrics.disconnected()
        if self._connection is None and newest is not None and not newest.lost:
            self._connection = newest
            self._is_suspect = False
            self._reopen_at = 0.0
            self._metrics.connected()
        return self._connection is not None

    def _open(self, slot: int, tokens: Sequence[int]) -> None:
        if self._channel is not None:
            try:
                self._sessions.open(self._channel, slot, np.asarray(tokens, np.int32))
            except (ChannelFull, ChannelClosed) as error:
                self._out_of_step(error)

    def _reopen(self, slots: NDArray[np.int64], requests: Sequence[Request]) -> None:
        """Open running sequences that the speculator does not know (any more), with all that is committed."""
        closed = np.flatnonzero(~self._sessions.is_open[slots])
        if not len(closed) or time.monotonic() < self._reopen_at:
            return
        for row in closed.tolist():
            slot, request = int(slots[row]), requests[row]
            known = [*request.origin_input_ids, *request.output_ids]
            committed = known + self._sessions.uncommitted_tail(slot, len(known))
            self._open(slot, committed[:-1])
            last = np.array([slot]), np.array([len(committed) - 1]), np.array(committed[-1:])
            self._sessions.first_tokens(*last)
        self._post(slots[closed])

    def _post(self, slots: NDArray[np.int64]) -> None:
        if self._channel is not None:
            try:
                self._sessions.post(self._channel, slots)
            except (ChannelFull, ChannelClosed) as error:
                self._out_of_step(error)

    def _look_up(
        self, channel: VerifierChannel, slots: NDArray[np.int64], rows: NDArray[np.int64], into: Proposals
    ) -> None:
        """Fill ``rows`` of ``into`` with the speculations of ``slots``."""
        outcomes = self._sessions.outcomes(slots)
        started = time.monotonic()
        try:
            found = channel.lookup(outcomes)
            if (found.depth < 0).any():
                found = channel.wait(outcomes, found, 0.0 if self._is_suspect else self._deadline_s)
        except (ChannelClosed, ProtocolError) as error:
            self._out_of_step(error)
            return
        is_silent = found.depth < 0
        if not self._is_suspect:
            self._sessions.note_silence(slots, is_silent)
        self._is_suspect = bool(is_silent.all())
        for target, value in zip(into, found, strict=True):
            target[rows] = value
        np.maximum(into.depth, 0, out=into.depth)
        self._metrics.round(into, time.monotonic() - started, bool(is_silent.any()))

    def _out_of_step(self, error: Exception) -> None:
        """A post got lost, so the speculator's mirror is stale: every sequence is opened anew, a little later."""
        logger.warning("lost step with the speculator (%s); its sequences are opened anew", error)
        self._sessions.lose_all()
        self._reopen_at = time.monotonic() + _REOPEN_AFTER_S
