"""The speculation table alone: what is read is what was written for exactly this outcome, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ssd_proto.records import NO_KEY, outcome_keys
from ssd_proto.table import SpeculationTable, TableShape, empty_keys

pytestmark = pytest.mark.filterwarnings("error")
SHAPE = TableShape(num_slots=3, num_outcomes=4, lookahead=3)


def make_table(incarnation: int = 1, shape: TableShape = SHAPE) -> SpeculationTable:
    return SpeculationTable(shape, bytearray(shape.nbytes), incarnation)


def one(*values: int) -> tuple[NDArray[np.int64], ...]:
    return tuple(np.array([value]) for value in values)


def test_zeroed_memory_is_empty() -> None:
    table = make_table(0)
    for key in (0, NO_KEY, 5):
        assert table.read(*one(0, 0, 0, key))[0].tolist() == [-1]
        assert table.read_reply(*one(0, 0, 0, key))[0].tolist() == [-1]


def test_empty_batch() -> None:
    table = make_table()
    none = np.empty(0, np.int64)
    table.begin(none, none, empty_keys(0, 4))
    table.write(none, none, none, none, none, none, np.empty((0, 3), int))
    depth, tokens = table.read(none, none, none, none)
    assert depth.shape == (0,)
    assert tokens.shape == (0, 3)


def test_keys_of_outcomes() -> None:
    """(k, t*) -> key is one to one over all that can occur, and never `NO_KEY`."""
    keys = outcome_keys(np.arange(17)[:, None], np.array([0, 1, 2**31 - 1]))
    assert keys.dtype == np.int64
    assert len(np.unique(keys)) == keys.size
    assert (keys != NO_KEY).all()


operations = st.tuples(
    st.sampled_from(["begin", "add", "write", "reply"]),
    st.integers(0, 2),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(0, 3),
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(0, 2),
)


@given(st.lists(operations, max_size=40))
def test_against_a_dictionary(trace: list[tuple[str, int, int, int, int, int, int, int]]) -> None:
    """Any order of calls: an entry is found where the last `begin`, `add_keys` and `write` of its table put it."""
    table = make_table()
    columns_of: dict[tuple[int, int], list[int]] = {(s, h): [0] * 4 for s in range(3) for h in range(2)}
    entries: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for name, slot, generation, round_, column, key, depth, token in trace:
        half = (slot, round_ & 1)
        tokens = np.array([[token, token + 1, token + 2]])
        if name == "begin":
            columns_of[half] = [key, key + 1, NO_KEY, NO_KEY]
            table.begin(*one(slot, round_), np.array([columns_of[half]]))
        elif name == "add":
            columns_of[half][column] = key
            table.add_keys(*one(slot, round_), column, np.array([[key]]))
        elif name == "write":
            entries[(*half, column)] = (generation, round_, key, depth, token)
            table.write(*one(slot, generation, round_, column, key, depth), tokens)
        else:
            entries[(*half, 4)] = (generation, round_, key, depth, token)
            table.reply(*one(slot, generation, round_, key, depth), tokens)
    grid = np.meshgrid(np.arange(3), np.arange(1, 4), np.arange(6), np.arange(6))
    asked = tuple(axis.ravel() for axis in grid)
    found, replied = table.read(*asked), table.read_reply(*asked)
    for row, (slot, generation, round_, key) in enumerate(zip(*(axis.tolist() for axis in asked), strict=True)):
        half = (slot, round_ & 1)
        column = columns_of[half].index(key) if key in columns_of[half] else -1
        identity = generation, round_, key
        _expect(found[0][row], found[1][row], entries.get((*half, column)), identity)
        _expect(replied[0][row], replied[1][row], entries.get((*half, 4)), identity)


def _expect(
    depth: np.int32, tokens: NDArray[np.int32], entry: tuple[int, ...] | None, identity: tuple[int, int, int]
) -> None:
    if entry is None or entry[:3] != identity:
        assert depth == -1
    else:
        assert depth == entry[3]
        assert tokens.tolist() == [entry[4], entry[4] + 1, entry[4] + 2]


small = st.integers(0, 40)
fields = st.tuples(small, small, small, st.integers(0, 8), *[small] * 8)


@given(fields, fields, st.integers(0, 2**12 - 1))
def test_mixture_of_two_entries_is_absent(
    first: tuple[int, ...], second: tuple[int, ...], taken_from_second: int
) -> None:
    """Any word by word mixture of two versions of an entry (small, similar numbers) that is neither is torn."""
    shape = TableShape(1, 1, 8)
    table = make_table(shape=shape)

    def written(values: tuple[int, ...]) -> NDArray[np.int64]:
        generation, round_, key, depth, *tokens = values
        table.write(*one(0, generation, 2 * round_, 0, key, depth), np.array([tokens]))
        entry: NDArray[np.int64] = table._entries[0, 0, 0].copy()
        return entry

    a, b = written(first), written(second)
    words = len(a)
    mixture = np.where([(taken_from_second >> word) & 1 for word in range(words)], b, a)
    table._entries[0, 0, 0] = mixture
    whole = {values[:3]: values[3] for values, entry in ((first, a), (second, b)) if (mixture == entry).all()}
    for generation, round_, key in (first[:3], second[:3]):
        table._keys[0, 0, 0] = key
        depth = int(table.read(*one(0, generation, 2 * round_, key))[0][0])
        assert depth == whole.get((generation, round_, key), -1)


@pytest.mark.parametrize(
    ("tokens", "others"),
    [
        ([1, 5, 1, 7, 1, 5], [1, 6, 1, 5, 1, 6]),
        ([3, 9, 0, 0, 0, 0], [9, 3, 0, 0, 0, 0]),
        ([0] * 6, [1, -2, 1, 0, 0, 0]),
    ],
)
def test_checksum_sees_structure(tokens: list[int], others: list[int]) -> None:
    """Token runs that a sum with weights 1, 2, 3, ... cannot tell apart."""
    shape = TableShape(1, 1, 6)
    table = make_table(shape=shape)
    table.begin(*one(0, 0), np.array([[5]]))
    table.write(*one(0, 1, 0, 0, 5, 6), np.array([tokens]))
    assert table.read(*one(0, 1, 0, 5))[0].tolist() == [6]
    table._entries[0, 0, 0, 2:] = others
    assert table.read(*one(0, 1, 0, 5))[0].tolist() == [-1]


@given(st.integers(0, 2**63 - 1), st.integers(0, 62))
def test_incarnations_are_apart(incarnation: int, bit: int) -> None:
    """Also those that differ in a single bit."""
    table, other = make_table(incarnation), make_table(incarnation ^ (1 << bit))
    table.begin(*one(0, 0), np.array([[5, 6, 7, 8]]))
    table.write(*one(0, 1, 0, 0, 5, 3), np.array([[1, 2, 3]]))
    assert table.read(*one(0, 1, 0, 5))[0].tolist() == [3]
    other._keys[:], other._entries[:] = table._keys, table._entries
    assert other.read(*one(0, 1, 0, 5))[0].tolist() == [-1]


def test_lookup_time(record_property: Callable[[str, object], None]) -> None:
    """256 sequences, 32 outcomes each: a lookup is a small part of a round (limit generous for busy machines)."""
    shape = TableShape(256, 32, 4)
    table = make_table(shape=shape)
    rng = np.random.default_rng(0)
    slots, rounds, generations = np.arange(256), np.full(256, 3), np.ones(256, int)
    keys = outcome_keys(rng.integers(0, 5, (256, 32)), rng.permutation(256 * 32).reshape(256, 32))
    columns = rng.integers(0, 32, 256)
    wanted = keys[slots, columns]
    table.begin(slots, rounds, keys)
    table.write(slots, generations, rounds, columns, wanted, np.full(256, 4), np.ones((256, 4), int))
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        depth, _ = table.read(slots, generations, rounds, wanted)
        best = min(best, time.perf_counter() - start)
    assert (depth == 4).all()
    record_property("lookup_us", best * 1e6)
    assert best < 1e-3
