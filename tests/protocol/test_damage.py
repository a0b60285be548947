"""What a broken or hostile peer can do to a channel: end it with an error that says so, nothing worse."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
import zmq
from links import SHAPE, Link, eventually, make_link, outcome_batch

from ssd_proto.channels.memory import Segment
from ssd_proto.channels.publication import entries_frame, keys_frame
from ssd_proto.channels.shm import ShmSpeculatorChannel, ShmVerifierChannel
from ssd_proto.channels.zmq import ZmqHub, ZmqVerifierChannel
from ssd_proto.doorbell import Doorbell
from ssd_proto.errors import ChannelClosed, ChannelFull, ConfigError, ProtocolError
from ssd_proto.records import DraftProbs, Entries, OpenSequence
from ssd_proto.table import TableShape

pytestmark = pytest.mark.filterwarnings("error")
Connect = Callable[[], ZmqVerifierChannel]


@pytest.fixture
def shm() -> Iterator[Link]:
    link = make_link("shm", ring_bytes=4096)
    yield link
    link.close()


@pytest.fixture
def hub() -> Iterator[ZmqHub]:
    hub = ZmqHub("tcp://127.0.0.1:0")
    yield hub
    hub.close()


@pytest.fixture
def connect(hub: ZmqHub) -> Iterator[Connect]:
    """Make verifiers' ends at the ``hub``, of incarnation 9."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(ZmqVerifierChannel(hub.endpoint, SHAPE, 9)))


@pytest.mark.parametrize("byte", [0, 4, 7, 8, 12, 16, 30, 63])
def test_damaged_record(shm: Link, byte: int) -> None:
    """One changed bit anywhere in a record ends the channel, again and again, and yields no event."""
    shm.verifier.post(outcome_batch(SHAPE, [0, 1]))
    shm.speculator._ring._data[byte] ^= 4
    for _ in range(2):
        with pytest.raises(ProtocolError):
            shm.speculator.poll()


@pytest.mark.parametrize("tail", [-8, 4097, 2**62])
def test_damaged_counters(shm: Link, tail: int) -> None:
    shm.verifier._words[16] = tail
    with pytest.raises(ProtocolError):
        shm.speculator.poll()
    shm.verifier._words[24] = 12345
    with pytest.raises(ProtocolError):
        shm.verifier.post(outcome_batch(SHAPE, [0]))


def test_record_announced_but_not_written(shm: Link) -> None:
    shm.verifier._words[16] = 64
    with pytest.raises(ProtocolError):
        shm.speculator.poll()


def test_prompt_larger_than_the_ring(shm: Link) -> None:
    """Is refused as any other back-pressure, and does not spoil what follows."""
    longest = (4096 - 16 - 52) // 4
    for _ in range(2):
        with pytest.raises(ChannelFull):
            shm.verifier.open_sequence(0, 0, np.arange(longest + 1))
        shm.verifier.open_sequence(0, 0, np.arange(longest))
        with pytest.raises(ChannelFull):
            shm.verifier.close_sequence(0, 0)
        event = shm.next_event()
        assert isinstance(event, OpenSequence)
        assert len(event.tokens) == longest
        shm.verifier.close_sequence(0, 0)
        assert shm.next_event() == (0, 0)


def test_doorbell_only_when_asleep(shm: Link) -> None:
    shm.verifier.close_sequence(0, 0)
    assert not shm.doorbell.wait(0.01)
    shm.speculator.set_sleeping(True)
    shm.verifier.close_sequence(0, 0)
    assert shm.doorbell.wait(5.0)
    shm.speculator.set_sleeping(False)
    shm.verifier.close_sequence(0, 0)
    assert not shm.doorbell.wait(0.01)


def test_attach_checks_what_was_agreed() -> None:
    channel = ShmSpeculatorChannel.create(SHAPE, 77, "", ring_bytes=4096)
    try:
        for shape, incarnation in (
            (SHAPE, 78),
            (TableShape(6, 5, 5, 3, 7), 77),
            (TableShape(6, 6, 4, 3, 7), 77),
            (TableShape(7, 5, 4, 3, 7), 77),
            (TableShape(6, 5, 4, 2, 7), 77),
            (TableShape(6, 5, 4, 3, 8), 77),
            (TableShape(6, 5, 4, 7, 3), 77),
            (TableShape(6, 5, 4), 77),
        ):
            with pytest.raises(ProtocolError, match="agreed"):
                ShmVerifierChannel.attach(channel.address, shape, incarnation, "")
        for name in ("/etc/passwd", "sglang_ssd_../../etc/passwd", "other", "sglang_ssd_\0"):
            with pytest.raises(ProtocolError, match="not the name"):
                ShmVerifierChannel.attach(name, SHAPE, 77, "")
        for size in (0, 100, 5000):
            path = Path("/dev/shm") / f"sglang_ssd_{os.getpid()}_small{size}"
            path.write_bytes(bytes(size))
            try:
                with pytest.raises(ProtocolError):
                    ShmVerifierChannel.attach(path.name, SHAPE, 77, "")
            finally:
                path.unlink()
    finally:
        channel.close()
    with pytest.raises(ChannelClosed):
        ShmVerifierChannel.attach(channel.address, SHAPE, 77, "")


def test_not_enough_memory() -> None:
    """Shows at creation as a sentence, not as a bus error in the middle of a round; no name is left."""
    system = os.statvfs("/dev/shm")
    with pytest.raises(ConfigError, match="--shm-size"):
        Segment.create(system.f_blocks * system.f_frsize + (1 << 20))
    assert not list(Path("/dev/shm").glob(f"sglang_ssd_{os.getpid()}_*"))


def test_a_dropped_segment_leaves_no_descriptor() -> None:
    """A connection that was replaced before anybody used it is only dropped, not closed."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        segment = Segment.create(4096)
        attached = Segment.attach(segment.name)
        segment.unlink()
        del segment, attached
    assert len(os.listdir("/proc/self/fd")) <= before


def test_table_held_by_somebody_survives_close() -> None:
    """Closing while an array of the table is in use neither raises nor pulls the memory away."""
    link = make_link("shm")
    entries = link.verifier.table._entries
    link.close()
    assert int(entries.sum()) == 0


def test_strangers_at_the_hub(hub: ZmqHub, connect: Connect) -> None:
    """Peers without a channel, or with too many frames, are counted and harm nobody."""
    channel = hub.channel(SHAPE, 9)
    verifier = connect()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(hub.endpoint)
        for frames in ([b""], [b"x" * 1000], [b"a", b"b", b"c"]):
            stranger.send_multipart(frames)
        while hub.num_strange < 3:
            assert hub.wait(5.0)
            assert channel.poll() is None
    verifier.close_sequence(1, 2)
    assert eventually(channel.poll) == (1, 2)
    channel.close()


@pytest.mark.parametrize("record", [b"", b"x", bytes(16), bytes(24), b"\xff" * 400])
def test_nonsense_instead_of_records(hub: ZmqHub, connect: Connect, record: bytes) -> None:
    channel = hub.channel(SHAPE, 9)
    verifier = connect()
    verifier._socket.send(record)
    for _ in range(2):
        with pytest.raises(ProtocolError):
            eventually(channel.poll)
    channel.close()


def test_lost_record(hub: ZmqHub, connect: Connect) -> None:
    """A gap in the numbers ends the channel: the speculator must not go on with half of what was posted."""
    channel = hub.channel(SHAPE, 9)
    verifier = connect()
    verifier.close_sequence(0, 0)
    verifier._sequence += 1
    verifier.close_sequence(0, 1)
    assert eventually(channel.poll) == (0, 0)
    with pytest.raises(ProtocolError):
        eventually(channel.poll)


def test_second_connection_of_an_incarnation(hub: ZmqHub, connect: Connect) -> None:
    """Takes the place of the first (a broken connection that is not known to be broken yet), but not its history."""
    channel = hub.channel(SHAPE, 9)
    first = connect()
    first.close_sequence(0, 0)
    assert eventually(channel.poll) == (0, 0)
    second = connect()
    second.close_sequence(0, 0)
    with pytest.raises(ProtocolError):
        eventually(channel.poll)


def test_closed_hub() -> None:
    """Its channels say so instead of failing somewhere in ZeroMQ."""
    hub = ZmqHub("tcp://127.0.0.1:0")
    channel = hub.channel(SHAPE, 9)
    hub.close()
    hub.close()
    channel.begin(np.array([0]), np.array([0]), np.ones((1, 5), np.int64))
    for use in (channel.poll, channel.pending, channel.beat, channel.flush):
        with pytest.raises(ChannelClosed):
            use()
    channel.close()


def test_hub_on_a_taken_port(hub: ZmqHub) -> None:
    with pytest.raises(ConfigError, match="already in use"):
        ZmqHub(hub.endpoint)


def test_hostile_publications(hub: ZmqHub, connect: Connect) -> None:
    """Every index and size is checked before the mirror is touched; valid frames before and after do arrive."""
    at, key, tokens = np.array([0]), np.array([5]), np.ones((1, 4), int)

    def entry(slot: int = 0, round_: int = 0, column: int = 0, depth: int = 1, q: DraftProbs | None = None) -> bytes:
        slots, rounds, columns, depths = (np.array([value]) for value in (slot, round_, column, depth))
        return entries_frame(Entries(slots, at, rounds, columns, key, depths, at > 0, tokens, q))

    def probs(row: int, *size: int) -> DraftProbs:
        return DraftProbs(np.array([row]), np.ones((1, *size), np.int64))

    hostile = [
        *(entry(slot=slot, q=q) for slot in (-1, 6, 2**31 - 1) for q in (None, probs(0, 4, 3))),
        *(entry(column=column, q=q) for column in (-1, 6) for q in (None, probs(0, 4, 3))),
        *(entry(depth=depth, q=q) for depth in (-1, 5) for q in (None, probs(0, 4, 3))),
        entry(round_=-1),
        entry()[:-1],
        entry() + b"\0",
        *(entry(q=probs(row, 4, 3)) for row in (-1, 7, 2**31 - 1)),
        *(entry(q=probs(0, *size)) for size in ((4, 2), (4, 4), (3, 3), (5, 3), (4, 0))),
        entry(q=probs(0, 4, 3))[:-1],
        entry(q=probs(0, 4, 3)) + b"\0",
        b"\x02" + entry(q=probs(0, 4, 3))[1:],
        b"\x03" + entry()[1:],
        entries_frame(Entries(at, at, at, at, key, at, at > 0, np.ones((1, 5), int))),
        keys_frame(at, at, np.ones((1, 4), np.int64)),
        keys_frame(at, at, np.ones((1, 6), np.int64)),
        keys_frame(at - 1, at, np.ones((1, 5), np.int64)),
        keys_frame(at, at - 1, np.ones((1, 5), np.int64)),
        b"\x04" + entry()[1:],
        b"\x03" + bytes(15),
        b"x",
        b"\x02\0\0\0\xff\xff\xff\xff\x04\0\0\0" + bytes(4),
        b"\x02\0\0\0\xff\xff\xff\x7f\x04\0\0\0" + bytes(4),
        b"\x03\0\0\0\xff\xff\xff\x7f\x04\0\0\0" + bytes(4),
    ]
    for frame in hostile:
        channel = hub.channel(SHAPE, 9)
        verifier = connect()
        verifier.close_sequence(0, 0)
        eventually(channel.poll)
        hub.send(9, [frame])

        def refused(verifier: ZmqVerifierChannel = verifier) -> bool | None:
            try:
                verifier.refresh()
            except ProtocolError:
                return True
            return None

        eventually(refused)
        for part in ("_entries", "_keys", "_probs"):
            assert not getattr(verifier.table, part).any()
        verifier.close()
        channel.close()


def test_all_entries_at_once_are_not_too_much(hub: ZmqHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier's limit on messages makes room for the largest write that a table of its shape allows."""
    monkeypatch.setattr("ssd_proto.channels.zmq._MAX_MESSAGE_BYTES", 1000)
    shape = TableShape(num_slots=8, num_outcomes=10, lookahead=4, num_kept=64, num_rows=8)
    channel = hub.channel(shape, 9)
    slots, columns = (grid.ravel() for grid in np.meshgrid(np.arange(8), np.arange(10)))
    rounds, depths = np.zeros(80, int), np.full(80, 4)
    q = DraftProbs(slots, np.ones((80, 4, 64), np.int64))
    with closing(ZmqVerifierChannel(hub.endpoint, shape, 9)) as verifier:
        verifier.close_sequence(0, 0)
        eventually(channel.poll)
        tokens = np.ones((80, 4), int)
        channel.write(Entries(slots, rounds, rounds, columns, columns, depths, depths > 0, tokens, q))
        channel.flush()

        def arrived() -> bool | None:
            verifier.refresh()
            return bool(verifier.table._probs[:, 0, :10].all()) or None

        eventually(arrived)


def test_flood(hub: ZmqHub, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that posts without end while only others are polled loses its channel, not the service's memory."""
    monkeypatch.setattr("ssd_proto.channels.zmq._QUEUED_BYTES", 100_000)
    flooded, other = hub.channel(SHAPE, 9), hub.channel(SHAPE, 10)
    verifier = connect()
    for _ in range(20):
        verifier.open_sequence(0, 0, np.arange(10_000))

    def over() -> bool | None:
        assert other.poll() is None
        return flooded._queued_bytes > 100_000 or None

    eventually(over)
    with pytest.raises(ProtocolError):
        flooded.poll()


def test_hub_wakes_for_messages_and_for_the_doorbell(hub: ZmqHub, connect: Connect) -> None:
    """One bounded sleep for both kinds of channel."""
    doorbell = Doorbell()
    shm = ShmSpeculatorChannel.create(SHAPE, 3, doorbell.address)
    shm_verifier = ShmVerifierChannel.attach(shm.address, SHAPE, 3, doorbell.address)
    channel = hub.channel(SHAPE, 9)
    verifier = connect()
    assert not hub.wait(0.01, doorbell)
    verifier.close_sequence(0, 0)
    assert hub.wait(5.0, doorbell)
    assert eventually(channel.poll) == (0, 0)
    shm.set_sleeping(True)
    shm_verifier.close_sequence(1, 1)
    assert hub.wait(5.0, doorbell)
    assert shm.poll() == (1, 1)
    assert not hub.wait(0.01, doorbell)
    assert not hub.wait(0.0)
    with pytest.raises(ProtocolError, match="already"):
        hub.channel(SHAPE, 9)
    for resource in (shm, shm_verifier, channel, doorbell):
        resource.close()


def test_connecting_to_nobody() -> None:
    with pytest.raises(ChannelClosed, match="not reached"):
        ZmqVerifierChannel("tcp://127.0.0.1:9", SHAPE, 9, connect_timeout_s=0.05)
    with pytest.raises(ConfigError, match="endpoint"):
        ZmqVerifierChannel("nonsense", SHAPE, 9)
