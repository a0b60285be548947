"""The prefix cache: what is computed once, and that no text and no cell is ever wrong for it.

The tabular draft raises when a row attends to cells that hold anything but its own text.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulation.closed_loop import VOCAB, Loop, ScriptedVerifier

SYSTEM = np.random.default_rng(5).integers(0, VOCAB, 90).tolist()


def prefilled(loop: Loop) -> tuple[int, int]:
    """Prompt tokens computed, and taken from elsewhere."""
    statistics = loop.speculator.statistics
    return statistics.prefill_tokens, statistics.prefill_tokens_shared


def run(loop: Loop, verifier: ScriptedVerifier, slot: int) -> None:
    """Decode the sequence of ``slot`` to its end; its text must be the target's."""
    sequence = verifier.sequences[slot]
    while not sequence.finished:
        verifier.round()
    count = len(sequence.text) - len(sequence.prompt)
    assert sequence.text == loop.models.autoregressive(sequence.prompt, count)
    verifier.close(slot)
    loop.settle()


def test_a_burst_with_one_system_prompt_prefills_it_once() -> None:
    loop = Loop.build(chunk=32)
    verifier = loop.connect()
    prompts = [[*SYSTEM, *loop.prompt(4, 9)] for _ in range(6)]
    for slot, prompt in enumerate(prompts):
        verifier.open(slot, prompt, 30)
    loop.settle()
    computed, shared = prefilled(loop)
    assert computed + shared == sum(map(len, prompts))
    assert shared >= 5 * len(SYSTEM)
    for slot in range(6):
        run(loop, verifier, slot)
    assert loop.speculator.num_free_cells == loop.draft._capacity


def test_a_conversation_goes_on_where_it_ended() -> None:
    loop = Loop.build()
    verifier = loop.connect()
    text, answers = list(SYSTEM), 0
    for _ in range(3):
        before, _ = prefilled(loop)
        sequence = verifier.open(0, text, 12)
        known = len(text) - answers
        run(loop, verifier, 0)
        computed = prefilled(loop)[0] - before
        assert computed <= (known if answers == 0 else 10)  # the last bonus token, and the question
        text, answers = [*sequence.text, *loop.prompt(3, 6)], len(sequence.text)


def test_a_wide_row_is_given_to_who_begins_like_it() -> None:
    """With more free rows than one, the one that ended with this prompt is taken, and others keep theirs."""
    loop = Loop.build()
    verifier = loop.connect()
    other = loop.prompt(60, 61)
    for slot, prompt in enumerate((SYSTEM, other)):
        verifier.open(slot, prompt, 4)
        run(loop, verifier, slot)
    before = prefilled(loop)
    for slot, prompt in enumerate(([*SYSTEM, 1], [*other, 2])):
        verifier.open(slot, prompt, 4)
    loop.settle()
    computed, shared = np.subtract(prefilled(loop), before)
    assert (computed, shared) == (2, len(SYSTEM) + len(other))


def test_a_long_text_is_not_given_up_for_a_short_common_beginning() -> None:
    """The new sequence takes an empty row and copies; the conversation can still go on."""
    loop = Loop.build()
    verifier = loop.connect()
    verifier.open(0, SYSTEM, 4)
    run(loop, verifier, 0)
    verifier.open(1, [*SYSTEM[:20], 1, 2, 3], 4)
    loop.settle()
    assert prefilled(loop) == (len(SYSTEM) + 3, 20)
    verifier.open(2, [*SYSTEM, 1], 4)
    loop.settle()
    assert prefilled(loop) == (len(SYSTEM) + 4, 20 + len(SYSTEM))


def test_without_copies_only_rows_are_reused() -> None:
    """Some models keep more than keys and values."""
    loop = Loop.build()
    loop.draft.copy_trunk = lambda *_: False  # type: ignore[method-assign]
    verifier = loop.connect()
    for slot in range(3):
        verifier.open(slot, [*SYSTEM, slot], 8)
    loop.settle()
    assert prefilled(loop)[1] == 0
    run(loop, verifier, 0)
    verifier.open(0, [*SYSTEM, 0], 8)
    loop.settle()
    assert prefilled(loop)[1] == len(SYSTEM)
    for slot in range(3):
        run(loop, verifier, slot)


def test_what_can_never_fit_empties_no_cache() -> None:
    loop = Loop.build(max_total_tokens=128 + 15 * 4, context=128)
    verifier = loop.connect()
    verifier.unserved_allowed = True
    verifier.open(0, SYSTEM[:60], 4)
    run(loop, verifier, 0)
    verifier.open(1, loop.prompt(20, 21), 4)
    loop.settle()
    kept = loop.speculator._prefixes.num_kept
    verifier.open(2, loop.prompt(110, 111), 4)  # with the branches of both there is no room
    loop.settle()
    assert loop.speculator.num_waiting == 1
    assert loop.speculator._prefixes.num_kept == kept


@pytest.mark.parametrize("common", [0, 3, 15])
def test_a_short_common_beginning_is_computed_anew(common: int) -> None:
    loop = Loop.build()
    verifier = loop.connect()
    for slot in range(2):
        verifier.open(slot, [*SYSTEM[:common], slot, *loop.prompt(30, 31)], 4)
    loop.settle()
    assert prefilled(loop)[1] == 0


def test_what_ended_sequences_keep_gives_way() -> None:
    """The pool holds two sequences; kept cells never make one wait, and the oldest goes first."""
    loop = Loop.build(max_total_tokens=2 * (128 + 15 * 4), context=128)
    verifier = loop.connect()
    for number in range(12):
        first, second = loop.prompt(40, 60), loop.prompt(40, 60)
        verifier.open(0, first, 30)
        verifier.open(1, second if number % 3 else [*first[:30], *second], 30)
        loop.settle()
        assert loop.speculator.num_waiting == 0
        run(loop, verifier, 0)
        run(loop, verifier, 1)
    assert loop.speculator.num_free_cells == loop.draft._capacity


@pytest.mark.parametrize("seed", range(8))
def test_texts_and_cells_are_right_whatever_is_shared(seed: int) -> None:
    loop = Loop.build(seed, max_sequences=5, chunk=16, max_total_tokens=900)
    verifier = loop.connect()
    verifier.unserved_allowed = True  # there are fewer cells than six such sequences need
    bases = [loop.prompt(30, 70) for _ in range(3)]
    for _ in range(60):
        for slot in range(6):
            if slot not in verifier.sequences and loop.rng.random() < 0.5:
                base = bases[int(loop.rng.integers(3))]
                prompt = [*base[: int(loop.rng.integers(1, len(base) + 1))], *loop.prompt(1, 30)]
                verifier.open(slot, prompt, int(loop.rng.integers(2, 40)))
        if not verifier.sequences:
            continue
        verifier.round()
        for slot, sequence in list(verifier.sequences.items()):
            if sequence.finished:
                count = len(sequence.text) - len(sequence.prompt)
                assert sequence.text == loop.models.autoregressive(sequence.prompt, count)
                verifier.close(slot)
    assert prefilled(loop)[1] > 0
    for slot in list(verifier.sequences):
        verifier.close(slot)
    loop.settle()
    assert loop.speculator.num_free_cells == loop.draft._capacity
