"""Errors of the protocol. Each name says what the caller can do about it."""

from __future__ import annotations


class SSDError(Exception):
    """Base of all errors of this project that a caller may want to handle."""


class ConfigError(SSDError, ValueError):
    """The user gave something that cannot work. The message is one sentence that says what to change."""


class Refused(ConfigError):
    """The other side answered the handshake with a refusal; the message is its reason."""


class ProtocolError(SSDError):
    """A message or a record that the protocol does not allow. The connection is of no further use."""


class ChannelClosed(SSDError):
    """The other side is gone. Degrade to plain decoding and reconnect."""


class ChannelFull(SSDError):
    """The other side does not keep up and the message was not sent. Open the sequences anew later."""


class DeadlineExceeded(SSDError):
    """No answer in time. Try again later; nothing is lost."""
