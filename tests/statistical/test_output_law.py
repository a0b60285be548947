"""The emitted text is distributed exactly as the target's own sampling, in every case."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chi_square import chi_square_deviation
from tabular_loop import TabularLoop

LIMIT = 4.5
"""Standard deviations; seeds are fixed, so a test that passes does so always."""


def deviation(loop: TabularLoop, count: int, length: int) -> float:
    tokens = loop.run(count, length)
    cells = (tokens * loop.vocab_size ** torch.arange(length - 1, -1, -1)).sum(1)
    observed = np.bincount(cells.numpy(), minlength=loop.vocab_size**length)
    return chi_square_deviation(observed, loop.law(length))


@pytest.mark.parametrize("backup", ["primary", "greedy", "random", "stale", "short", "empty"])
@pytest.mark.parametrize("downweight", [0.0, 0.3, 1.0])
def test_every_backup_and_c(backup: str, downweight: float) -> None:
    loop = TabularLoop(backup=backup, downweight=downweight)
    assert deviation(loop, 100_000, 4) < LIMIT
    assert 0.05 < loop.hit_rate < 0.95  # both kinds were there


@pytest.mark.parametrize(
    ("lookahead", "fan_out", "length"), [(1, (2, 2), 3), (3, (1, 0, 0, 2), 5), (4, (2, 1, 1, 1, 2), 6)]
)
@pytest.mark.parametrize("backup", ["primary", "random"])
def test_lookaheads(lookahead: int, fan_out: tuple[int, ...], length: int, backup: str) -> None:
    """As many tokens as it takes to see all of a round and the beginning of the next."""
    loop = TabularLoop(
        vocab_size=4, num_kept=4, lookahead=lookahead, fan_out=fan_out, backup=backup, downweight=0.3, seed=5
    )
    assert deviation(loop, 150_000, length) < LIMIT


@pytest.mark.parametrize(("target", "draft"), [(0.6, 1.3), (1.3, 0.6), (1.0, 0.0)])
def test_temperatures_differ(target: float, draft: float) -> None:
    loop = TabularLoop(temperature=target, draft_temperature=draft, downweight=0.3, seed=2)
    assert deviation(loop, 100_000, 4) < LIMIT


@pytest.mark.parametrize("num_kept", [1, 2, 3])
@pytest.mark.parametrize("ties", [False, True])
def test_truncation_and_ties(num_kept: int, ties: bool) -> None:
    """q holds the m most likely tokens only, whichever of equals; it is what was sampled from."""
    loop = TabularLoop(num_kept=num_kept, ties=ties, downweight=0.3, backup="stale", seed=3)
    if ties:
        assert (loop.draft_logits.sort(-1).values.diff(dim=-1) == 0).any()
    assert deviation(loop, 100_000, 4) < LIMIT


def test_millions_of_draws() -> None:
    """A bias of two in a thousand would show: five standard deviations of a share."""
    loop = TabularLoop(vocab_size=6, num_kept=6, lookahead=1, fan_out=(2, 2), backup="random", downweight=0.3, seed=7)
    assert deviation(loop, 2_000_000, 2) < LIMIT


def test_greedy_target_is_followed_token_for_token() -> None:
    for backup in ("primary", "greedy", "random", "stale", "short", "empty"):
        loop = TabularLoop(backup=backup, greedy=True, downweight=0.3)
        tokens = loop.run(2000, 12)
        expected, last = [], 0
        for _ in range(12):
            last = int(loop.target[last].argmax())
            expected.append(last)
        assert (tokens == torch.tensor(expected)).all(), backup


def test_c_trades_acceptance_for_hits() -> None:
    """In the loop, not by formula: a lower C hits more often."""
    rates = []
    for downweight in (1.0, 0.3, 0.0):
        loop = TabularLoop(backup="primary", downweight=downweight)
        loop.run(20_000, 4)
        rates.append(loop.hit_rate)
    assert rates == sorted(rates)
    assert rates[-1] > rates[0] + 0.05
