"""The verifier's half of a round: post outcomes, look speculations up, wait for missing ones, degrade.

`Speculation` exists on TP rank 0 only.  It deals in slots and token ids; of SGLang's requests it reads
``rid``, ``origin_input_ids`` and ``output_ids``, and `RequestSampling` reads the rest.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_ssd.client import Connection, SpeculatorClient, say_hello
from sglang_ssd.flags import verifier_config
from sglang_ssd.metrics import VerifierMetrics
from sglang_ssd.request_sampling import RequestSampling
from sglang_ssd.sessions import Sessions
from ssd_proto.channel import VerifierChannel
from ssd_proto.errors import ChannelClosed, ChannelFull, ProtocolError
from ssd_proto.fingerprint import fingerprint
from ssd_proto.records import Proposals, pack_probs, unpack_probs
from ssd_proto.trace import NO_TRACE, Trace

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_ssd.handoff import HandedOver

logger = logging.getLogger(__name__)

_LEAST_PATIENCE_S = 0.001


class Request(Protocol):
    """What is read of SGLang's ``Req``."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]


def connect(
    server_args: ServerArgs,
    lookahead: int,
    max_slots: int,
    context_length: int,
    vocab_size: int,
    knows_law: bool,
    is_narrow: bool,
    trace: Trace,
) -> Speculation:
    """Start the connection to the speculator that the server's options name; waits a little for it.

    ``knows_law``: see `RequestSampling`; ``is_narrow``: see `Speculation`.
    """
    config = verifier_config(server_args)
    assert config.endpoint is not None, "the launcher starts an embedded service when none is given"
    metrics = VerifierMetrics()
    target = fingerprint(server_args.model_path, server_args.revision, server_args.trust_remote_code)
    hello = say_hello(target, lookahead, max_slots, context_length, config.num_kept, config.channels)
    client = SpeculatorClient(config.endpoint, hello, metrics.attached)
    atexit.register(client.close)
    client.start(config.connect_timeout_s)
    shares_noise = config.verification == "shared_noise"
    sampling = RequestSampling(shares_noise, config.num_kept, knows_law)
    sessions = Sessions(max_slots, lookahead)
    deadline_s = config.deadline_ms / 1000
    return Speculation(client, sessions, metrics, sampling, deadline_s, vocab_size, is_narrow, trace)


class Speculation:
    """Speculations for the verifier's slots, from whatever speculator is attached at the moment.

    A deadline that passes without any answer makes the speculator suspect: rounds do not wait for it any
    more until it shows a sign of life.  So a dead or stuck speculator costs one deadline, not one per round.
    One that lives but is too slow loses half of the patience with every round that waited in vain, and wins it
    back with rounds that were answered.

    Any failure of the channel has one cure: the connection is given up and made anew, whereupon the service
    forgets this verifier's sequences and they are opened again with all that is committed.

    Args:
        is_narrow: whether a round may verify fewer than K drafts where no sequence has more, and none at all.
    """

    def __init__(
        self,
        client: SpeculatorClient,
        sessions: Sessions,
        metrics: VerifierMetrics,
        sampling: RequestSampling,
        deadline_s: float,
        vocab_size: int,
        is_narrow: bool = False,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.sampling = sampling
        self._client = client
        self._sessions = sessions
        self._metrics = metrics
        self._deadline_s = self._patience_s = deadline_s
        self._vocab_size, self._is_narrow = vocab_size, is_narrow
        self._places = np.arange(sessions.lookahead)
        self._trace = trace
        self._connection: Connection | None = None
        self._suspect_since: float | None = None

    # -- lifecycle of sequences --------------------------------------------------------------------

    def open(self, slots: NDArray[np.int64], requests: Sequence[Request]) -> None:
        """Open the sequences of a prefill batch; a later chunk of an open prompt changes nothing."""
        self._refresh()
        for slot, request in zip(slots.tolist(), requests, strict=True):
            if self._sessions.track(slot, request.rid):
                self._open(slot, request, [*request.origin_input_ids, *request.output_ids])

    def close(self, slots: Sequence[int]) -> None:
        """The requests of ``slots`` are gone. Slots that were never opened are ignored."""
        self._tell(lambda channel: self._sessions.close(channel, slots))
        self._sessions.close(None, slots)
        self._metrics.show()  # there may be no round for long

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

    def outputs(self, slots: NDArray[np.int64], requests: Sequence[Request]) -> list[list[int]]:
        """Output tokens so far, [b], with those that SGLang has not put into ``output_ids`` yet."""
        return [
            list(request.output_ids)
            + self._sessions.uncommitted_tail(slot, len(request.origin_input_ids) + len(request.output_ids))
            for slot, request in zip(slots.tolist(), requests, strict=True)
        ]

    def speculate(
        self, slots: NDArray[np.int64], requests: Sequence[Request]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64] | None]:
        """Drafts [b, n] to verify next; where there are fewer, the rest is padding.

        And the words of q [b, n, m] that they were sampled from (`ssd_proto.records.pack_probs`): 0 where they were
        not; None if none was. n is K, or that of the longest if rounds may be narrow. Waits for missing rows at most
        until the deadline, and not at all for a suspect speculator.
        """
        sessions = self._sessions
        if self._refresh():
            self._reopen(slots, requests)
        depth, tokens, kind, q = self._proposals(slots)
        # Padding is verified like any draft; a repeated token is as good as another and exact all the same.
        # A draft model with a larger padded vocabulary may name tokens that the target does not have.
        is_padding = self._places >= depth[:, None]
        is_padding |= tokens >= self._vocab_size
        drafts = np.where(is_padding, sessions.bonus(slots)[:, None], tokens)
        sessions.proposed(slots, drafts, depth, kind)
        if q is not None:
            q = within_vocabulary(q, self._vocab_size)
            q[is_padding] = 0
        if self._is_narrow and (longest := int(depth.max(initial=0))) < sessions.lookahead:
            return drafts[:, :longest], None if q is None else q[:, :longest]
        return drafts, q

    # -- helpers -----------------------------------------------------------------------------------

    @property
    def _channel(self) -> VerifierChannel | None:
        return self._connection.channel if self._connection is not None else None

    def _refresh(self) -> bool:
        """Take over a new connection, drop a lost one; True if a speculator is attached."""
        if self._connection is not None and self._connection.lost:
            self._connection.channel.close()
            self._connection = None
            self._sessions.lose_all()
        if self._connection is None:
            self._connection = self._client.take()
            self._suspect_since, self._patience_s = None, self._deadline_s
        return self._connection is not None

    def _tell(self, post: Callable[[VerifierChannel], None]) -> None:
        """Post something, if there is somebody to tell; a failure ends the connection."""
        if self._connection is None or self._connection.lost:
            return
        try:
            post(self._connection.channel)
        except (ChannelFull, ChannelClosed, ProtocolError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        assert self._connection is not None
        logger.warning("lost step with the speculator (%s); connecting anew", error)
        self._client.give_up(self._connection)
        self._refresh()

    def _open(self, slot: int, request: Request, tokens: Sequence[int]) -> None:
        sampling = self.sampling.sampling(request)
        self._tell(lambda channel: self._sessions.open(channel, slot, np.asarray(tokens, np.int32), sampling))

    def _post(self, slots: NDArray[np.int64]) -> None:
        self._tell(lambda channel: self._sessions.post(channel, slots))

    def _reopen(self, slots: NDArray[np.int64], requests: Sequence[Request]) -> None:
        """Open running sequences that the speculator does not know, with all that is committed."""
        is_open = self._sessions.is_open[slots]
        if np.count_nonzero(is_open) == len(slots):
            return
        closed = np.flatnonzero(~is_open)
        for row in closed.tolist():
            slot, request = int(slots[row]), requests[row]
            known = [*request.origin_input_ids, *request.output_ids]
            committed = known + self._sessions.uncommitted_tail(slot, len(known))
            self._open(slot, request, committed[:-1])
            last = np.array([slot]), np.array([len(committed) - 1]), np.array(committed[-1:])
            self._sessions.first_tokens(*last)
        self._post(slots[closed])

    def _proposals(self, slots: NDArray[np.int64]) -> Proposals:
        """What the speculator has for ``slots`` [b], as it came; nothing for those that it does not know."""
        channel, is_open = self._channel, self._sessions.is_open[slots]
        num_open = int(np.count_nonzero(is_open)) if channel is not None else 0
        if channel is not None and num_open == len(slots):
            return self._look_up(channel, slots, 0) or self._nothing(len(slots))
        proposals = self._nothing(len(slots))
        if channel is None or num_open == 0:
            self._metrics.round(proposals, 0.0, False)
            return proposals
        found = self._look_up(channel, slots[is_open], len(slots) - num_open)
        if found is None:
            return proposals
        for values, own in zip(proposals[:3], found[:3], strict=True):
            values[is_open] = own
        q = None
        if found.q is not None:
            q = np.zeros((len(slots), *found.q.shape[1:]), np.int64)
            q[is_open] = found.q
        return proposals._replace(q=q)

    def _nothing(self, batch_size: int) -> Proposals:
        tokens = np.zeros((batch_size, self._sessions.lookahead), np.int32)
        return Proposals(np.zeros(batch_size, np.int32), tokens, np.zeros(batch_size, np.int32), None)

    def _look_up(self, channel: VerifierChannel, slots: NDArray[np.int64], num_others: int) -> Proposals | None:
        """The speculations of ``slots``, which are open; None if the channel failed.

        ``num_others``: rows of the round that are not open, for the counters.
        """
        outcomes = self._sessions.outcomes(slots)
        started = time.monotonic()
        num_silent = 0
        try:
            found = channel.lookup(outcomes)
            if num_missing := int(np.count_nonzero(found.depth < 0)):
                with self._trace.span("wait", missing=num_missing):
                    found = channel.wait(outcomes, found, self._patience_s if self._is_trusted(channel) else 0.0)
                num_silent = int(np.count_nonzero(found.depth < 0))
        except (ChannelClosed, ProtocolError) as error:
            self._give_up(error)
            return None
        now = time.monotonic()
        self._suspect_since = now if num_silent == len(slots) else None
        patience = self._patience_s * (0.5 if num_silent else 2.0)
        self._patience_s = min(max(patience, _LEAST_PATIENCE_S), self._deadline_s)
        if num_silent:
            found = found._replace(depth=np.maximum(found.depth, 0))
        self._metrics.round(found, now - started, num_silent > 0, num_others)
        return found

    def _is_trusted(self, channel: VerifierChannel) -> bool:
        """Whether an answer may be hoped for."""
        return self._suspect_since is None or channel.last_beat() > self._suspect_since


def within_vocabulary(q: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """Words [b, K, m] of q without the tokens that the target lacks, renormalised.

    Given that the draft is a token of the target, this is what it was sampled from.
    """
    is_outside = (q & 0xFFFF_FFFF) >= vocab_size
    if not is_outside.any():
        return q
    ids, probs = unpack_probs(q)
    ids, probs = np.where(is_outside, 0, ids), np.where(is_outside, 0, probs)
    total = probs.sum(-1, keepdims=True)
    return pack_probs(ids, np.divide(probs, total, out=np.zeros_like(probs), where=total > 0))
