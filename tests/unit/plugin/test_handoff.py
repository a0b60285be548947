"""Drafts and q on their way to the device, on a CPU."""

from __future__ import annotations

import numpy as np

from sglang_ssd.handoff import Handoff
from sglang_ssd.rejection import unpack
from ssd_proto.records import pack_probs

DRAFTS = np.array([[3, 4], [5, 6], [7, 8]], np.int32)


def test_q_is_staged_beside_the_drafts() -> None:
    ids, probs = np.arange(12).reshape(3, 2, 2), np.full((3, 2, 2), 0.5, np.float32)
    staged, words = Handoff("cpu", 4, 2, 2).stage_with_q(DRAFTS, pack_probs(ids, probs))
    assert staged.tolist() == DRAFTS.tolist()
    q = unpack(words)
    assert (q.ids.tolist(), q.probs.tolist()) == (ids.tolist(), probs.tolist())


def test_where_nothing_was_sampled_q_has_no_words() -> None:
    staged, words = Handoff("cpu", 4, 2, 2).stage_with_q(DRAFTS, None)
    assert staged.tolist() == DRAFTS.tolist()
    assert [part.shape for part in unpack(words)] == [(3, 2, 0), (3, 2, 0)]
