"""The ratio rule against its executable specification, and at its edges. Its law: tests/statistical."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_ssd import rejection
from sglang_ssd.rejection import SparseProbs, draw, unpack, verify_by_equality, verify_by_ratio
from speculator_service.saguaro import rejection as specification
from speculator_service.saguaro.sampling import SparseDistribution
from ssd_proto.records import pack_probs

B, K, V, M = 400, 3, 9, 4


class Case:
    """Random chains: some drafts sampled from a sparse q, some not."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand(B, K + 1, V, generator=generator) * (torch.rand(B, K + 1, V, generator=generator) > 0.3)
        weights[..., 0] += 1e-3
        self.p = weights / weights.sum(-1, keepdim=True)
        ids = torch.rand(B, K, V, generator=generator).argsort(-1)[..., :M]
        probs = torch.rand(B, K, M, generator=generator)
        self.q = SparseProbs(ids, probs / probs.sum(-1, keepdim=True))
        place = torch.multinomial(self.q.probs.flatten(0, 1), 1, generator=generator).view(B, K, 1)
        self.drafts = ids.gather(-1, place).squeeze(-1)
        self.uniforms = torch.rand(B, K, generator=generator)


def with_uniforms(monkeypatch: pytest.MonkeyPatch, uniforms: torch.Tensor) -> None:
    monkeypatch.setattr(rejection.torch, "rand", lambda *_, **__: uniforms)


def laws(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights from which the bonus tokens are drawn, as they come."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(rejection, "draw", lambda weights, _: (seen.append(weights), weights.argmax(-1))[1])
    return seen


@pytest.mark.parametrize("is_sampled", [True, False])
def test_agrees_with_the_specification(monkeypatch: pytest.MonkeyPatch, is_sampled: bool) -> None:
    case = Case(0)
    with_uniforms(monkeypatch, case.uniforms)
    seen = laws(monkeypatch)
    q = case.q if is_sampled else SparseProbs(case.q.ids[..., :0], case.q.probs[..., :0])
    found = verify_by_ratio(case.p, case.drafts, q)
    expected_laws = laws_of_specification(monkeypatch)
    sparse = SparseDistribution(case.q.ids, case.q.probs) if is_sampled else None
    full, zero = torch.full((B,), K), torch.zeros(B)
    expected = specification.verify_chain(case.p, case.drafts, full, case.uniforms, zero, q=sparse)
    assert (found.num_accepted == expected.num_accepted).all()
    assert set(found.num_accepted.tolist()) >= set(range(K + 1 if is_sampled else 2))
    normalised = seen[0] / seen[0].sum(-1, keepdim=True)
    torch.testing.assert_close(normalised, expected_laws[0], atol=1e-6, rtol=1e-4)
    for row, k in enumerate(found.num_accepted.tolist()):
        assert found.tokens[row, :k].tolist() == case.drafts[row, :k].tolist()
        assert found.tokens[row, k] == seen[0][row].argmax()


def laws_of_specification(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(specification, "inverse_cdf", lambda law, _: (seen.append(law), law.argmax(-1))[1])
    return seen


def test_rows_may_be_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeroed words mean a draft that was not sampled, position by position."""
    case = Case(1)
    with_uniforms(monkeypatch, case.uniforms)
    seen = laws(monkeypatch)
    zeroed = torch.rand(B, K) < 0.5
    q = SparseProbs(case.q.ids.masked_fill(zeroed[..., None], 0), case.q.probs.masked_fill(zeroed[..., None], 0.0))
    mixed = verify_by_ratio(case.p, case.drafts, q)
    dense = torch.zeros(B, K, V).scatter_(-1, case.q.ids, case.q.probs)
    point = torch.nn.functional.one_hot(case.drafts, V).float()
    q_dense = torch.where(zeroed[..., None], point, dense)
    whole = SparseProbs(torch.arange(V).expand(B, K, V), q_dense)
    by_dense = verify_by_ratio(case.p, case.drafts, whole)
    assert (mixed.num_accepted == by_dense.num_accepted).all()
    torch.testing.assert_close(seen[0], seen[1])


def test_words_that_do_not_name_the_draft_say_nothing_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.tensor([[[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]])
    with_uniforms(monkeypatch, torch.tensor([[0.9]]))
    seen = laws(monkeypatch)
    verify_by_ratio(p, torch.tensor([[1]]), SparseProbs(torch.tensor([[[0, 1]]]), torch.tensor([[[1.0, 0.0]]])))
    torch.testing.assert_close(seen[0], torch.tensor([[0.5, 0.0, 0.2]]))


def test_one_hot_targets_are_followed() -> None:
    case = Case(2)
    best = torch.randint(0, V, (B, K + 1))
    p = torch.nn.functional.one_hot(best, V).float()
    drafts = torch.where(torch.rand(B, K) < 0.7, best[:, :-1], case.drafts)
    q = SparseProbs(torch.zeros(B, K, 1, dtype=torch.int64), torch.zeros(B, K, 1))
    k, tokens = verify_by_ratio(p, drafts, q)
    assert (k == (drafts == best[:, :-1]).cumprod(1).sum(1)).all()
    is_emitted = torch.arange(K + 1) <= k[:, None]
    assert (tokens == best)[is_emitted].all()


def test_a_round_without_drafts_is_plain_decoding() -> None:
    p = torch.tensor([0.0, 0.25, 0.75]).expand(4000, 1, 3)
    nothing = SparseProbs(torch.zeros(4000, 0, 2, dtype=torch.int64), torch.zeros(4000, 0, 2))
    k, tokens = verify_by_ratio(p, torch.zeros(4000, 0, dtype=torch.int64), nothing, generator=torch.manual_seed(1))
    assert k.tolist() == [0] * 4000
    assert tokens.shape == (4000, 1)
    assert not (tokens == 0).any()
    assert (tokens == 2).float().mean() == pytest.approx(0.75, abs=0.03)


def test_rows_that_are_offered_nothing_draw_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(3)
    with_uniforms(monkeypatch, torch.zeros(B, K))
    seen = laws(monkeypatch)
    k, _ = verify_by_ratio(case.p, case.drafts, case.q, torch.zeros(B, dtype=torch.int64))
    assert not k.any()
    torch.testing.assert_close(seen[0], case.p[:, 0])


def test_where_nothing_is_left_of_p_it_is_p(monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    with_uniforms(monkeypatch, torch.tensor([[1.0]]))  # as rounding might make it
    seen = laws(monkeypatch)
    verify_by_ratio(p, torch.tensor([[1]]), SparseProbs(torch.tensor([[[0, 1]]]), torch.tensor([[[0.5, 0.5]]])))
    assert seen[0].tolist() == [[0.5, 0.5, 0.0]]


def test_words_that_are_no_probabilities_count_as_none() -> None:
    values = np.array([[[0.25, -0.5, np.nan, np.inf, 1.5, 1.0]]], np.float32)
    ids, probs = unpack(torch.from_numpy(pack_probs(np.arange(6).reshape(1, 1, 6) + 2**17, values)))
    assert ids.tolist() == [[[2**17 + i for i in range(6)]]]
    assert probs.tolist() == [[[0.25, 0, 0, 0, 0, 1]]]


def test_draws_never_take_what_has_no_weight() -> None:
    weights = torch.tensor([[0.0, 1e-30, 0.0, 0.0]]).expand(50_000, 4)
    assert (draw(weights) == 1).all()


def test_draws_repeat_with_the_generator() -> None:
    case = Case(4)
    first, second = (
        verify_by_ratio(case.p, case.drafts, case.q, generator=torch.Generator().manual_seed(7)) for _ in range(2)
    )
    assert (first.tokens == second.tokens).all()


def test_equality() -> None:
    drafts = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    drawn = torch.tensor([[1, 2, 3, 4], [1, 7, 3, 4], [5, 2, 3, 4], [1, 2, 3, 4]], dtype=torch.int32)
    k, tokens = verify_by_equality(drawn, drafts, torch.tensor([3, 3, 3, 0]))
    assert k.tolist() == [3, 1, 0, 0]
    assert tokens.tolist() == drawn.tolist()
    assert tokens.dtype == torch.int64
