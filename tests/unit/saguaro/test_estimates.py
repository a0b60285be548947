"""On-line estimates recover the laws the outcomes were drawn from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from speculator_service.saguaro.allocation import expected_hit_rate, greedy_fan_out
from speculator_service.saguaro.estimates import OutcomeEstimates, PowerLaw
from speculator_service.saguaro.speedup import accepted_distribution, expected_tokens

K, M = 4, 6
LAW = PowerLaw(0.45, 0.8)


def draw_ranks(generator: np.random.Generator, law: PowerLaw, count: int) -> np.ndarray:
    """Ranks from 0 with P(rank >= F) = c F^-r."""
    u = generator.random(count)
    return np.where(u >= law.constant, 0, np.floor((u / law.constant) ** (-1 / law.exponent)).clip(1, 10**6)).astype(
        int
    )


def observe(
    estimates: OutcomeEstimates,
    generator: np.random.Generator,
    count: int,
    *,
    source: int = 0,
    acceptance: float = 0.75,
    law: PowerLaw = LAW,
    known: np.ndarray | int = M,
) -> None:
    """Outcomes in rounds of 8 with geometric acceptance and power-law ranks."""
    for _ in range(count // 8):
        accepted = generator.choice(K + 1, 8, p=accepted_distribution(acceptance, K))
        ranks = draw_ranks(generator, law, 8)
        seen = np.broadcast_to(known, K + 1)[accepted]
        rank = np.where(ranks < seen, ranks, -1)
        estimates.observe(np.full(8, source), accepted, np.full(8, K), rank, seen)


def test_recovers_acceptance_and_expected_tokens() -> None:
    estimates = OutcomeEstimates(K, M, half_life=1e9)
    observe(estimates, np.random.default_rng(0), 20_000)
    observe(estimates, np.random.default_rng(1), 20_000, source=1, acceptance=0.3)
    assert estimates.num_outcomes(0) == pytest.approx(20_000, rel=1e-4)
    for source, acceptance in enumerate((0.75, 0.3)):
        assert estimates.acceptance_rate(source) == pytest.approx(acceptance, abs=0.01)
        assert estimates.expected_tokens(source) == pytest.approx(expected_tokens(acceptance, K), rel=0.02)
        assert estimates.position_weights(source) == pytest.approx(accepted_distribution(acceptance, K), abs=0.015)
        assert estimates.position_weights(source).sum() == pytest.approx(1)


@pytest.mark.parametrize("known", [M, np.array([4, 3, 2, 2, 5]), np.array([1, 3, 6, 2, 0])])
def test_recovers_the_hit_law_also_when_only_hits_are_seen(known: np.ndarray | int) -> None:
    """Fan-out lists of hits alone censor the ranks at F_k; the law and the curves come out all the same."""
    estimates = OutcomeEstimates(K, M, half_life=1e9)
    observe(estimates, np.random.default_rng(2), 60_000, known=known)
    law = estimates.power_law(0)
    assert law.constant == pytest.approx(LAW.constant, abs=0.02)
    assert law.exponent == pytest.approx(LAW.exponent, abs=0.1)
    curves = estimates.hit_curves(0, 12)
    truth = [0.0, *(1 - LAW.constant * F**-LAW.exponent for F in range(1, 13))]
    assert curves.shape == (K + 1, 13)
    assert np.abs(curves - truth).max() < 0.04


def test_without_data_the_prior_holds() -> None:
    estimates = OutcomeEstimates(K, M, prior_acceptance_rate=0.6, prior_law=LAW)
    assert estimates.acceptance_rate(1) == pytest.approx(0.6)
    assert estimates.expected_tokens(1) == pytest.approx(expected_tokens(0.6, K))
    assert estimates.position_weights(1) == pytest.approx(accepted_distribution(0.6, K))
    assert estimates.power_law(1) == LAW
    assert estimates.hit_curves(1, 3)[2] == pytest.approx(
        [0, *(1 - LAW.constant * F**-LAW.exponent for F in (1, 2, 3))]
    )


def test_positions_differ_where_there_is_data() -> None:
    estimates = OutcomeEstimates(K, M, half_life=1e9)
    ones = np.ones(4000, np.int64)
    estimates.observe(0 * ones, 0 * ones, K * ones, 0 * ones, M * ones)  # position 0: always the first candidate
    estimates.observe(0 * ones, 2 * ones, K * ones, -ones, M * ones)  # position 2: never among them
    curves = estimates.hit_curves(0, M)
    assert curves[0, 1] > 0.99
    assert curves[2, M] < 0.05
    assert curves[2, M] < curves[1, M] < curves[0, M]


def test_curves_rise_and_are_probabilities() -> None:
    estimates = OutcomeEstimates(K, M)
    observe(estimates, np.random.default_rng(3), 400)
    curves = estimates.hit_curves(0, 20)
    assert (np.diff(curves, axis=1) >= 0).all()
    assert (curves[:, 0] == 0).all()
    assert (curves <= 1).all()
    assert estimates.hit_curves(0, 0).shape == (K + 1, 1)


def test_empty_proposals_say_nothing_of_acceptance_but_all_of_the_bonus_token_of_the_target() -> None:
    """Nothing was rejected: the ranks belong to the curve of "all accepted", whatever the number of tokens."""
    estimates = OutcomeEstimates(K, M, half_life=1e9)
    zeros = np.zeros(5000, np.int64)
    ranks = draw_ranks(np.random.default_rng(0), LAW, 5000)
    estimates.observe(zeros, zeros, zeros, np.where(ranks < M, ranks, -1), zeros + M)
    assert estimates.acceptance_rate(0) == pytest.approx(0.7)
    assert estimates.position_weights(0) == pytest.approx(accepted_distribution(0.7, K))
    assert estimates.expected_tokens(0) == pytest.approx(1, abs=0.05)
    curves = estimates.hit_curves(0, M)
    assert curves[K, 1:] == pytest.approx([1 - LAW.constant * F**-LAW.exponent for F in range(1, M + 1)], abs=0.02)


def test_short_speculations_leave_the_later_positions_unknown_not_bad() -> None:
    """Two tokens sent, all accepted: the third would be accepted as often as the others, as far as anybody knows."""
    estimates = OutcomeEstimates(K, M, half_life=1e9)
    twos = np.full(4000, 2)
    estimates.observe(0 * twos, twos, twos, 0 * twos, twos)
    assert estimates.acceptance_by_position(0) == pytest.approx([1, 1, 1, 1], abs=0.01)
    estimates.observe(0 * twos, twos, twos + 1, 0 * twos, twos)  # and the third is always rejected
    assert estimates.acceptance_by_position(0)[:3] == pytest.approx([1, 1, 0], abs=0.01)
    assert estimates.position_weights(0)[2] == pytest.approx(1, abs=0.02)
    assert estimates.position_weights(0).sum() == pytest.approx(1)


def test_forgets_what_is_half_lives_ago() -> None:
    estimates = OutcomeEstimates(K, M, half_life=500)
    observe(estimates, np.random.default_rng(4), 5000, acceptance=0.9)
    assert estimates.acceptance_rate(0) == pytest.approx(0.9, abs=0.03)
    observe(estimates, np.random.default_rng(5), 5000, acceptance=0.4)
    assert estimates.acceptance_rate(0) == pytest.approx(0.4, abs=0.06)
    assert estimates.num_outcomes(0) == pytest.approx(500 / np.log(2), rel=0.02)


def test_sources_forget_on_their_own() -> None:
    estimates = OutcomeEstimates(K, M, half_life=100)
    observe(estimates, np.random.default_rng(6), 80, source=1)
    before = estimates.num_outcomes(1)
    observe(estimates, np.random.default_rng(7), 800, source=0)
    assert estimates.num_outcomes(1) == before


def test_order_within_a_round_does_not_matter() -> None:
    generator = np.random.default_rng(8)
    columns = [generator.integers(0, high, 64) for high in (2, K + 1, 1, M + 3)]
    source, accepted, _, rank = columns
    rank = np.where(rank < M, rank, -1)
    one, other = OutcomeEstimates(K, M), OutcomeEstimates(K, M)
    order = generator.permutation(64)
    full, known = np.full(64, K), np.full(64, M)
    one.observe(source, accepted, full, rank, known)
    other.observe(source[order], accepted[order], full, rank[order], known)
    assert (one.hit_curves(0, 9) == other.hit_curves(0, 9)).all()
    nothing = np.zeros(0, np.int64)
    one.observe(nothing, nothing, nothing, nothing, nothing)
    assert (one.hit_curves(1, 9) == other.hit_curves(1, 9)).all()


def test_planned_fan_out_beats_uniform() -> None:
    """What the estimates are for: the measured plan hits more often under the true law."""
    estimates = OutcomeEstimates(K, M, half_life=1e9)
    observe(estimates, np.random.default_rng(9), 8000)
    planned = greedy_fan_out(20, estimates.position_weights(0), estimates.hit_curves(0, 20))
    truth = np.tile([0.0, *(1 - LAW.constant * F**-LAW.exponent for F in range(1, 21))], (K + 1, 1))
    weights = accepted_distribution(0.75, K)
    assert sum(planned) == 20
    assert expected_hit_rate(planned, weights, truth) > expected_hit_rate((4,) * 5, weights, truth)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: OutcomeEstimates(0, 3), "lookahead must be finite and at least 1"),
        (lambda: OutcomeEstimates(3, 0), "max_fan_out"),
        (lambda: OutcomeEstimates(3, 3, half_life=0), "half_life must be finite and greater than 0"),
        (lambda: OutcomeEstimates(3, 3, prior_acceptance_rate=2), "prior_acceptance_rate"),
        (lambda: OutcomeEstimates(3, 3, prior_law=PowerLaw(1.5, 1)), "prior_constant"),
        (lambda: OutcomeEstimates(3, 3).hit_curves(0, -1), "max_fan_out"),
    ],
)
def test_outside_of_the_domain(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
