"""The CPU samplers draw from the distributions that they state: chi-square over many draws of small tables."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from sglang_ssd.cpu import samplers
from sglang_ssd.cpu.tree_ops import verify_tree_greedy

DRAWS = 200_000
VOCAB = 5


def chi_square_p(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Probability of a deviation at least this large if ``counts`` was drawn from ``probs`` (Wilson-Hilferty)."""
    possible = probs > 0
    assert counts[~possible].sum() == 0, "an impossible outcome was drawn"
    expected = probs[possible] * counts.sum()
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20)


class Verification:
    """The tensors of one verification of ``DRAWS`` equal requests."""

    def __init__(self, candidates: torch.Tensor, child: list[int], sibling: list[int], depth: int) -> None:
        batch, n = candidates.shape
        self.candidates, self.n = candidates, n
        self.predicts = torch.zeros(batch * n, dtype=torch.int32)
        self.accept_index = torch.full((batch, depth), -1, dtype=torch.int32)
        self.count = torch.full((batch,), -1, dtype=torch.int32)
        self.links = (
            torch.arange(batch * n).view(batch, n),
            torch.tensor(child).repeat(batch, 1),
            torch.tensor(sibling).repeat(batch, 1),
        )

    def run(self, sampler: Callable[..., None], target: torch.Tensor, draft: torch.Tensor) -> None:
        batch, n = self.candidates.shape
        sampler(
            self.predicts,
            self.accept_index,
            self.count,
            self.candidates,
            *self.links,
            torch.rand(batch, n),
            torch.rand(batch),
            target.expand(batch, *target.shape[-2:]),
            draft,
            1.0,
            1.0,
            True,
        )

    def tokens(self) -> torch.Tensor:
        """int64 [requests, depth]: the accepted drafts and the bonus token, then -1."""
        safe = self.accept_index.clamp(min=0).long()
        out = torch.where(self.accept_index >= 0, self.predicts[safe].long(), -1)
        assert torch.equal((out >= 0).sum(-1), self.count.long() + 1)
        return out


CHAIN = ([1, 2, -1], [-1, -1, -1])


def chain_target() -> torch.Tensor:
    """[node, vocab]; node 0 has a token of probability 0, as a grammar makes."""
    p = torch.distributions.Dirichlet(torch.ones(VOCAB)).sample((3,))
    p[0, 3] = 0
    return p / p.sum(-1, keepdim=True)


def check_second_token(tokens: torch.Tensor, first_draft: torch.Tensor, target: torch.Tensor) -> None:
    """Where draft 1 was accepted, the next token follows row 1 of the target."""
    follow = tokens[:, 1][tokens[:, 1] >= 0]
    assert follow.numel() > DRAWS // 20
    assert chi_square_p(torch.bincount(follow, minlength=VOCAB), target[1]) > 1e-4
    assert torch.equal(tokens[tokens[:, 1] >= 0, 0], first_draft[tokens[:, 1] >= 0])


def test_chain_rejection_sampling_is_exact() -> None:
    target = chain_target()
    q = torch.distributions.Dirichlet(torch.ones(VOCAB)).sample((2,))
    drafts = torch.stack([torch.multinomial(row, DRAWS, replacement=True) for row in q], dim=1)
    run = Verification(torch.cat((torch.zeros(DRAWS, 1, dtype=torch.int64), drafts), 1), *CHAIN, depth=3)
    run.run(samplers.chain_speculative_sampling, target, q.expand(DRAWS, 2, VOCAB))
    tokens = run.tokens()
    assert chi_square_p(torch.bincount(tokens[:, 0], minlength=VOCAB), target[0]) > 1e-4
    check_second_token(tokens, drafts[:, 0], target)
    third = tokens[:, 2][tokens[:, 2] >= 0]
    assert chi_square_p(torch.bincount(third, minlength=VOCAB), target[2]) > 1e-4
    accepted = (run.count >= 1).float().mean()
    assert abs(float(accepted) - float(torch.minimum(target[0], q[0]).sum())) < 0.01


def test_chain_of_certain_drafts_is_exact() -> None:
    """One-hot q, as for drafts that were not sampled."""
    target = chain_target()
    q = torch.nn.functional.one_hot(torch.tensor([1, 2]), VOCAB).float()
    drafts = torch.tensor([1, 2]).repeat(DRAWS, 1)
    run = Verification(torch.cat((torch.zeros(DRAWS, 1, dtype=torch.int64), drafts), 1), *CHAIN, depth=3)
    run.run(samplers.chain_speculative_sampling, target, q.expand(DRAWS, 2, VOCAB))
    assert chi_square_p(torch.bincount(run.tokens()[:, 0], minlength=VOCAB), target[0]) > 1e-4
    check_second_token(run.tokens(), drafts[:, 0], target)


def test_draft_that_q_cannot_have_drawn_is_rejected() -> None:
    target = torch.tensor([[0.5, 0.5, 0, 0, 0]]).repeat(2, 1)
    for impossible in (0.0, float("nan"), float("inf"), -1.0):
        q = torch.tensor([[0, 1.0, 0, 0, 0]]).expand(1000, 1, VOCAB).clone()
        q[:, 0, 0] = impossible
        run = Verification(torch.zeros(1000, 2, dtype=torch.int64), [1, -1], [-1, -1], depth=2)
        run.run(samplers.chain_speculative_sampling, target, q)
        assert run.count.max() == 0
        assert set(run.tokens()[:, 0].tolist()) == {0}  # max(p - q, 0) leaves token 0 only


def test_block_verification_is_refused() -> None:
    run = Verification(torch.zeros(1, 2, dtype=torch.int64), [1, -1], [-1, -1], depth=2)
    with pytest.raises(NotImplementedError, match="block verification"):
        run.run(
            lambda *args: samplers.chain_speculative_sampling(*args, block_verification=True),
            torch.ones(2, VOCAB),
            torch.ones(1, 1, VOCAB),
        )


def test_target_only_chain_is_exact() -> None:
    target = chain_target()
    drafts = torch.tensor([1, 2]).repeat(DRAWS, 1)
    run = Verification(torch.cat((torch.zeros(DRAWS, 1, dtype=torch.int64), drafts), 1), *CHAIN, depth=3)
    run.run(samplers.tree_speculative_sampling_target_only, target, torch.zeros(DRAWS, 3, VOCAB))
    assert chi_square_p(torch.bincount(run.tokens()[:, 0], minlength=VOCAB), target[0]) > 1e-4
    check_second_token(run.tokens(), drafts[:, 0], target)


def test_target_only_tree_is_exact() -> None:
    """Root with children 1, 2, 3; node 2 with children 4, 5. Node 3 repeats the impossible token."""
    child, sibling = [1, -1, 4, -1, -1, -1], [-1, 2, 3, -1, 5, -1]
    target = torch.distributions.Dirichlet(torch.ones(VOCAB)).sample((6,))
    target[0, 3] = 0
    target /= target.sum(-1, keepdim=True)
    nodes = torch.tensor([0, 0, 2, 3, 1, 4])
    run = Verification(nodes.repeat(DRAWS, 1), child, sibling, depth=3)
    run.run(samplers.tree_speculative_sampling_target_only, target, torch.zeros(DRAWS, 6, VOCAB))
    tokens = run.tokens()
    assert chi_square_p(torch.bincount(tokens[:, 0], minlength=VOCAB), target[0]) > 1e-4
    assert not (tokens[:, 0] == 3).any()
    for token, node in ((0, 1), (2, 2)):
        follow = tokens[tokens[:, 0] == token, 1]
        assert (follow >= 0).all()  # this child is in the tree, so its token was accepted and another one follows
        assert chi_square_p(torch.bincount(follow, minlength=VOCAB), target[node]) > 1e-4


def test_the_test_would_notice_greedy_verification() -> None:
    """The greedy rule that SGLang falls back to on CPU fails the same check."""
    target = chain_target()
    drafts = torch.tensor([1, 2]).repeat(DRAWS, 1)
    run = Verification(torch.cat((torch.zeros(DRAWS, 1, dtype=torch.int64), drafts), 1), *CHAIN, depth=3)
    verify_tree_greedy(
        run.predicts, run.accept_index, run.count, run.candidates, *run.links, target.argmax(-1).repeat(DRAWS, 1)
    )
    assert chi_square_p(torch.bincount(run.tokens()[:, 0], minlength=VOCAB), target[0]) < 1e-9


def test_top_k_renorm() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.4, 0.1], [0.7, 0.1, 0.1, 0.1]])
    out = samplers.top_k_renorm_prob(probs, torch.tensor([2, 1, 1 << 30]))
    assert torch.allclose(out, torch.tensor([[0, 4 / 7, 3 / 7, 0], [0, 0, 1, 0], [0.7, 0.1, 0.1, 0.1]]))
    assert torch.allclose(samplers.top_k_renorm_prob(probs, 4), probs)


def test_top_p_renorm() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.1, 0.4, 0.3, 0.2], [0.9, 0.1, 0, 0], [0.1, 0.4, 0.3, 0.2]])
    out = samplers.top_p_renorm_prob(probs, torch.tensor([0.5, 0.95, 0.05, 1.0]))
    expected = torch.tensor([[0, 4 / 7, 3 / 7, 0], [0.1, 0.4, 0.3, 0.2], [1, 0, 0, 0], [0.1, 0.4, 0.3, 0.2]])
    assert torch.allclose(out, expected)
    assert torch.allclose(samplers.top_p_renorm_prob(probs, 1.0), probs)


def test_a_batch_is_greedy_only_if_all_of_it_is() -> None:
    assert samplers.verify_uses_greedy(is_all_greedy=True, is_cpu=True)
    assert not samplers.verify_uses_greedy(is_all_greedy=False, is_cpu=True)
