"""Sparse distributions as words: what goes in comes out, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd_proto.records import pack_probs, unpack_probs

pytestmark = pytest.mark.filterwarnings("error")
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
tokens = st.integers(0, 2**31 - 1)
probabilities = st.floats(0, 1, width=32, allow_subnormal=True)


@given(st.lists(st.tuples(tokens, probabilities), max_size=20))
@example([(0, 0.0), (2**31 - 1, 1.0), (2**31 - 1, SMALLEST), (0, SMALLEST), (1, 1.0), (2**31 - 1, 0.0)])
def test_round_trip(pairs: list[tuple[int, float]]) -> None:
    ids = np.array([token for token, _ in pairs], np.int64)
    probs = np.array([probability for _, probability in pairs], np.float32)
    words = pack_probs(ids, probs)
    assert words.dtype == np.int64
    assert (words >= 0).all()
    got_ids, got_probs = unpack_probs(words)
    assert (got_ids.dtype, got_probs.dtype) == (np.int32, np.float32)
    assert (got_ids == ids).all()
    assert (got_probs.view(np.int32) == probs.view(np.int32)).all()
    assert len(set(words.tolist())) == len({(token, float(probability)) for token, probability in pairs})


@given(tokens, st.floats(SMALLEST, 1, width=32))
def test_word_of_a_sampled_token_is_never_0(token: int, probability: float) -> None:
    assert pack_probs(np.array(token), np.array(probability)) != 0


def test_layout() -> None:
    """The words are the protocol: bits of the float above, token below."""
    assert pack_probs(np.array([5]), np.array([1.0])).tolist() == [0x3F80_0000_0000_0005]


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (4, 2, 3), (2, 0, 3)])
def test_shapes_are_kept(shape: tuple[int, ...]) -> None:
    """Also of arrays that do not lie in one piece, and of other dtypes."""
    ids = np.asarray(np.arange(np.prod(shape), dtype=np.int32)).reshape(shape).T
    probs = np.full(shape, 0.3).T
    words = pack_probs(ids, probs)
    assert words.shape == shape[::-1]
    got_ids, got_probs = unpack_probs(words)
    assert (got_ids == ids).all()
    assert (got_probs == np.float32(0.3)).all()
    assert got_ids.shape == got_probs.shape == shape[::-1]
