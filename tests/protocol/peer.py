"""The other process of a channel: ``peer.py {publisher|verifier|orphan} KIND [OFFER]``. Runs until it is killed."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from numpy.typing import NDArray

from ssd_proto.channel import SpeculatorChannel
from ssd_proto.channels.shm import ShmSpeculatorChannel, ShmVerifierChannel
from ssd_proto.channels.zmq import ZmqHub, ZmqVerifierChannel
from ssd_proto.records import DraftProbs, Entries, outcome_dtype, outcome_keys
from ssd_proto.table import TableShape

SHAPE = TableShape(num_slots=4, num_outcomes=8, lookahead=6, num_kept=5, num_rows=4)
INCARNATION = 4711
NUM_ROUNDS = 4
LIFETIME_S = 60.0
"""If the test that should kill it was killed itself."""


def expected_tokens(
    slots: NDArray[np.integer], rounds: NDArray[np.integer], keys: NDArray[np.int64], depths: NDArray[np.integer]
) -> NDArray[np.int64]:
    """[n, K]: every token tells slot, round, outcome, depth and position, so that a mixture of entries shows."""
    identity = ((slots * 31 + rounds) * 31 + keys % 1009) * 31 + depths
    return (identity[:, None] * 7919 + np.arange(SHAPE.lookahead) * 104_729) % 1_000_003


def expected_probs(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n, K, m] words of q of [n, K] tokens."""
    return tokens[:, :, None] * 1009 + np.arange(SHAPE.num_kept)


def is_sampled(columns: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Every other column."""
    return columns % 2 == 1


def outcome_of(column: int) -> int:
    """Key of the outcome in ``column``."""
    return int(outcome_keys(np.array(column % (SHAPE.lookahead + 1)), np.array(500 + column)))


def publish_forever(channel: SpeculatorChannel) -> None:
    """Rewrite all entries, round after round, as fast as possible: no lock-step, so readers do see torn ones.

    Rows of q wander from slot to slot.
    """
    columns = np.tile(np.arange(SHAPE.num_outcomes), SHAPE.num_slots)
    slots = np.repeat(np.arange(SHAPE.num_slots), SHAPE.num_outcomes)
    keys = np.array([outcome_of(column) for column in columns])
    generations = np.ones(len(slots), np.int64)
    end = time.monotonic() + LIFETIME_S
    number = 0
    while time.monotonic() < end:
        rounds = np.full(len(slots), number % NUM_ROUNDS)
        depths = 1 + (columns + number // NUM_ROUNDS) % SHAPE.lookahead
        channel.begin(
            np.arange(SHAPE.num_slots), rounds[: SHAPE.num_slots], keys.reshape(SHAPE.num_slots, SHAPE.num_outcomes)
        )
        tokens = expected_tokens(slots, rounds, keys, depths)
        rows = (slots + number) % SHAPE.num_rows
        entries = Entries(slots, generations, rounds, columns, keys, depths, depths % 2 == 0, tokens)
        for part in (is_sampled(columns), ~is_sampled(columns)):
            q = DraftProbs(rows[part], expected_probs(tokens[part])) if is_sampled(columns[part]).all() else None
            channel.write(entries.pick(part)._replace(q=q))
        reply = Entries(*(array[::8] for array in entries[:-1]))
        channel.write(reply._replace(columns=np.full(4, SHAPE.num_outcomes)))
        channel.flush()
        channel.beat()
        while channel.poll() is not None:
            pass
        number += 1


def publisher(kind: str) -> None:
    if kind == "shm":
        channel = ShmSpeculatorChannel.create(SHAPE, INCARNATION, "")
        print(json.dumps(channel.address), flush=True)
        sys.stdin.readline()  # attached
        channel.unlink()
        publish_forever(channel)
    else:
        hub = ZmqHub("tcp://127.0.0.1:0")
        print(json.dumps(hub.endpoint), flush=True)
        publish_forever(hub.channel(SHAPE, INCARNATION))


def orphan() -> None:
    channel = ShmSpeculatorChannel.create(SHAPE, INCARNATION, "")
    print(json.dumps(channel.address), flush=True)
    time.sleep(LIFETIME_S)


def verifier(kind: str, offer: str) -> None:
    channel = (
        ShmVerifierChannel.attach(offer, SHAPE, INCARNATION, "")
        if kind == "shm"
        else ZmqVerifierChannel(offer, SHAPE, INCARNATION)
    )
    channel.open_sequence(0, 1, np.arange(1, 10))
    outcomes = np.zeros(1, outcome_dtype(SHAPE.lookahead))
    outcomes["generation"] = 1
    channel.post(outcomes)
    print(json.dumps("attached"), flush=True)
    channel.wait(outcomes, channel.lookup(outcomes), LIFETIME_S)


if __name__ == "__main__":
    {"publisher": publisher, "verifier": verifier, "orphan": orphan}[sys.argv[1]](*sys.argv[2:])
