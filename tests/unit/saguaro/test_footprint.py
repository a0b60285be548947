"""Worked numbers of appendix C."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from speculator_service.row_arrays import RowShape
from speculator_service.rows import Rows
from speculator_service.saguaro.footprint import (
    cache_bytes,
    draft_scratch_bytes,
    draft_tokens,
    request_bytes,
    response_bytes,
    sparse_bytes,
    transfer_seconds,
)
from ssd_proto.channels.shm import RING_BYTES, ShmSpeculatorChannel
from ssd_proto.table import TableShape

VOCAB = 128256


def test_memory() -> None:
    assert cache_bytes(1, 24, 7, VOCAB) == 43_095_360
    assert cache_bytes(16, 24, 7, VOCAB) == 689_525_760
    assert cache_bytes(16, 8, 7, VOCAB) == 229_841_920
    assert draft_scratch_bytes(1, 24, 7, 1) == 8 + 168


def test_what_is_allocated_is_below_a_hundredth_of_dense_logits() -> None:
    batch_size, num_outcomes, lookahead, num_kept = 16, 3 * (7 + 1), 7, 32
    channel = ShmSpeculatorChannel.create(TableShape(batch_size, num_outcomes, lookahead, num_kept, batch_size), 1, "")
    try:
        posts = RING_BYTES  # prompts on their way: no part of the cache
        shared = Path("/dev/shm", channel.address).stat().st_blocks * 512 - posts
    finally:
        channel.close()
    assert shared > 2 * sparse_bytes(batch_size * num_outcomes, lookahead, num_kept), "two tables with q are in it"
    # What the service itself keeps of branches; the texts of its sequences are not part of a cache.
    state = Rows(RowShape(batch_size, 1, lookahead, num_outcomes, num_outcomes + 2, num_kept)).state
    own = sum(array.nbytes for array in state if isinstance(array, np.ndarray))
    assert shared + own < 0.01 * cache_bytes(batch_size, num_outcomes, lookahead, VOCAB)


def test_communication() -> None:
    assert response_bytes(1, 7, VOCAB) == 64 + 1_795_584
    assert response_bytes(16, 7, VOCAB) == 1_024 + 28_729_344
    assert request_bytes(1, 32) == 328
    assert sparse_bytes(1, 7, 128) == 7_168


@pytest.mark.parametrize(
    ("bytes_per_second", "seconds"), [(450e9, 64e-6), (55e9, 0.5e-3), (100e9 / 8, 2.3e-3), (10e9 / 8, 23e-3)]
)
def test_transfer(bytes_per_second: float, seconds: float) -> None:
    assert transfer_seconds(response_bytes(16, 7, VOCAB), bytes_per_second) == pytest.approx(seconds, rel=0.05)


def test_computation() -> None:
    assert draft_tokens(3, 24, 7) - 3 * 8 == 24 * (3 * 7)  # without the trunk: MQ times SD's b K
    assert draft_tokens(3, 24, 7, num_missed=2) - draft_tokens(3, 24, 7) == 14


def test_negative_numbers() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        cache_bytes(-1, 24, 7, VOCAB)
    with pytest.raises(ValueError, match="bytes_per_second"):
        transfer_seconds(1, 0)
