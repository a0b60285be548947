"""What a round costs the speculator, counted and not timed: steps, writes, bytes, calls of Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from closed_loop import Loop, ScriptedVerifier
from numpy.typing import NDArray

from speculator_service import outcome_batch, settling, tables
from speculator_service.saguaro import outcomes
from speculator_service.statistics import OutcomeKind, StepKind
from ssd_proto.records import Entries

LOOKAHEAD, FAN_OUT, ROUNDS = 4, 3, 4
NUM_OUTCOMES = FAN_OUT * (LOOKAHEAD + 1)


@dataclass
class Work:
    """Of `ROUNDS` rounds of hits, tables included."""

    writes: list[int] = field(default_factory=list)
    """Entries of each write."""
    num_bytes: int = 0
    num_begins: int = 0
    num_calls: int = 0
    """Of functions of Python or C, the draft model's left out."""


class Counter:
    """Counts what the speculator does."""

    def __init__(self, loop: Loop) -> None:
        self.work = Work()
        channel = loop.speculator.verifiers[0].channel
        self._write, self._begin, self._step = channel.write, channel.begin, loop.draft.step
        channel.write, channel.begin = self._count_write, self._count_begin  # type: ignore[method-assign]
        loop.draft.step = self._without_profile(loop.draft.step)  # type: ignore[method-assign]
        loop.draft.adopt = self._without_profile(loop.draft.adopt)  # type: ignore[method-assign]

    def _count_write(self, entries: Entries) -> None:
        assert entries.q is None
        self.work.writes.append(len(entries.slots))
        self.work.num_bytes += 8 * len(entries.slots) * (2 + entries.tokens.shape[1])
        self._write(entries)

    def _count_begin(self, slots: NDArray[np.integer], rounds: NDArray[np.integer], keys: NDArray[np.int64]) -> None:
        self.work.num_begins += 1
        self.work.num_bytes += keys.nbytes
        self._begin(slots, rounds, keys)

    def _without_profile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            sys.setprofile(None)
            try:
                return function(*args)
            finally:
                sys.setprofile(self.profile)

        return call

    def profile(self, frame: object, event: str, arg: object) -> None:
        self.work.num_calls += event in ("call", "c_call")


def settle(loop: Loop, counter: Counter | None = None) -> None:
    sys.setprofile(counter.profile if counter else None)
    try:
        loop.settle()
    finally:
        sys.setprofile(None)


def begun(batch: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Loop, ScriptedVerifier]:
    """A target that always agrees with the draft, so that all tokens are accepted; nothing is planned anew."""
    loop = Loop.build(lookahead=LOOKAHEAD, fan_out=FAN_OUT, disagreement=0.0)
    monkeypatch.setattr(loop.speculator.planner, "is_due", lambda: False)
    verifier = loop.connect()
    verifier.steps_while_verifying = 0
    for slot in range(batch):
        verifier.open(slot, [1 + slot, 2, 3], 100)
    for _ in range(2):
        settle(loop)
        verifier.round()
    settle(loop)
    return loop, verifier


def worked(batch: int, monkeypatch: pytest.MonkeyPatch) -> Work:
    loop, verifier = begun(batch, monkeypatch)
    statistics = loop.speculator.statistics
    before = dict(statistics.steps), statistics.outcomes[OutcomeKind.HIT], statistics.tables
    counter = Counter(loop)
    for _ in range(ROUNDS):
        verifier.round()  # its own polls are not counted among the calls
        settle(loop, counter)
    assert statistics.outcomes[OutcomeKind.HIT] - before[1] == ROUNDS * batch
    assert statistics.tables - before[2] == ROUNDS * batch
    made = {kind: statistics.steps[kind] - before[0][kind] for kind in StepKind}
    assert made == {**dict.fromkeys(StepKind, 0), StepKind.TABLE: ROUNDS * (LOOKAHEAD + 1)}
    return counter.work


@pytest.mark.parametrize("batch", [1, 8])
def test_a_step_publishes_all_its_cells_by_one_write(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work = worked(batch, monkeypatch)
    known = FAN_OUT * LOOKAHEAD * batch  # outcomes whose bonus token is known at once; the others one step later
    all_ = NUM_OUTCOMES * batch
    replies = batch
    assert work.writes == ROUNDS * [replies, known, *[all_] * (LOOKAHEAD - 1), all_ - known]
    assert work.num_begins == 2 * ROUNDS, "the outcomes are named when the table is begun, and once more"
    entries = ROUNDS * batch * (1 + NUM_OUTCOMES * LOOKAHEAD)
    assert work.num_bytes == 8 * (entries * (2 + LOOKAHEAD) + 2 * ROUNDS * batch * NUM_OUTCOMES)


def test_calls_do_not_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    one, eight = (worked(batch, monkeypatch).num_calls for batch in (1, 8))
    steps = ROUNDS * (LOOKAHEAD + 1)
    assert 20 * steps < one < 400 * steps
    assert eight < 1.02 * one


def test_nothing_is_compiled_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compiled function was only ever called with the types that it was prepared for."""
    loop, verifier = begun(3, monkeypatch)
    verifier.drop_probability = verifier.lucky_padding = 0.4
    for _ in range(10):
        verifier.round()
        settle(loop)
    functions = (tables.fork, tables.next_step, tables.take_step, tables.record_all)
    for function in (*functions, settling._settle_all, settling._commit_all, outcome_batch._judge, outcomes._scan):
        assert len(function.signatures) == 1, function.__name__  # type: ignore[attr-defined]
