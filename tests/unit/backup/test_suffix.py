"""The suffix backup against a search of the whole text."""

from __future__ import annotations

import random
import time

import pytest

from speculator_service.backup.suffix import SuffixBackup


def longest_match(text: list[int]) -> tuple[int, int]:
    """Length of the longest suffix that occurred before, and where its latest earlier occurrence ends; by search."""
    for length in range(len(text) - 1, 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return length, end
    return 0, 0


def continuation(text: list[int], start: int, count: int) -> list[int]:
    result = list(text)
    for i in range(count):
        result.append(result[start + i])
    return result[len(text) :]


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_random_texts(alphabet: int) -> None:
    generator = random.Random(alphabet)
    for _ in range(12):
        text: list[int] = []
        backup = SuffixBackup()
        for _ in range(28 if alphabet == 1 else 60):
            text.append(generator.randrange(alphabet))
            backup.append(text[-1:])
            length, start = longest_match(text)
            assert backup.match_length == length
            assert backup.propose(5).tolist() == (continuation(text, start, 5) if length else [])


def test_appending_at_once_or_one_by_one_is_the_same() -> None:
    generator = random.Random(0)
    text = [generator.randrange(4) for _ in range(300)]
    at_once, one_by_one = SuffixBackup(text), SuffixBackup()
    for token in text:
        one_by_one.append([token])
    assert at_once.propose(20).tolist() == one_by_one.propose(20).tolist()
    assert len(at_once) == len(one_by_one) == 300


def test_the_latest_occurrence_counts() -> None:
    assert SuffixBackup([1, 2, 3, 1, 2, 4, 1, 2]).propose(1).tolist() == [4]
    assert SuffixBackup([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2]).propose(1).tolist() == [3]  # the longer match is older


def test_periods_go_on() -> None:
    assert SuffixBackup([7, 1, 2, 3, 1, 2, 3, 1]).propose(7).tolist() == [2, 3, 1, 2, 3, 1, 2]
    assert SuffixBackup([5] * 1000).propose(4).tolist() == [5, 5, 5, 5]


def test_deeply_nested_suffixes_still_get_an_occurrence() -> None:
    """More links than are refreshed: the match is exact, and what is proposed did follow it once."""
    text = [1] * 200 + [2] + [1] * 150 + [3] + [1] * 100
    backup = SuffixBackup(text)
    assert backup.match_length == 100
    assert backup.propose(1).tolist()[0] in (1, 2, 3)


def test_nothing_to_propose() -> None:
    for text in ([], [1], [1, 2, 3]):
        assert SuffixBackup(text).propose(4).tolist() == []
        assert SuffixBackup(text).match_length == 0
    assert SuffixBackup([1, 2, 1]).propose(0).tolist() == []


def test_min_match() -> None:
    text = [1, 2, 3, 9, 2, 3]
    assert SuffixBackup(text, min_match=2).propose(2).tolist() == [9, 2]
    assert SuffixBackup(text, min_match=3).propose(2).tolist() == []
    with pytest.raises(ValueError, match="min_match must be at least 1"):
        SuffixBackup(min_match=0)


@pytest.mark.parametrize("kind", ["random", "constant", "periodic", "nested"])
def test_size_and_time_are_linear(kind: str) -> None:
    """Quadratic would be 1.6 billion steps: minutes."""
    size, generator = 40_000, random.Random(0)
    runs = [token for run in range(200) for token in [1] * run + [2]]  # long chains of links
    tokens = {
        "random": [generator.randrange(2000) for _ in range(size)],
        "constant": [1] * size,
        "periodic": [i % 37 for i in range(size)],
        "nested": (runs * 2)[:size],
    }[kind]
    start = time.perf_counter()
    backup = SuffixBackup(tokens)
    assert time.perf_counter() - start < 10
    assert len(backup._next) <= 2 * len(tokens)
    assert sum(map(len, backup._next)) <= 3 * len(tokens)
