from __future__ import annotations

import numpy as np
import pytest
from closed_loop import Loop, ScriptedVerifier, shm_channels

from speculator_service.saguaro.sources import Source
from speculator_service.statistics import OutcomeKind, StepKind
from speculator_service.ways import Decision, Way
from ssd_proto.records import ProposalKind


def run(loop: Loop, verifiers: list[ScriptedVerifier], count: int, batch: int, events: float = 0.0) -> None:
    """Complete ``count`` sequences per verifier, at most ``batch`` at once; check text, and that nothing is left."""
    left = [count] * len(verifiers)
    while any(left) or any(verifier.sequences for verifier in verifiers):
        for number, verifier in enumerate(verifiers):
            free = [slot for slot in range(8) if slot not in verifier.sequences]
            while left[number] and len(verifier.sequences) < batch:
                slot = free.pop(int(loop.rng.integers(len(free))))
                verifier.open(slot, loop.prompt(), int(loop.rng.integers(1, 60)))
                left[number] -= 1
            verifier.round()
            for slot, sequence in list(verifier.sequences.items()):
                if sequence.finished or loop.rng.random() < events:
                    expected = loop.models.autoregressive(sequence.prompt, len(sequence.text) - len(sequence.prompt))
                    assert verifier.close(slot).text == expected
                elif loop.rng.random() < events:
                    verifier.reopen(slot)
    assert_all_free(loop)


def assert_all_free(loop: Loop) -> None:
    loop.settle()
    assert loop.speculator.num_served == 0
    assert loop.speculator.num_waiting == 0
    assert loop.speculator.num_free_cells == loop.draft._capacity


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_text_and_accepted_length_are_ideal(batch: int, seed: int) -> None:
    loop = Loop.build(seed)
    verifier = loop.connect()
    run(loop, [verifier], count=25, batch=batch)
    statistics = loop.speculator.statistics
    assert statistics.invalid == statistics.stale == statistics.channel_errors == 0
    assert statistics.outcomes[OutcomeKind.HIT] > 0.3 * sum(statistics.outcomes.values())
    assert verifier.kinds[ProposalKind.HIT] > 0
    assert statistics.accepted.sum() == sum(statistics.outcomes.values())


@pytest.mark.parametrize("lookahead", [1, 2, 7])
@pytest.mark.parametrize("fan_out", [0, 1, 3])
def test_all_shapes(lookahead: int, fan_out: int) -> None:
    loop = Loop.build(lookahead=lookahead, fan_out=fan_out)
    run(loop, [loop.connect()], count=12, batch=4)


def test_uneven_fan_out_without_all_accepted() -> None:
    loop = Loop.build(lookahead=3, fan_out=[5, 0, 2, 0])
    run(loop, [loop.connect()], count=12, batch=4)


@pytest.mark.parametrize("seed", range(3))
def test_dropped_proposals_closes_and_retractions(seed: int) -> None:
    loop = Loop.build(seed)
    verifier = loop.connect()
    verifier.drop_probability = 0.3
    verifier.lucky_padding = 0.3
    run(loop, [verifier], count=40, batch=6, events=0.05)
    outcomes = loop.speculator.statistics.outcomes
    assert outcomes[OutcomeKind.UNUSED] > 0
    assert outcomes[OutcomeKind.DIVERGED] > 0
    assert loop.speculator.statistics.invalid == 0


@pytest.mark.parametrize("seed", range(3))
def test_deadlines_that_pass_while_the_speculator_drafts(seed: int) -> None:
    loop = Loop.build(seed)
    verifier = loop.connect()
    verifier.deadline_probability, verifier.lucky_padding, verifier.steps_while_verifying = 0.6, 0.2, 5
    verifier.unserved_allowed = True  # a prompt may grow beyond one chunk
    run(loop, [verifier], count=30, batch=4, events=0.02)
    assert loop.speculator.statistics.invalid == 0


@pytest.mark.parametrize("seed", range(4))
def test_ways_that_change_at_any_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop.build(seed, chunk=16)
    verifier = loop.connect()
    verifier.drop_probability = verifier.lucky_padding = 0.2
    verifier.unserved_allowed = True
    rng, state = np.random.default_rng(seed), {"way": Way.AHEAD}

    def decide(batch_size: int, is_sampled: bool) -> Decision:
        if rng.random() < 0.15:
            state["way"] = list(Way)[(list(Way).index(state["way"]) + 1) % len(Way)]
        return Decision(batch_size, is_sampled, state["way"])

    monkeypatch.setattr(loop.speculator.planner, "decide", decide)
    run(loop, [verifier], count=40, batch=6, events=0.03)
    outcomes = loop.speculator.statistics.outcomes
    assert outcomes[OutcomeKind.RESTED] > 5
    assert outcomes[OutcomeKind.HIT] > 50
    assert loop.speculator.statistics.backups[Source.PRIMARY] > 30
    assert loop.speculator.statistics.invalid == 0


def test_nothing_is_computed_while_all_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop.build()
    verifier = loop.connect()
    verifier.unserved_allowed = True
    monkeypatch.setattr(loop.speculator.planner, "decide", lambda *batch: Decision(*batch, Way.REST))
    run(loop, [verifier], count=12, batch=4)
    statistics = loop.speculator.statistics
    assert statistics.tables <= 2 * 12, "after prompts, whose sequences are not known to rest"
    assert statistics.steps[StepKind.DRAFT] <= 8, "for the first batch, before anything is decided"
    assert statistics.outcomes[OutcomeKind.RESTED] > 10 * statistics.tables


def test_nothing_is_prepared_just_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop.build()
    verifier = loop.connect()
    monkeypatch.setattr(loop.speculator.planner, "decide", lambda *batch: Decision(*batch, Way.JUST_IN_TIME))
    run(loop, [verifier], count=12, batch=4)
    outcomes = loop.speculator.statistics.outcomes
    assert outcomes[OutcomeKind.HIT] + outcomes[OutcomeKind.SHORT_HIT] <= 2 * 12, "those of tables after prompts"
    assert loop.speculator.statistics.backups[Source.PRIMARY] > 100
    assert outcomes[OutcomeKind.RESTED] == 0


def test_two_verifiers_share_the_engine() -> None:
    loop = Loop.build(max_sequences=8)
    run(loop, [loop.connect(shm_channels), loop.connect(shm_channels)], count=20, batch=4, events=0.03)
    for speculators, verifier in zip(loop.speculator.verifiers, loop.verifiers, strict=True):
        loop.speculator.detach(speculators)
        verifier.channel.close()


def test_slow_speculator_is_cut_short_but_right() -> None:
    loop = Loop.build()
    verifier = loop.connect()
    verifier.steps_while_verifying = 3
    run(loop, [verifier], count=20, batch=3)
    assert loop.speculator.statistics.outcomes[OutcomeKind.SHORT_HIT] > 0
    assert verifier.kinds[ProposalKind.SHORT_HIT] > 0


def test_more_sequences_than_rows_wait_and_are_served_later() -> None:
    loop = Loop.build(max_sequences=2)
    verifier = loop.connect()
    verifier.unserved_allowed = True
    run(loop, [verifier], count=30, batch=6)
    outcomes = loop.speculator.statistics.outcomes
    assert outcomes[OutcomeKind.UNSERVED] > 0
    assert outcomes[OutcomeKind.HIT] > 0


def test_little_kv_room_evicts_and_readmits() -> None:
    loop = Loop.build(max_sequences=6, max_total_tokens=500)
    verifier = loop.connect()
    verifier.unserved_allowed = True
    run(loop, [verifier], count=30, batch=6)
    assert loop.speculator.statistics.outcomes[OutcomeKind.UNSERVED] > 0


def test_context_limit_shrinks_speculations_and_never_stops_the_verifier() -> None:
    loop = Loop.build(context=64)
    verifier = loop.connect()
    verifier.open(0, loop.prompt(30, 31), wanted=80)
    verifier.open(1, loop.prompt(70, 71), wanted=20)  # longer than the draft can hold from the beginning
    for slot in (2, 3, 4):
        verifier.open(slot, loop.prompt(60, 64), wanted=10)
    depths = set()
    while verifier.sequences:
        verifier.round()
        for slot, sequence in list(verifier.sequences.items()):
            depths.add(len(sequence.proposal))
            if sequence.finished:
                assert sequence.text == loop.models.autoregressive(
                    sequence.prompt, len(sequence.text) - len(sequence.prompt)
                )
                verifier.close(slot)
    assert {0, 4} < depths  # and something in between
    assert_all_free(loop)


def test_long_prompt_is_prefilled_in_chunks_between_which_outcomes_are_served() -> None:
    loop = Loop.build(chunk=8, context=512)
    verifier = loop.connect()
    verifier.open(0, loop.prompt(10, 11), wanted=100)
    loop.settle()
    verifier.round()
    loop.settle()
    verifier.unserved_allowed = True
    verifier.steps_while_verifying = 4
    verifier.open(1, loop.prompt(300, 301), wanted=60)
    late = 0
    while not verifier.sequences[1].finished:
        verifier.round()
        if not verifier.sequences[1].proposal:
            late += 1
            assert len(verifier.sequences[0].proposal) == 4
    assert 1 < late < 40  # rounds went by, then the prompt was complete and speculations came
    assert verifier.sequences[1].proposal


def test_detach_frees_everything() -> None:
    loop = Loop.build()
    verifier, other = loop.connect(), loop.connect()
    for slot in range(3):
        verifier.open(slot, loop.prompt(), 100)
        other.open(slot, loop.prompt(), 100)
    verifier.round()
    other.round()
    gone = loop.speculator.verifiers[0]
    loop.speculator.detach(gone)
    loop.speculator.detach(gone)
    assert not gone.attached
    assert loop.speculator.num_served == 3
    other.round()
    for slot in range(3):
        other.close(slot)
    assert_all_free(loop)
