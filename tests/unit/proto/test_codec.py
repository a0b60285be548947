"""Control messages as bytes: what goes in comes out, and nothing else comes out."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_proto import PROTOCOL_VERSION
from ssd_proto.codec import decode_service_message, decode_verifier_message, encode, peek_version, version_refusal
from ssd_proto.errors import ProtocolError
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

pytestmark = pytest.mark.filterwarnings("error")
ints = st.integers(0, 2**63 - 1)
words = st.text(max_size=20)
models = st.builds(ModelFingerprint, words, words, ints, words)
offers = st.builds(ChannelOffer, words, words, words)
seconds = st.floats(0, 1000)
verifier_messages = st.one_of(
    st.builds(Hello, ints, ints, words, words, models, ints, ints, ints, ints, st.lists(words, max_size=3)),
    *(st.builds(kind, ints) for kind in (Attached, Ping, Bye, InfoRequest)),
)
service_messages = st.one_of(
    st.builds(Welcome, ints, ints, models, ints, ints, ints, ints, ints, offers, seconds, seconds),
    st.builds(Refusal, ints, words),
    st.builds(Pong, ints, st.booleans()),
    st.builds(
        Info, ints, ints, models, ints, st.lists(ints, max_size=5), ints, ints, ints, words, st.lists(words), ints
    ),
)


@given(verifier_messages)
def test_verifier_messages(message: VerifierMessage) -> None:
    assert decode_verifier_message(encode(message)) == message


@given(service_messages)
def test_service_messages(message: ServiceMessage) -> None:
    assert decode_service_message(encode(message)) == message


@given(st.one_of(verifier_messages, service_messages), st.data())
def test_damage(message: VerifierMessage | ServiceMessage, data: st.DataObject) -> None:
    """A changed, cut or lengthened message is another valid one or a `ProtocolError`, never anything else."""
    frame = bytearray(encode(message))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(frame), bytes(frame[:position]), encode(message) + b"\0"):
        for decode in (decode_verifier_message, decode_service_message):
            try:
                decoded = decode(damaged)
            except ProtocolError:
                continue
            assert decode(encode(decoded)) == decoded
        peek_version(damaged)


@given(st.binary(max_size=200))
def test_nonsense(frame: bytes) -> None:
    for decode in (decode_verifier_message, decode_service_message):
        with pytest.raises(ProtocolError):
            decode(frame)


@pytest.mark.parametrize("frame", [b"\x91" * 100_000, b"\x81\xa4type" + b"\x91" * 100_000])
def test_deep_nesting(frame: bytes) -> None:
    for decode in (decode_verifier_message, decode_service_message):
        with pytest.raises(ProtocolError):
            decode(frame)
    assert peek_version(frame) is None


def test_each_direction_has_its_own_messages() -> None:
    with pytest.raises(ProtocolError):
        decode_verifier_message(encode(Pong(1, known=True)))
    with pytest.raises(ProtocolError):
        decode_service_message(encode(Ping(1)))
    hello = msgspec.to_builtins(Hello(1, 2, "", "", ModelFingerprint("", "", 1, ""), 1, 1, 1, 1, []))
    with pytest.raises(ProtocolError, match="surprise"):
        decode_verifier_message(msgspec.msgpack.encode({**hello, "surprise": 1}))


@pytest.mark.parametrize("incarnation", [-1, 2**63, 2**64 - 1])
def test_incarnation_fits_a_signed_word(incarnation: int) -> None:
    with pytest.raises(ProtocolError, match="incarnation"):
        decode_verifier_message(encode(Ping(incarnation)))


def test_versions() -> None:
    assert peek_version(encode(InfoRequest(7))) == 7
    assert peek_version(msgspec.msgpack.encode({"type": "of another time", "version": 9, "x": [1]})) == 9
    assert peek_version(encode(Ping(1))) is None
    assert peek_version(b"") is None
    refusal = version_refusal(9)
    assert refusal.version == PROTOCOL_VERSION
    assert "version 9 " in refusal.reason
    assert f"version {PROTOCOL_VERSION};" in refusal.reason
    with pytest.raises(ProtocolError, match="version 9 "):
        decode_service_message(msgspec.msgpack.encode({"type": "welcome", "version": 9}))
