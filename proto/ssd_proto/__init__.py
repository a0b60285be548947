"""What the verifier and the speculator agree on: messages, records, the speculation table, channels.

Depends on msgspec, numpy and pyzmq only and imports nothing else of this project.
"""

PROTOCOL_VERSION = 2
"""Raised with every change of a message, a record or the table layout; both sides must have the same."""
