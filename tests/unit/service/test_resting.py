"""Whether to speculate at all: what is found out, and what the search for it costs."""

from __future__ import annotations

import numpy as np
import pytest

from speculator_service.resting import Resting

NUM_ROUNDS = 5000


class Load:
    """Rounds of one kind of batch. Times scatter by a fifth, numbers of tokens by 1."""

    def __init__(self, resting: Resting, tokens: float, seconds: float, batch_size: int = 4, seed: int = 0) -> None:
        self._resting, self._tokens, self._seconds, self._batch_size = resting, tokens, seconds, batch_size
        self._rng = np.random.default_rng(seed)
        self.spent = self.put_out = 0.0
        self.ways: list[bool] = []

    def run(self, num_rounds: int) -> None:
        """Decode; a round without speculation takes 1 and yields a token of each sequence."""
        for _ in range(num_rounds):
            decision = self._resting.decide(self._batch_size, True)
            seconds = (1.0 if decision.rests else self._seconds) * self._rng.uniform(0.8, 1.2)
            tokens = 1.0 if decision.rests else max(1.0, self._tokens + self._rng.uniform(-1, 1))
            self._resting.round_took(decision, tokens, seconds)
            self.spent, self.put_out = self.spent + seconds, self.put_out + tokens
            self.ways.append(decision.rests)

    @property
    def speedup(self) -> float:
        """Over decoding without speculation."""
        return self.put_out / self.spent


@pytest.mark.parametrize(("tokens", "seconds"), [(1.6, 2.4), (3.0, 4.0), (2.0, 2.3)])
def test_a_loss_is_given_up(tokens: float, seconds: float) -> None:
    load = Load(Resting(), tokens, seconds)
    load.run(NUM_ROUNDS)
    assert np.mean(load.ways[-1000:]) > 0.95
    assert load.speedup > 0.97


@pytest.mark.parametrize(("tokens", "seconds"), [(3.0, 1.0), (4.0, 1.5), (2.0, 1.6)])
def test_a_gain_is_kept(tokens: float, seconds: float) -> None:
    load = Load(Resting(), tokens, seconds)
    load.run(NUM_ROUNDS)
    assert not any(load.ways[-10:])
    assert load.speedup > 0.98 * tokens / seconds


def test_nothing_is_tried_within_the_first_rounds() -> None:
    load = Load(Resting(), 2.0, 3.0, batch_size=1)
    load.run(60)
    assert not any(load.ways)


def test_another_load_is_noticed() -> None:
    resting = Resting()
    Load(resting, 1.5, 2.5).run(1000)
    assert resting.num_resting == 1
    later = Load(resting, 4.0, 1.5)
    later.run(NUM_ROUNDS)
    assert resting.num_resting == 0
    assert not any(later.ways[-10:])


def test_kinds_of_batches_are_told_apart() -> None:
    resting = Resting()
    large, small = Load(resting, 1.5, 2.5, batch_size=32), Load(resting, 3.0, 1.1, batch_size=1)
    for _ in range(100):
        large.run(10)
        small.run(10)
    assert all(large.ways[-10:])
    assert not any(small.ways[-10:])


def test_a_prefill_within_a_round_does_not_count_against_it() -> None:
    resting = Resting()
    for number in range(2000):
        decision = resting.decide(4, False)
        tokens, seconds = (1, 1.0) if decision.rests else (3, 1.5)
        resting.round_took(decision, tokens, 400.0 if number % 40 == 7 and not decision.rests else seconds)
    assert resting.num_resting == 0


def test_texts_that_are_computed_after_a_rest_do_not_count_against_speculation() -> None:
    """A changed load: speculation is twice as fast now, but each trial has first to compute what was put out."""
    resting = Resting()
    Load(resting, 1.5, 2.5).run(1000)
    assert resting.num_resting == 1
    since = 0
    for _ in range(NUM_ROUNDS):
        decision = resting.decide(4, True)
        since = 0 if decision.rests else since + 1
        is_plain = decision.rests or since <= 30
        resting.round_took(decision, 1 if is_plain else 2, 1.0, is_plain)
    assert resting.num_resting == 0


def test_a_service_that_never_catches_up_goes_on_resting() -> None:
    resting = Resting()
    Load(resting, 1.5, 2.5).run(1000)
    for _ in range(NUM_ROUNDS):
        decision = resting.decide(4, True)
        resting.round_took(decision, 1, 1.0 if decision.rests else 1.2, is_plain=True)
    assert resting.num_resting == 1


def test_a_round_that_another_verifier_has_overtaken_does_not_count() -> None:
    resting = Resting()
    early = resting.decide(4, True)
    Load(resting, 1.5, 2.5).run(1000)
    assert resting.decide(4, True).rests
    for _ in range(NUM_ROUNDS):
        resting.round_took(early, 1000, 1.0)
    assert resting.decide(4, True).rests
