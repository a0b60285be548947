"""Channels between real processes: torn reads, and peers that are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import peer
import pytest
from links import channel_names, eventually

from ssd_proto.channel import VerifierChannel
from ssd_proto.channels import CHANNEL_KINDS
from ssd_proto.channels.memory import remove_stale_segments
from ssd_proto.channels.shm import ShmSpeculatorChannel, ShmVerifierChannel
from ssd_proto.channels.zmq import ZmqHub, ZmqVerifierChannel
from ssd_proto.doorbell import Bell, Doorbell
from ssd_proto.errors import ChannelClosed, ChannelFull
from ssd_proto.records import Entries, OpenSequence, outcome_dtype

pytestmark = pytest.mark.filterwarnings("error")
kinds = pytest.mark.parametrize("kind", CHANNEL_KINDS)


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A peer and the first line it prints; killed (SIGKILL) at the latest at the end."""
    command = [sys.executable, str(Path(peer.__file__)), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child, json.loads(child.stdout.readline())
        finally:
            child.kill()


def connect(kind: str, child: subprocess.Popen[str], offer: str) -> VerifierChannel:
    if kind == "zmq":
        return ZmqVerifierChannel(offer, peer.SHAPE, peer.INCARNATION)
    channel = ShmVerifierChannel.attach(offer, peer.SHAPE, peer.INCARNATION, "")
    assert child.stdin is not None
    child.stdin.write("attached\n")
    child.stdin.flush()
    return channel


def post_without_end(channel: VerifierChannel) -> None:
    for number in range(10_000):
        channel.open_sequence(0, number, np.arange(10_000))


@kinds
def test_torn_reads(kind: str) -> None:
    """A process rewrites the table without pause while we read it: what is accepted is right in every word."""
    rng = np.random.default_rng(5)
    accepted, rejected = np.zeros(2, int), 0
    with process("publisher", kind) as (child, offer):
        channel = connect(kind, child, offer)
        eventually(lambda: channel.last_beat() or None)
        start = time.monotonic()
        while time.monotonic() < start + 1 or (min(*accepted, rejected) < 300 and time.monotonic() < start + 20):
            slots = rng.integers(0, peer.SHAPE.num_slots, 32)
            rounds = rng.integers(0, peer.NUM_ROUNDS, 32)
            columns = rng.integers(0, peer.SHAPE.num_outcomes, 32)
            keys = np.array([peer.outcome_of(column) for column in columns])
            channel.refresh()
            depth, is_final, tokens, q = channel.table.read(slots, np.ones(32, int), rounds, keys)
            valid, sampled = depth >= 0, peer.is_sampled(columns)
            accepted += np.array([(valid & sampled).sum(), (valid & ~sampled).sum()])
            rejected += int((~valid).sum())
            expected = peer.expected_tokens(slots, rounds, keys, depth.astype(np.int64))
            assert (tokens[valid] == expected[valid]).all()
            assert (depth[valid] >= 1).all()
            assert (is_final == (valid & (depth % 2 == 0))).all()
            has_q = sampled[:, None] & (np.arange(peer.SHAPE.lookahead) < depth[:, None])
            assert (q == np.where(has_q[:, :, None], peer.expected_probs(expected), 0)).all()
        channel.close()
    assert (accepted >= 300).all(), "sampled and greedy entries"
    assert rejected >= 300


@kinds
def test_speculator_killed(kind: str) -> None:
    """The verifier's wait returns at the deadline, later posts fail politely, and nothing is left behind."""
    with process("publisher", kind) as (child, offer):
        channel = connect(kind, child, offer)
        eventually(lambda: channel.last_beat() or None)
        child.kill()
        child.wait()
        channel.refresh()
        outcomes = np.zeros(2, outcome_dtype(peer.SHAPE.lookahead))
        outcomes["slot"] = [0, 1]
        outcomes["generation"] = 99
        try:
            channel.post(outcomes)
        except ChannelFull:
            assert kind == "zmq", "shared memory has room"
        started = time.monotonic()
        answer = channel.wait(outcomes, channel.lookup(outcomes), 0.2)
        assert 0.2 <= time.monotonic() - started < 2
        assert answer.depth.tolist() == [-1, -1]
        beat = channel.last_beat()
        time.sleep(0.02)
        assert channel.last_beat() == beat
        with pytest.raises(ChannelFull):
            post_without_end(channel)
        channel.close()
    assert not channel_names(child.pid)


@kinds
def test_verifier_killed(kind: str) -> None:
    """The speculator keeps publishing to nobody without an error, and releases everything."""
    hub = ZmqHub("tcp://127.0.0.1:0") if kind == "zmq" else None
    if hub is None:
        channel = ShmSpeculatorChannel.create(peer.SHAPE, peer.INCARNATION, "")
        offer = channel.address
    else:
        channel = hub.channel(peer.SHAPE, peer.INCARNATION)
        offer = hub.endpoint
    with process("verifier", kind, offer) as (child, _):
        if hub is None:
            channel.unlink()
        # What is still on its way in a socket is lost with the process; memory that both have mapped is not.
        events = [eventually(channel.poll) for _ in range(2)] if hub is not None else []
        child.kill()
        child.wait()
    assert not channel_names()
    events = events or [eventually(channel.poll) for _ in range(2)]
    assert isinstance(events[0], OpenSequence)
    assert isinstance(events[1], np.ndarray)
    one = np.array([0])
    for number in range(2000):
        tokens = np.zeros((1, peer.SHAPE.lookahead), int)
        channel.write(Entries(one, one, one + number, one, one, one, one > 0, tokens))
        channel.flush()
        channel.beat()
    assert channel.poll() is None
    channel.close()
    if hub is not None:
        assert hub.num_undelivered > 0
        hub.close()


def test_service_killed_before_the_verifier_attached() -> None:
    """The one case that leaves a name: the next service removes it, and no name of a living one."""
    living = ShmSpeculatorChannel.create(peer.SHAPE, 1, "")
    with process("orphan") as (child, name):
        remove_stale_segments()
        assert channel_names(child.pid) == {name}
        child.kill()
        child.wait()
        assert channel_names(child.pid) == {name}
        assert remove_stale_segments() >= 1
        assert not channel_names(child.pid)
        assert living.address in channel_names()
    with pytest.raises(ChannelClosed):
        ShmVerifierChannel.attach(name, peer.SHAPE, peer.INCARNATION, "")
    living.close()
    assert living.address not in channel_names()


def test_name_of_a_living_creator_that_has_no_lock_yet() -> None:
    """Between the creation of the file and its lock."""
    path = Path("/dev/shm") / f"sglang_ssd_{os.getpid()}_new"
    path.touch()
    try:
        remove_stale_segments()
        assert path.exists()
    finally:
        path.unlink()


def test_lock_protects_creator_of_another_container() -> None:
    """A creator whose process identifier means nothing here is alive as long as it holds the lock."""
    channel = ShmSpeculatorChannel.create(peer.SHAPE, 1, "")
    foreign = Path("/dev/shm") / f"sglang_ssd_{2**22 + 17}_foreign"
    Path("/dev/shm", channel.address).rename(foreign)
    try:
        remove_stale_segments()
        assert foreign.exists()
        channel.close()
        remove_stale_segments()
        assert not foreign.exists()
    finally:
        foreign.unlink(missing_ok=True)


def test_doorbell_between_processes() -> None:
    """Another process wakes us long before the sleep ends."""
    ring = "import sys; from ssd_proto.doorbell import Bell; bell = Bell(sys.argv[1]); bell.ring(); bell.close()"
    with Doorbell() as doorbell, subprocess.Popen([sys.executable, "-W", "error", "-c", ring, doorbell.address]):
        started = time.monotonic()
        assert doorbell.wait(30.0)
        assert time.monotonic() - started < 20
        assert not doorbell.wait(0.0)


def test_doorbell_alone() -> None:
    """Sleeps are bounded, rings are drained, a flood does not block, and an absent owner is no error."""
    doorbell = Doorbell()
    bell = Bell(doorbell.address)
    started = time.monotonic()
    assert not doorbell.wait(0.05)
    assert time.monotonic() - started >= 0.049
    for _ in range(5000):
        bell.ring()
    assert doorbell.wait(1.0)
    while doorbell.wait(0.0):
        pass
    doorbell.close()
    doorbell.close()
    bell.ring()
    bell.close()
    bell.close()
    bell.ring()
