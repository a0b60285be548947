"""How far to speculate: what is found out, and what the search for it costs."""

from __future__ import annotations

import numpy as np
import pytest

from speculator_service.ways import Decision, Way, Ways

NUM_ROUNDS = 5000


def two_ways() -> Ways:
    return Ways([Way.AHEAD, Way.REST])


def rests(decision: Decision) -> bool:
    return decision.way is Way.REST


class Load:
    """Rounds of one kind of batch. Times scatter by a fifth, numbers of tokens by 1."""

    def __init__(self, ways: Ways, tokens: float, seconds: float, batch_size: int = 4, seed: int = 0) -> None:
        self._ways, self._tokens, self._seconds, self._batch_size = ways, tokens, seconds, batch_size
        self._rng = np.random.default_rng(seed)
        self.spent = self.put_out = 0.0
        self.ways: list[bool] = []

    def run(self, num_rounds: int) -> None:
        """Decode; a round without speculation takes 1 and yields a token of each sequence."""
        for _ in range(num_rounds):
            decision = self._ways.decide(self._batch_size, True)
            seconds = (1.0 if rests(decision) else self._seconds) * self._rng.uniform(0.8, 1.2)
            tokens = 1.0 if rests(decision) else max(1.0, self._tokens + self._rng.uniform(-1, 1))
            self._ways.round_took(decision, tokens, seconds)
            self.spent, self.put_out = self.spent + seconds, self.put_out + tokens
            self.ways.append(rests(decision))

    @property
    def speedup(self) -> float:
        """Over decoding without speculation."""
        return self.put_out / self.spent


@pytest.mark.parametrize(("tokens", "seconds"), [(1.6, 2.4), (3.0, 4.0), (2.0, 2.3)])
def test_a_loss_is_given_up(tokens: float, seconds: float) -> None:
    load = Load(two_ways(), tokens, seconds)
    load.run(NUM_ROUNDS)
    assert np.mean(load.ways[-1000:]) > 0.95
    assert load.speedup > 0.97


def test_tables_are_given_time_to_learn() -> None:
    """Before drafts just in time are tried; then these two are compared as often as any."""
    ways, seen = Ways([Way.AHEAD, Way.REST, Way.JUST_IN_TIME]), []
    for number in range(600):
        decision = ways.decide(8, False)
        seen.append(decision.way)
        learning = min(1.0, number / 100)
        tokens = {Way.AHEAD: 2 + 2 * learning, Way.REST: 1.0, Way.JUST_IN_TIME: 3.0}[decision.way]
        ways.round_took(decision, tokens, 1.0)
    assert seen.index(Way.REST) < 30
    assert 250 < seen.index(Way.JUST_IN_TIME) < 350
    assert seen[-100:].count(Way.AHEAD) > 60


@pytest.mark.parametrize(("tokens", "seconds"), [(3.0, 1.0), (4.0, 1.5), (2.0, 1.6)])
def test_a_gain_is_kept(tokens: float, seconds: float) -> None:
    load = Load(two_ways(), tokens, seconds)
    load.run(NUM_ROUNDS)
    assert not any(load.ways[-10:])
    assert load.speedup > 0.98 * tokens / seconds


def test_nothing_is_tried_within_the_first_rounds() -> None:
    load = Load(two_ways(), 2.0, 3.0, batch_size=1)
    load.run(60)
    assert not any(load.ways)


def test_another_load_is_noticed() -> None:
    ways = two_ways()
    Load(ways, 1.5, 2.5).run(1000)
    assert ways.choices()[Way.REST] == 1
    later = Load(ways, 4.0, 1.5)
    later.run(NUM_ROUNDS)
    assert ways.choices()[Way.AHEAD] == 1
    assert not any(later.ways[-10:])


def test_kinds_of_batches_are_told_apart() -> None:
    ways = two_ways()
    large, small = Load(ways, 1.5, 2.5, batch_size=32), Load(ways, 3.0, 1.1, batch_size=1)
    for _ in range(100):
        large.run(10)
        small.run(10)
    assert all(large.ways[-10:])
    assert not any(small.ways[-10:])


def test_a_prefill_within_a_round_does_not_count_against_it() -> None:
    ways = two_ways()
    for number in range(2000):
        decision = ways.decide(4, False)
        tokens, seconds = (1, 1.0) if rests(decision) else (3, 1.5)
        ways.round_took(decision, tokens, 400.0 if number % 40 == 7 and not rests(decision) else seconds)
    assert ways.choices()[Way.AHEAD] == 1


def test_texts_that_are_computed_after_a_rest_do_not_count_against_speculation() -> None:
    """A changed load: speculation is twice as fast now, but each trial has first to compute what was put out."""
    ways = two_ways()
    Load(ways, 1.5, 2.5).run(1000)
    assert ways.choices()[Way.REST] == 1
    since = 0
    for _ in range(NUM_ROUNDS):
        decision = ways.decide(4, True)
        since = 0 if rests(decision) else since + 1
        is_plain = rests(decision) or since <= 30
        ways.round_took(decision, 1 if is_plain else 2, 1.0, is_plain)
    assert ways.choices()[Way.AHEAD] == 1


def test_a_service_that_never_catches_up_goes_on_resting() -> None:
    ways = two_ways()
    Load(ways, 1.5, 2.5).run(1000)
    for _ in range(NUM_ROUNDS):
        decision = ways.decide(4, True)
        ways.round_took(decision, 1, 1.0 if rests(decision) else 1.2, is_plain=True)
    assert ways.choices()[Way.REST] == 1


def test_a_round_that_another_verifier_has_overtaken_does_not_count() -> None:
    ways = two_ways()
    early = ways.decide(4, True)
    Load(ways, 1.5, 2.5).run(1000)
    assert rests(ways.decide(4, True))
    for _ in range(NUM_ROUNDS):
        ways.round_took(early, 1000, 1.0)
    assert rests(ways.decide(4, True))


SPEEDS = {Way.AHEAD: 1.0, Way.REST: 0.8, Way.JUST_IN_TIME: 1.0}


@pytest.mark.parametrize("best", list(Way))
def test_the_best_of_three_is_found_soon_and_kept(best: Way) -> None:
    ways, rng, spent, chosen = Ways(list(Way)), np.random.default_rng(1), 0.0, []
    speeds = SPEEDS | {best: 1.2}
    for _ in range(NUM_ROUNDS):
        decision = ways.decide(8, False)
        seconds = rng.uniform(0.8, 1.2) / speeds[decision.way]
        ways.round_took(decision, 1.0, seconds)
        spent += seconds
        chosen.append(decision.way)
    assert chosen[:20] == [Way.AHEAD] * 20
    assert chosen[150] is best
    assert NUM_ROUNDS / spent > 0.98 * 1.2


def test_all_are_tried_in_one_search() -> None:
    ways, chosen = Ways(list(Way)), []
    for _ in range(100):
        chosen.append(ways.decide(8, False).way)
        ways.round_took(ways.decide(8, False), 1.0, 1.0 if chosen[-1] is Way.AHEAD else 1.5)
    assert set(chosen) == set(Way)
    assert chosen[-1] is Way.AHEAD
