"""Control messages as bytes: msgpack of the tagged unions in `ssd_proto.messages`, validated by msgspec."""

from __future__ import annotations

import msgspec

from ssd_proto import PROTOCOL_VERSION
from ssd_proto.errors import ProtocolError
from ssd_proto.messages import Refusal, ServiceMessage, VerifierMessage


class _Versioned(msgspec.Struct):
    """What every message that states its version has, whatever else other versions put in it."""

    version: int


_encoder = msgspec.msgpack.Encoder()
_verifier_decoder: msgspec.msgpack.Decoder[VerifierMessage] = msgspec.msgpack.Decoder(VerifierMessage)
_service_decoder: msgspec.msgpack.Decoder[ServiceMessage] = msgspec.msgpack.Decoder(ServiceMessage)
_version_decoder = msgspec.msgpack.Decoder(_Versioned)


def encode(message: VerifierMessage | ServiceMessage) -> bytes:
    """The message as msgpack."""
    return _encoder.encode(message)


def decode_verifier_message(frame: bytes) -> VerifierMessage:
    """A message of a verifier; `ProtocolError` on anything else."""
    try:
        return _verifier_decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of a verifier: {error}") from error


def decode_service_message(frame: bytes) -> ServiceMessage:
    """A message of the service; `ProtocolError` on anything else."""
    try:
        return _service_decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        version = peek_version(frame)
        if version is not None and version != PROTOCOL_VERSION:
            raise ProtocolError(_mismatch("the speculator service", version)) from error
        raise ProtocolError(f"not a message of a speculator service: {error}") from error


def peek_version(frame: bytes) -> int | None:
    """The protocol version that a message states; None if it states none.

    Works for messages of other versions too, whose other fields are not known here.
    """
    try:
        return _version_decoder.decode(frame).version
    except (msgspec.DecodeError, RecursionError):
        return None


def version_refusal(version: int) -> Refusal:
    """The service's answer to a message that states another ``version`` than ours."""
    return Refusal(version=PROTOCOL_VERSION, reason=_mismatch("the verifier", version))


def _mismatch(who: str, version: int) -> str:
    return (
        f"{who} speaks protocol version {version} and we speak version {PROTOCOL_VERSION}; "
        "install the same release of sglang-ssd on both sides"
    )
