"""Whatever a verifier sends: nothing breaks, others are not disturbed, and nobody waits for a deadline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from closed_loop import VOCAB, Loop, ScriptedVerifier
from numpy.typing import NDArray

from ssd_proto.errors import ProtocolError
from ssd_proto.records import outcome_dtype

LOOKAHEAD = 4


def outcome(slot: int = 0, generation: int = 1, **fields: Any) -> NDArray[np.void]:
    record = np.zeros(1, outcome_dtype(LOOKAHEAD))
    record["slot"], record["generation"] = slot, generation
    for name, value in fields.items():
        record[name] = value
    return record


@pytest.fixture
def loop() -> Loop:
    return Loop.build()


@pytest.fixture
def verifier(loop: Loop) -> ScriptedVerifier:
    verifier = loop.connect()
    verifier.channel.open_sequence(0, 1, np.arange(5))
    verifier.channel.open_sequence(1, 1, np.arange(7))
    loop.settle()
    return verifier


def answer(verifier: ScriptedVerifier, record: NDArray[np.void]) -> int:
    keys = (record["num_accepted"].astype(np.int64) << 32) | record["bonus"]
    return int(verifier.channel.table.read_reply(record["slot"], record["generation"], record["round"], keys)[0][0])


@pytest.mark.parametrize(
    "fields",
    [
        {"num_accepted": LOOKAHEAD + 1},
        {"num_accepted": -1},
        {"bonus": VOCAB},
        {"bonus": -1},
        {"num_accepted": 1, "tokens": [VOCAB, 0, 0, 0]},
        {"num_accepted": 1, "tokens": [-7, 0, 0, 0]},
        {"round": 1},
        {"round": -1},
    ],
)
def test_invalid_outcome_loses_its_sequence_only(
    loop: Loop, verifier: ScriptedVerifier, fields: dict[str, Any]
) -> None:
    bad, good = outcome(**fields), outcome(slot=1)
    verifier.channel.post(np.concatenate([bad, good]))
    loop.settle()
    assert answer(verifier, good) == LOOKAHEAD
    if not fields.get("num_accepted", 0) < 0:  # a key of this kind cannot be asked for
        assert answer(verifier, bad) == 0
    assert loop.speculator.statistics.invalid == 1
    assert loop.speculator.num_served == 1

    later = outcome(round=1)  # lost: answered at once, with nothing, until it is opened anew
    verifier.channel.post(later)
    loop.speculator.poll()
    assert answer(verifier, later) == 0
    verifier.channel.open_sequence(0, 2, np.arange(9))
    fresh = outcome(generation=2)
    verifier.channel.post(fresh)
    loop.settle()
    assert answer(verifier, fresh) == LOOKAHEAD


def test_tokens_that_were_not_accepted_do_not_matter(loop: Loop, verifier: ScriptedVerifier) -> None:
    record = outcome(tokens=[-1, VOCAB, 1 << 30, 0])
    verifier.channel.post(record)
    loop.settle()
    assert answer(verifier, record) == LOOKAHEAD


@pytest.mark.parametrize(("slot", "generation"), [(0, 2), (0, -1), (-1, 1), (8, 1), (5, 1), (1 << 30, 1)])
def test_outcomes_and_closes_of_what_is_not_open_are_ignored(
    loop: Loop, verifier: ScriptedVerifier, slot: int, generation: int
) -> None:
    verifier.channel.post(outcome(slot, generation))
    verifier.channel.close_sequence(slot, generation)
    loop.settle()
    assert loop.speculator.statistics.stale == 2
    assert loop.speculator.num_served == 2


@pytest.mark.parametrize("tokens", [[], [VOCAB], [-1], list(range(30)) * 20])
def test_prompts_that_cannot_be_served(loop: Loop, verifier: ScriptedVerifier, tokens: list[int]) -> None:
    verifier.channel.open_sequence(2, 1, np.array(tokens, np.int64))
    record = outcome(slot=2)
    verifier.channel.post(record)
    loop.speculator.poll()
    assert answer(verifier, record) == 0
    loop.settle()
    assert loop.speculator.num_served == 2
    verifier.channel.close_sequence(2, 1)
    loop.settle()
    assert loop.speculator.statistics.stale == 0


@pytest.mark.parametrize(("slot", "generation"), [(-1, 1), (8, 1), (0, -3)])
def test_opens_out_of_range(loop: Loop, verifier: ScriptedVerifier, slot: int, generation: int) -> None:
    verifier.channel.open_sequence(slot, generation, np.arange(3))
    loop.settle()
    assert loop.speculator.statistics.invalid == 1
    assert loop.speculator.num_served == 2


def test_one_sequence_twice_in_a_batch(loop: Loop, verifier: ScriptedVerifier) -> None:
    first, second = outcome(bonus=3), outcome(round=1, bonus=4)
    verifier.channel.post(np.concatenate([first, outcome(slot=1), second]))
    loop.settle()
    assert answer(verifier, second) == LOOKAHEAD
    assert loop.speculator.statistics.invalid == 0
    tokens = verifier.channel.table.read_reply(
        *(second[name] for name in ("slot", "generation", "round")), second["bonus"]
    )
    assert tokens.tokens[0].tolist() == loop.models.continuation([0, 1, 2, 3, 4, 3, 4], LOOKAHEAD)


def test_empty_batch(loop: Loop, verifier: ScriptedVerifier) -> None:
    verifier.channel.post(np.zeros(0, outcome_dtype(LOOKAHEAD)))
    loop.settle()
    assert loop.speculator.num_served == 2


def test_what_cannot_be_understood_costs_the_connection(loop: Loop, verifier: ScriptedVerifier) -> None:
    other = loop.connect()
    ours = loop.speculator.verifiers[0]

    def poll() -> None:
        raise ProtocolError("noise")

    ours.channel.poll = poll  # type: ignore[method-assign]
    other.channel.open_sequence(0, 1, np.arange(4))
    loop.settle()
    assert not ours.attached
    assert loop.speculator.statistics.channel_errors == 1
    assert loop.speculator.num_served == 1


def test_a_channel_that_breaks_while_the_speculator_looks_for_work_costs_the_connection(
    loop: Loop, verifier: ScriptedVerifier
) -> None:
    ours = loop.speculator.verifiers[0]

    def broken() -> None:
        raise ProtocolError("damaged counters")

    ours.channel.pending = ours.channel.poll = broken  # type: ignore[method-assign,assignment]
    assert loop.speculator.pending()
    loop.speculator.poll()
    assert not ours.attached
    assert not loop.speculator.pending()


def test_an_answer_already_given_stays_when_the_context_ends() -> None:
    """The prompt is more than a chunk behind (answered with nothing) and this outcome is its last (answered again)."""
    loop = Loop.build(context=100, chunk=4)
    verifier = loop.connect()
    verifier.channel.open_sequence(0, 1, np.arange(98) % VOCAB)
    for round_ in range(2):
        record = outcome(round=round_, bonus=3)
        verifier.channel.post(record)
        loop.speculator.poll()
        assert answer(verifier, record) == 0
    assert loop.speculator.num_served == 0


@pytest.mark.parametrize("seed", range(20))
def test_noise(seed: int) -> None:
    """Random records of one verifier, while another one works: no crash, no leak, no wrong speculation."""
    loop = Loop.build(seed, max_sequences=6, max_total_tokens=700)
    noisy, other = loop.connect(), loop.connect()
    other.unserved_allowed = True
    rng = np.random.default_rng(seed)
    other.open(0, loop.prompt(), 60)
    while not other.sequences[0].finished:
        for _ in range(5):
            slot, generation = int(rng.integers(-1, 9)), int(rng.integers(0, 3))
            kind = rng.integers(4)
            if kind == 0:
                noisy.channel.open_sequence(
                    slot, generation, rng.integers(-1, VOCAB + 1, int(rng.integers(0, 40))) % VOCAB
                )
            elif kind == 1:
                noisy.channel.close_sequence(slot, generation)
            else:
                noisy.channel.post(random_outcomes(rng))
        other.round()
    sequence = other.close(0)
    assert sequence.text == loop.models.autoregressive(sequence.prompt, len(sequence.text) - len(sequence.prompt))
    for ours in loop.speculator.verifiers:
        loop.speculator.detach(ours)
    loop.settle()
    assert loop.speculator.num_served == loop.speculator.num_waiting == 0
    assert loop.speculator.num_free_cells == 700


def random_outcomes(rng: np.random.Generator) -> NDArray[np.void]:
    records = np.zeros(int(rng.integers(0, 6)), outcome_dtype(LOOKAHEAD))
    for name, low, high in (
        ("slot", -1, 9),
        ("generation", 0, 3),
        ("round", 0, 3),
        ("num_accepted", 0, 5),
        ("bonus", 0, VOCAB),
        ("num_sent", -(2**31), 2**31 - 1),
    ):
        records[name] = rng.integers(low, high, len(records))
    records["tokens"] = rng.integers(-1, VOCAB, records["tokens"].shape)
    return records


def test_a_new_generation_replaces_the_old_one(loop: Loop, verifier: ScriptedVerifier) -> None:
    verifier.channel.open_sequence(0, 2, np.arange(9))
    old, new = outcome(generation=1), outcome(generation=2)
    verifier.channel.post(old)
    verifier.channel.post(new)
    loop.settle()
    assert answer(verifier, new) == LOOKAHEAD
    assert loop.speculator.statistics.stale == 1
    assert loop.speculator.num_served == 2
