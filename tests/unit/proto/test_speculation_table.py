"""The speculation table alone: what is read is what was written for exactly this outcome, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from single_entry import entry, one

from ssd_proto.records import NO_KEY, DraftProbs, Entries, outcome_keys, pack_probs
from ssd_proto.table import SpeculationTable, TableRead, TableShape, empty_keys

pytestmark = pytest.mark.filterwarnings("error")
SHAPE = TableShape(num_slots=3, num_outcomes=4, lookahead=3)
SAMPLED = TableShape(num_slots=3, num_outcomes=4, lookahead=3, num_kept=2, num_rows=2)


def make_table(incarnation: int = 1, shape: TableShape = SHAPE) -> SpeculationTable:
    return SpeculationTable(shape, bytearray(shape.nbytes), incarnation)


def words_of(first: int) -> NDArray[np.int64]:
    """[3, 2] words for q of `SAMPLED`."""
    return first + np.arange(6).reshape(3, 2)


def q_of(found: TableRead) -> NDArray[np.int64]:
    """[b, K, m] or, where nothing was sampled, [b, 1, 1]: 0."""
    return np.zeros((len(found.depth), 1, 1), np.int64) if found.q is None else found.q


def one_of(found: TableRead, index: int) -> TableRead:
    depth, is_final, tokens, q = found
    at = slice(index, index + 1)
    return TableRead(depth[at], is_final[at], tokens[at], None if q is None else q[at])


def is_absent(found: TableRead) -> bool:
    return bool((found.depth == -1).all() and not found.is_final.any() and not q_of(found).any())


@pytest.mark.parametrize("shape", [SHAPE, SAMPLED])
def test_zeroed_memory_is_empty(shape: TableShape) -> None:
    table = make_table(0, shape)
    for key in (0, NO_KEY, 5):
        assert is_absent(table.read(*one(0, 0, 0, key)))
        assert is_absent(table.read_reply(*one(0, 0, 0, key)))


@pytest.mark.parametrize("shape", [SHAPE, SAMPLED])
def test_empty_batch(shape: TableShape) -> None:
    table = make_table(shape=shape)
    none = np.empty(0, np.int64)
    table.begin(none, none, empty_keys(0, 4))
    for q in (None, DraftProbs(none, np.empty((0, 3, shape.num_kept), np.int64))):
        table.write(Entries(*[none] * 6, np.empty(0, bool), np.empty((0, 3), int), q))
    found = table.read(none, none, none, none)
    assert [array.shape for array in found[:3]] == [(0,), (0,), (0, 3)]
    assert found.q is None


def test_a_batch_of_both_kinds() -> None:
    """Sampled and greedy entries, table and replies, final or not: each reads as written, from one call each."""
    table = make_table(shape=SAMPLED)
    keys = outcome_keys(np.array([0, 1, 2]), np.array([2**31 - 1, 0, 8]))
    slots, generations, rounds = np.array([2, 0, 1]), np.array([5, 2**31 - 1, 7]), np.array([2**31 - 1, 3, 0])
    columns, depths, is_final = np.array([0, 3, 4]), np.array([3, 2, 0]), np.array([True, False, True])
    tokens = np.array([[1, 2, 2**31 - 1], [4, 5, 6], [7, 8, 9]])
    table_keys = empty_keys(3, 4)
    table_keys[[0, 1], [0, 3]] = keys[:2]
    table.begin(slots, rounds, table_keys)
    q = pack_probs(np.arange(18).reshape(3, 3, 2), np.linspace(0.1, 1, 18).reshape(3, 3, 2))
    entries = Entries(slots, generations, rounds, columns, keys, depths, is_final, tokens)
    for probs in (DraftProbs(np.array([1, 0, 1]), q), None):
        table.write(entries._replace(q=probs))
        found, reply = (read(slots, generations, rounds, keys) for read in (table.read, table.read_reply))
        assert found.depth.tolist() == [3, 2, -1]
        assert found.is_final.tolist() == [True, False, False]
        assert found.tokens[0].tolist() == tokens[0].tolist()
        assert found.tokens[1, :2].tolist() == [4, 5]
        assert reply.depth.tolist() == [-1, -1, 0]
        assert reply.is_final.tolist() == [False, False, True]
        expected = np.zeros_like(q)
        if probs is not None:
            expected[0], expected[1, :2] = q[0], q[1, :2]
        assert (q_of(found) == expected).all()
        assert not q_of(reply).any(), "nothing is sampled past the depth"


def test_keys_of_outcomes() -> None:
    """(k, t*) -> key is one to one over all that can occur, and never `NO_KEY`."""
    keys = outcome_keys(np.arange(17)[:, None], np.array([0, 1, 2**31 - 1]))
    assert keys.dtype == np.int64
    assert len(np.unique(keys)) == keys.size
    assert (keys != NO_KEY).all()


operations = st.tuples(
    st.sampled_from(["begin", "begin again", "write"]),
    st.integers(0, 2),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from([None, 0, 1]),
)


@given(st.lists(operations, max_size=40))
def test_against_a_dictionary(trace: list[tuple[str, int, int, int, int, int, int, bool, int, int | None]]) -> None:
    """Any order of calls: an entry is found where the last `begin` and `write` put it, while its q is untouched.

    Rows of q are used by any slot in turn, as by sequences that come and go.
    """
    table = make_table(shape=SAMPLED)
    columns_of: dict[tuple[int, int], list[int]] = {(s, h): [0] * 4 for s in range(3) for h in range(2)}
    entries: dict[tuple[int, int, int], tuple[int, ...]] = {}
    kept: dict[tuple[int, int, int], int] = {}
    for name, slot, generation, round_, column, key, depth, is_final, token, row in trace:
        half = (slot, round_ & 1)
        if name == "write":
            tokens = [token, token + 1, token + 2]
            q = None if row is None else (row, words_of(token + 1))
            table.write(entry((slot, generation, round_, column), key, depth, tokens, is_final, q))
            place = -1
            if row is not None:
                place = row
                kept[row, round_ & 1, column] = token
            entries[(*half, column)] = (generation, round_, key, depth, is_final, token, place)
        else:
            first = [key, key + 1] if name == "begin" else columns_of[half][:2]
            columns_of[half] = [*first, *([NO_KEY] * 2 if name == "begin" else [key, key + 1])]
            table.begin(*one(slot, round_), np.array([columns_of[half]]))
    grid = np.meshgrid(np.arange(3), np.arange(1, 4), np.arange(6), np.arange(6))
    asked = tuple(axis.ravel() for axis in grid)
    found, replied = table.read(*asked), table.read_reply(*asked)
    for index, (slot, generation, round_, key) in enumerate(zip(*(axis.tolist() for axis in asked), strict=True)):
        half = (slot, round_ & 1)
        column = columns_of[half].index(key) if key in columns_of[half] else -1
        for read, at in ((found, column), (replied, 4)):
            expected = entries.get((*half, at))
            if expected is not None:
                *identity, depth, is_final, token, row = expected
                is_kept = row == -1 or kept[row, round_ & 1, at] == token
                if identity != [generation, round_, key] or not is_kept:
                    expected = None
            if expected is None:
                assert is_absent(one_of(read, index))
                continue
            assert read.depth[index] == depth
            assert read.is_final[index] == is_final
            assert read.tokens[index].tolist() == [token, token + 1, token + 2]
            assert (q_of(read)[index, :depth] == (0 if row == -1 else words_of(token + 1)[:depth])).all()
            assert not q_of(read)[index, depth:].any()


small = st.integers(0, 40)
fields = st.tuples(small, small, small, st.integers(0, 3), *[small] * 3)


@given(fields, fields, *[st.booleans()] * 4, *[st.lists(small, min_size=6, max_size=6)] * 2, st.integers(0, 2**11 - 1))
def test_mixture_of_two_entries_is_absent(
    first: tuple[int, ...],
    second: tuple[int, ...],
    first_is_final: bool,
    second_is_final: bool,
    first_is_sampled: bool,
    second_is_sampled: bool,
    first_q: Sequence[int],
    second_q: Sequence[int],
    taken_from_second: int,
) -> None:
    """Any word by word mixture of two versions of an entry (small, similar numbers) that is neither is torn."""
    shape = TableShape(1, 1, 3, num_kept=2, num_rows=1)
    table = make_table(shape=shape)

    def written(values: tuple[int, ...], is_final: bool, q: Sequence[int] | None) -> NDArray[np.int64]:
        generation, round_, key, depth, *tokens = values
        words = None if q is None else (0, np.array(q).reshape(3, 2))
        table.write(entry((0, generation, 2 * round_, 0), key, depth, tokens, is_final, words))
        return np.concatenate([table._entries[0, 0, 0], table._probs[0, 0, 0].ravel()])

    a = written(first, first_is_final, first_q if first_is_sampled else None)
    b = written(second, second_is_final, second_q if second_is_sampled else None)
    mixture = np.where([(taken_from_second >> word) & 1 for word in range(len(a))], b, a)
    table._entries[0, 0, 0], table._probs[0, 0, 0] = mixture[:5], mixture[5:].reshape(3, 2)
    whole = {}
    for values, version, is_sampled in ((first, a, first_is_sampled), (second, b, second_is_sampled)):
        read = slice(None) if is_sampled else slice(5)  # q is none of the business of an entry that has none
        if (mixture[read] == version[read]).all():
            whole[values[:3]] = values[3]
    for generation, round_, key in (first[:3], second[:3]):
        table._keys[0, 0, 0] = key
        found = table.read(*one(0, generation, 2 * round_, key))
        assert found.depth[0] == whole.get((generation, round_, key), -1)


@pytest.mark.parametrize("part", ["_entries", "_probs"])
def test_any_changed_bit_of_an_entry_or_its_q(part: str) -> None:
    """Reads as absent, with every word: check, form, tokens, and q also past the depth. Undone, all is well."""
    table = make_table(shape=SAMPLED)
    table.begin(*one(1, 6), np.array([[3, 4, 5, 6]]))
    probs = pack_probs(np.array([[7, 9], [11, 7], [0, 1]]), np.array([[0.75, 0.25], [1.0, 0.0], [0.5, 0.5]]))
    table.write(entry((1, 2, 6, 3), 6, 2, [7, 11, 0], True, (1, probs)))
    words = table._entries[1, 0, 3] if part == "_entries" else table._probs[1, 0, 3].reshape(-1)
    bits = words.view(np.uint64)
    for word in range(len(bits)):
        for bit in range(64):
            bits[word] ^= np.uint64(1 << bit)
            assert is_absent(table.read(*one(1, 2, 6, 6))), (word, bit)
            bits[word] ^= np.uint64(1 << bit)
    assert table.read(*one(1, 2, 6, 6)).depth.tolist() == [2]


def test_row_that_another_sequence_got() -> None:
    """Its q is not mistaken for the old one's, in the table and in the reply; greedy entries have none to lose."""
    table = make_table(shape=SAMPLED)
    table.begin(*one(0, 4), np.array([[5, 6, 7, 8]]))
    table.begin(*one(2, 4), np.array([[5, 6, 7, 8]]))
    for column, key in ((0, 5), (4, 9)):
        table.write(entry((0, 1, 4, column), key, 3, [1, 2, 3], True, (1, words_of(1))))
    table.write(entry((0, 1, 4, 1), 6, 3, [1, 2, 3], True))
    reads = (table.read, 5), (table.read_reply, 9)
    for read, key in reads:
        assert read(*one(0, 1, 4, key)).depth.tolist() == [3]
    for column, key in ((0, 5), (4, 9), (1, 6)):
        table.write(entry((2, 1, 4, column), key, 3, [1, 2, 3], True, (1, words_of(20))))
    for read, key in reads:
        assert is_absent(read(*one(0, 1, 4, key)))
        assert (q_of(read(*one(2, 1, 4, key))) == words_of(20)).all()
    assert table.read(*one(0, 1, 4, 6)).depth.tolist() == [3]


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
    table.write(entry((0, 1, 0, 0), 5, 6, tokens))
    assert table.read(*one(0, 1, 0, 5)).depth.tolist() == [6]
    table._entries[0, 0, 0, 2:] = others
    assert is_absent(table.read(*one(0, 1, 0, 5)))


@given(st.integers(0, 2**63 - 1), st.integers(0, 62))
def test_incarnations_are_apart(incarnation: int, bit: int) -> None:
    """Also those that differ in a single bit."""
    table, other = make_table(incarnation, SAMPLED), make_table(incarnation ^ (1 << bit), SAMPLED)
    table.begin(*one(0, 0), np.array([[5, 6, 7, 8]]))
    table.write(entry((0, 1, 0, 0), 5, 3, [1, 2, 3]))
    table.write(entry((0, 1, 0, 1), 6, 3, [1, 2, 3], True, (0, words_of(1))))
    other._keys[:], other._entries[:], other._probs[:] = table._keys, table._entries, table._probs
    for key in (5, 6):
        assert table.read(*one(0, 1, 0, key)).depth.tolist() == [3]
        assert is_absent(other.read(*one(0, 1, 0, key)))


@pytest.mark.parametrize("num_kept", [32, 64])
def test_table_is_a_hundredth_of_a_cache_of_logits(num_kept: int) -> None:
    """Both parities, keys, checksums and replies included, against bfloat16 logits of every speculated position."""
    num_sequences, num_outcomes, lookahead, vocab_size = 16, 3 * 8, 7, 128_256
    logits = num_sequences * num_outcomes * lookahead * (8 + 2 * vocab_size)
    assert logits == 689_525_760
    shape = TableShape(num_sequences, num_outcomes, lookahead, num_kept, num_sequences)
    assert shape.nbytes < logits / 100
    table = SpeculationTable(shape, bytearray(shape.nbytes), 1)
    assert table._keys.nbytes + table._entries.nbytes + table._probs.nbytes == shape.nbytes


def test_verifiers_slots_without_speculation_cost_no_q() -> None:
    """q grows with the sequences that are speculated for, not with the verifier's slots."""
    small, large = (TableShape(slots, 24, 7, 64, 16).nbytes for slots in (16, 4096))
    assert large - small == (4096 - 16) * 8 * 2 * (24 + 25 * (2 + 7))


def best_seconds(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def filled_table(shape: TableShape, is_sampled: bool) -> tuple[SpeculationTable, tuple[NDArray[np.int64], ...]]:
    """A table with one entry at full depth for every slot, and what to read."""
    table = make_table(shape=shape)
    rng = np.random.default_rng(0)
    count, num_outcomes, lookahead = shape.num_slots, shape.num_outcomes, shape.lookahead
    slots, rounds, generations = np.arange(count), np.full(count, 3), np.ones(count, int)
    bonus = rng.permutation(count * num_outcomes).reshape(count, num_outcomes)
    keys = outcome_keys(rng.integers(0, lookahead + 1, (count, num_outcomes)), bonus)
    columns = rng.integers(0, num_outcomes, count)
    wanted = keys[slots, columns]
    words = rng.integers(0, 2**62, (count, lookahead, shape.num_kept))
    depths, tokens = np.full(count, lookahead), np.ones((count, lookahead), int)
    table.begin(slots, rounds, keys)
    q = DraftProbs(slots, words) if is_sampled else None
    table.write(Entries(slots, generations, rounds, columns, wanted, depths, depths > 0, tokens, q))
    return table, (slots, generations, rounds, wanted)


def test_lookup_time(record_property: Callable[[str, object], None]) -> None:
    """256 sequences, 32 outcomes each: a lookup is a small part of a round (limit generous for busy machines)."""
    table, asked = filled_table(TableShape(256, 32, 4), is_sampled=False)
    assert (table.read(*asked).depth == 4).all()
    best = best_seconds(lambda: table.read(*asked))
    record_property("lookup_us", best * 1e6)
    assert best < 1e-3


def test_sampled_lookup_time(record_property: Callable[[str, object], None]) -> None:
    """32 sequences with 32 probabilities for each of 4 tokens."""
    table, asked = filled_table(TableShape(32, 32, 4, num_kept=32, num_rows=32), is_sampled=True)
    assert q_of(table.read(*asked)).all()
    best = best_seconds(lambda: table.read(*asked))
    record_property("sampled_lookup_us", best * 1e6)
    assert best < 1e-3
