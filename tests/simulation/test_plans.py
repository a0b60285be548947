"""Fan-out lists, backups, stop tokens and shorter speculations in the closed loop."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from closed_loop import Loop, ScriptedVerifier
from numpy.typing import NDArray
from test_closed_loop import assert_all_free, run

from speculator_service.saguaro.sources import Source
from speculator_service.statistics import OutcomeKind, StepKind
from ssd_proto.records import NO_KEY, ProposalKind, Sampling, outcome_dtype


def connected(loop: Loop) -> ScriptedVerifier:
    verifier = loop.connect()
    verifier.unserved_allowed = verifier.foreign_backups = True
    return verifier


@pytest.mark.parametrize("backup", ["suffix", "empty"])
@pytest.mark.parametrize("events", [0.0, 0.05])
def test_fast_backups_never_change_the_text(backup: str, events: float) -> None:
    loop = Loop.build(1, backup=backup)
    verifier = connected(loop)
    verifier.drop_probability = verifier.lucky_padding = 4 * events
    run(loop, [verifier], count=25, batch=5, events=events)
    statistics = loop.speculator.statistics
    assert statistics.invalid == 0
    assert statistics.backups[Source.SUFFIX if backup == "suffix" else Source.EMPTY] > 20
    assert statistics.backups[Source.PRIMARY] == 0
    assert verifier.kinds[ProposalKind.HIT] > 50


def test_after_an_empty_backup_all_outcomes_are_prepared_where_the_next_one_must_be() -> None:
    loop = Loop.build(2, backup="empty", fan_out=2)
    verifier = connected(loop)
    verifier.steps_while_verifying = 400
    sequence = verifier.open(0, [1, 2, 3], 40)
    misses = hits_after_miss = 0
    previous = ProposalKind.HIT
    while not sequence.finished:
        verifier.round()
        if previous == ProposalKind.EMPTY:
            misses += 1
            hits_after_miss += sequence.kind == ProposalKind.HIT
        previous = sequence.kind
    assert misses > 3
    assert hits_after_miss > 0.6 * misses  # ten candidates of forty tokens at the one position; two would be few


PERIOD = [7, 8, 9, 10, 11]


def repeating(fan_out: int) -> tuple[Loop, ScriptedVerifier, NDArray[np.void]]:
    """A sequence that repeats itself, and its first outcome, not posted yet: the period begins again."""
    loop = Loop.build(0, backup="suffix", fan_out=fan_out)
    verifier = connected(loop)
    verifier.channel.open_sequence(0, 1, np.array(PERIOD * 3))
    loop.settle()
    outcomes = np.zeros(1, outcome_dtype(4))
    outcomes["generation"], outcomes["bonus"] = 1, 7
    return loop, verifier, outcomes


def test_the_suffix_backup_continues_what_repeats_itself() -> None:
    loop, verifier, outcomes = repeating(0)
    verifier.channel.post(outcomes)
    loop.speculator.poll()  # without a single step of the model
    found = verifier.channel.wait(outcomes, verifier.channel.lookup(outcomes), 0.0)
    assert (found.depth[0], found.tokens[0].tolist()) == (4, [8, 9, 10, 11])


def test_what_a_backup_drafted_is_computed_in_one_step() -> None:
    """And the table after it is complete after K steps, whatever the target accepts of that."""
    loop, verifier, outcomes = repeating(2)
    steps = loop.speculator.statistics.steps
    before = dict(steps)
    verifier.channel.post(outcomes)
    loop.settle()
    assert {kind: steps[kind] - before[kind] for kind in StepKind if steps[kind] > before[kind]} == {
        StepKind.GLUE: 1,
        StepKind.TABLE: 4,
    }
    assert loop.draft.trunk_tokens(0)[:20] == PERIOD * 4


@pytest.mark.parametrize(
    "fan_out",
    [(0, 0, 0, 0, 6), (6, 0, 0, 0, 0), (0, 4, 0, 0, 2)],
    ids=["all accepted only (PEARL, AMUSD)", "first rejected only", "one branch point (SpecBranch)"],
)
def test_hand_written_lists(fan_out: tuple[int, ...]) -> None:
    loop = Loop.build(3, fan_out=fan_out)
    verifier = loop.connect()
    run(loop, [verifier], count=15, batch=4)
    hits = loop.speculator.statistics.accepted_hits
    assert all(not hit or count for hit, count in zip(hits[1:], fan_out[1:], strict=True))  # k = 0: after prompts, too
    assert hits.sum() > 10


def test_lists_after_hits_and_misses_differ() -> None:
    loop = Loop.build(4, fan_out=(1, 1, 1, 1, 4), fan_out_after_miss=(8, 0, 0, 0, 0))
    run(loop, [loop.connect()], count=20, batch=4)
    plan = loop.speculator.planner.plan
    assert plan.counts[Source.HIT, -1].tolist() == [1, 1, 1, 1, 4]
    assert plan.counts[Source.PRIMARY, -1].tolist() == [8, 0, 0, 0, 0]


@pytest.mark.parametrize("settings", [{"fan_out": "auto", "adapt_depth": True, "backup": "auto", "downweight": "auto"}])
def test_everything_automatic(settings: dict[str, Any]) -> None:
    loop = Loop.build(5, **settings)
    loop.speculator.planner._clock = itertools.count(1e9).__next__  # a plan is due as soon as there are enough outcomes
    verifier = connected(loop)
    run(loop, [verifier], count=40, batch=8, events=0.03)
    assert loop.speculator.statistics.invalid == 0
    assert loop.speculator.planner._num_plans > 1


def test_no_branch_after_a_stop_token() -> None:
    loop = Loop.build(6, fan_out=6)
    verifier = connected(loop)
    stops = (3, 11, 25)
    for slot in range(4):
        verifier.open(slot, loop.prompt(), 40, Sampling(stop_tokens=stops))
    rows = loop.speculator._rows
    seen = set()
    for _ in range(25):
        loop.settle()
        keys = rows.keys[:4]
        seen |= set((keys[keys != NO_KEY] & 0xFFFFFFFF).tolist())
        for row in range(4):
            chain = rows.chains(np.array([row]))[0, : rows.depth[row]].tolist()
            ends = [place for place, token in enumerate(chain) if token in stops]
            if ends:
                prepared = keys[row][keys[row] != NO_KEY] >> 32
                assert not len(prepared) or prepared.max() <= ends[0]
        verifier.round()
        for slot, sequence in list(verifier.sequences.items()):
            if any(token in stops for token in sequence.text[len(sequence.prompt) :]):
                verifier.close(slot)
                verifier.open(slot, loop.prompt(), 40, Sampling(stop_tokens=stops))
    assert len(seen) > 20
    assert not seen & set(stops)


def test_an_outcome_with_a_stop_token_is_answered_at_once_with_nothing() -> None:
    loop = Loop.build(7)
    verifier = loop.connect()
    verifier.channel.open_sequence(0, 1, np.array([1, 2]), Sampling(stop_tokens=(9,)))
    loop.settle()
    outcomes = np.zeros(1, outcome_dtype(4))
    outcomes["generation"], outcomes["bonus"] = 1, 9
    verifier.channel.post(outcomes)
    loop.speculator.poll()
    found = verifier.channel.lookup(outcomes)
    found = verifier.channel.wait(outcomes, found, 0.0)
    assert (found.depth[0], found.kind[0]) == (0, ProposalKind.EMPTY)
    assert loop.speculator.statistics.outcomes[OutcomeKind.STOPPED] == 1
    assert not loop.drive()  # nothing is drafted after the end


def test_a_shorter_speculation_is_a_hit_without_waiting() -> None:
    loop = Loop.build(8, fan_out=4, backup="primary")
    planner = loop.speculator.planner
    verifier = connected(loop)
    verifier.steps_while_verifying = 400
    planner.plan = planner.plan._replace(depth=2, jit_depth=3)
    planner.is_due = lambda: False  # type: ignore[method-assign]
    sequence = verifier.open(0, loop.prompt(), 60)
    depths: dict[ProposalKind, set[int]] = {kind: set() for kind in ProposalKind}
    while not sequence.finished:
        verifier.round()
        depths[sequence.kind].add(len(sequence.proposal))
    assert depths[ProposalKind.HIT] == {2}
    assert depths[ProposalKind.BACKUP] == {3}
    verifier.close(0)
    assert_all_free(loop)
