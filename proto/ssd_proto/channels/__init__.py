"""Transports of the data channel (`ssd_proto.channel`), by the kind that is named in the handshake.

| kind | where | module |
|---|---|---|
| `shm` | both processes on one host | `ssd_proto.channels.shm` |
| `zmq` | anywhere | `ssd_proto.channels.zmq` |
"""

from typing import Final

CHANNEL_KINDS: Final = ("shm", "zmq")
"""Best first."""
