from __future__ import annotations

import numpy as np
import pytest

from speculator_service.saguaro.fan_out import FanOut, uniform_fan_out
from ssd_proto.errors import ConfigError


def test_uniform() -> None:
    assert uniform_fan_out(4) == (3, 3, 3, 3, 3)
    assert FanOut.parse(2, 3).counts == (2, 2, 2, 2)


def test_layout() -> None:
    fan_out = FanOut((2, 0, 3))
    assert fan_out.lookahead == 2
    assert fan_out.num_outcomes == 5
    assert fan_out.accepted.tolist() == [0, 0, 2, 2, 2]
    assert fan_out.rank.tolist() == [0, 1, 0, 1, 2]
    assert fan_out.first_late == 2
    assert fan_out.num_candidates == 3


@pytest.mark.parametrize(("counts", "candidates"), [((0, 0), 1), ((1, 0), 2), ((0, 4), 4), ((2, 3), 3), ((3, 3), 4)])
def test_num_candidates(counts: tuple[int, ...], candidates: int) -> None:
    assert FanOut(counts).num_candidates == candidates


@pytest.mark.parametrize(
    ("value", "words"),
    [([1, 2], "4 entries"), ([1, -1, 1, 1], "0 or more"), (300, "at most 1024"), (-1, "0 or more"), ([], "4 entries")],
)
def test_mistakes(value: int | list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FanOut.parse(value, 3)


def test_equal_lists_are_equal_and_hashable() -> None:
    assert FanOut((1, 2)) == FanOut.parse([1, 2], 1)
    assert len({FanOut((1, 2)), FanOut((1, 2))}) == 1
    assert isinstance(FanOut((0, 0)).accepted, np.ndarray)
