"""Control messages (ZeroMQ, msgpack through msgspec). One tagged union for each direction.

A verifier says `Hello` and gets `Welcome` or `Refusal`.  It then maps the offered data channel, says
`Attached`, and from then on `Ping` at least every `Welcome.heartbeat_s`; a verifier that is silent for
`Welcome.expiry_s` is detached with all its sequences.  `Bye` ends the connection at once.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Incarnation = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Random number that names one connection (verifier) or one start (service); see `ssd_proto.host.new_incarnation`."""


class ModelFingerprint(msgspec.Struct, frozen=True, array_like=True):
    """What must agree between target and draft."""

    path: str
    architecture: str
    vocab_size: int
    """Entries of the model's logits, without padding."""
    tokenizer: str
    """Digest of the token -> id map; empty if the model has no tokenizer (then it is not compared)."""


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """Verifier -> service: first message of a connection; each connection has a new incarnation."""

    version: int
    incarnation: Incarnation
    name: str
    """Host, process and number of the verifier: one that says hello anew has given its older connections up."""
    host: str
    """Boot identity of the verifier's host; shared memory is offered only to the same host."""
    target: ModelFingerprint
    lookahead: int
    max_slots: int
    """Slots are 0..max_slots-1 (the verifier's request-pool indices)."""
    context_length: int
    num_kept: int
    """m: probabilities wanted per sampled token; must be the service's."""
    channels: list[str]
    """Acceptable channel kinds, best first."""


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """Verifier -> service: the data channel is mapped (shared memory may lose its name now)."""

    incarnation: Incarnation


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Verifier -> service: still here."""

    incarnation: Incarnation


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """Verifier -> service: close all sequences and the data channel."""

    incarnation: Incarnation


class InfoRequest(msgspec.Struct, frozen=True, tag="info"):
    """Anybody -> service: what do you serve?"""

    version: int


VerifierMessage = Hello | Attached | Ping | Bye | InfoRequest


class ChannelOffer(msgspec.Struct, frozen=True):
    """How to reach the data channel. ``address``: name of the shared memory or ZeroMQ endpoint."""

    kind: str
    address: str
    doorbell: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Service -> verifier: accepted."""

    version: int
    incarnation: Incarnation
    """The service's own; another one means that the service was restarted."""
    draft: ModelFingerprint
    lookahead: int
    num_outcomes: int
    num_kept: int
    max_sequences: int
    context_length: int
    channel: ChannelOffer
    heartbeat_s: float
    expiry_s: float


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Service -> verifier: not accepted. ``reason`` is one sentence that says what to change."""

    version: int
    reason: str


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Service -> verifier. ``known`` is false if the verifier must say `Hello` again."""

    incarnation: Incarnation
    known: bool


class Info(msgspec.Struct, frozen=True, tag="info"):
    """Service -> anybody."""

    version: int
    incarnation: Incarnation
    draft: ModelFingerprint
    lookahead: int
    fan_out: list[int]
    num_kept: int
    max_sequences: int
    context_length: int
    device: str
    channels: list[str]
    num_verifiers: int
    """Attached verifiers."""


ServiceMessage = Welcome | Refusal | Pong | Info
