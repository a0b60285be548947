"""Samplers that SGLang has no CPU version of: verification at temperature > 0, top-k and top-p renormalisation.

All of them draw exactly from the distribution they state, given uniform coins in [0, 1).
"""

from __future__ import annotations

import torch


def top_k_renorm_prob(probs: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """Keep the ``top_k`` most probable tokens of each row (and those that tie with the last), and renormalise.

    probs: float [rows, vocab]. top_k: int [rows] or one for all; anything from vocab up keeps all.
    """
    k = torch.as_tensor(top_k, device=probs.device).to(torch.int64).expand(probs.shape[0])
    k = k.clamp(1, probs.shape[-1])
    threshold = probs.topk(int(k.max()), dim=-1).values.gather(-1, (k - 1)[:, None])
    return _renormalise(torch.where(probs >= threshold, probs, 0.0))


def top_p_renorm_prob(probs: torch.Tensor, top_p: torch.Tensor | float) -> torch.Tensor:
    """Keep the smallest set of most probable tokens whose sum reaches ``top_p``, and renormalise.

    probs: float [rows, vocab]. top_p: float [rows] or one for all. The most probable token is always kept.
    """
    p = torch.as_tensor(top_p, device=probs.device).to(probs.dtype).expand(probs.shape[0])
    ordered, index = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.where(before < p[:, None], ordered, 0.0)
    kept[:, 0] = ordered[:, 0]
    return _renormalise(torch.zeros_like(probs).scatter_(-1, index, kept))


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Verify a draft tree against the target's probabilities alone: the drafts are taken as given, not as sampled.

    At each node one coin walks along the children: a child is accepted when the coin falls below the summed
    probability of the children tried so far; if none is, the bonus token comes from what the tried children left over.
    With both thresholds at 1 the output is distributed exactly as the target's own.

    predicts: int32 [requests * n] (out). accept_index: int32 [requests, depth] (out). accept_token_num: int32
    [requests] (out), without the bonus. candidates, retrive_*: int [requests, n], see ``tree_ops``. uniform_samples:
    float [requests, n], the coin of each node. uniform_samples_for_final_sampling: float [requests]. target_probs:
    float [requests, n, vocab]. draft_probs: the same shape, zeros; receives the probability of the rejected children.
    """
    rows = torch.arange(candidates.shape[0], device=candidates.device)
    index, child, sibling = retrive_index.long(), retrive_next_token.long(), retrive_next_sibling.long()
    depth, nodes = accept_index.shape[1], candidates.shape[1]
    current = torch.zeros_like(rows)
    accepted = torch.zeros_like(rows)
    tried = torch.zeros(rows.shape[0], dtype=target_probs.dtype, device=target_probs.device)
    accept_index[:, 0] = index[:, 0]
    node = child[:, 0].clone()
    for _ in range(nodes - 1):
        row = ((node >= 0) & (accepted < depth - 1)).nonzero().flatten()
        if row.numel() == 0:
            break
        visited, parent = node[row], current[row]
        token = candidates[row, visited].long()
        prob = target_probs[row, parent, token]
        tried[row] += prob
        coin = uniform_samples[row, parent]
        accept = (coin < tried[row] / threshold_acc) | (prob >= threshold_single)
        rejected = ~accept
        draft_probs[row[rejected], parent[rejected], token[rejected]] = prob[rejected]
        winner, won = row[accept], visited[accept]
        predicts[index[winner, current[winner]]] = token[accept].to(predicts.dtype)
        accepted[winner] += 1
        accept_index[winner, accepted[winner]] = index[winner, won].to(accept_index.dtype)
        current[winner] = won
        tried[winner] = 0.0
        node[row] = torch.where(accept, child[row, visited], sibling[row, visited])
    accept_token_num.copy_(accepted)
    target = target_probs[rows, current]
    residual = (target - draft_probs[rows, current]).clamp_(min=0.0)
    # A path of full depth was never rejected, so nothing was taken out at its end.
    left = torch.where((accepted == depth - 1)[:, None], target, residual)
    bonus = _inverse_cdf(left, target, uniform_samples_for_final_sampling)
    predicts[index[rows, current]] = bonus.to(predicts.dtype)


def chain_speculative_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    block_verification: bool = False,
) -> None:
    """Rejection sampling of a chain whose drafts were drawn from ``draft_probs``.

    Draft i is accepted with probability min(1, p(d) / q(d)); after the first rejection the bonus token comes from
    max(p - q, 0) renormalised, after a full chain from p. Each accepted prefix with its bonus is distributed exactly as
    the target's own text.

    candidates: int [requests, n], the last committed token and n - 1 drafts. uniform_samples: float [requests, n], of
    which the first n - 1 columns are used. target_probs: float [requests, n, vocab]. draft_probs: float
    [requests, n - 1, vocab]. The thresholds are ignored, as on GPUs. Outputs as in
    ``tree_speculative_sampling_target_only``.
    """
    if block_verification:
        raise NotImplementedError("block verification does not exist on CPU; leave it off")
    rows = torch.arange(candidates.shape[0], device=candidates.device)
    num_drafts = candidates.shape[1] - 1
    drafts = candidates[:, 1:].long()
    p = target_probs[:, :-1].gather(-1, drafts[..., None]).squeeze(-1)
    q = draft_probs[:, :num_drafts].gather(-1, drafts[..., None]).squeeze(-1)
    # A draft to which q gives no probability was not drawn from q: it cannot be accepted (this covers NaN as well).
    drawn = (q > 0) & (q <= 1)
    accept = drawn & (uniform_samples[:, :num_drafts] * q < p)
    accepted = accept.to(torch.int64).cumprod(-1).sum(-1)
    accept_token_num.copy_(accepted)

    step = torch.arange(num_drafts + 1, device=candidates.device)
    on_path = step <= accepted[:, None]
    accept_index[:, : num_drafts + 1] = torch.where(on_path, retrive_index, -1).to(accept_index.dtype)
    before_end = (step[:num_drafts] < accepted[:, None]).nonzero(as_tuple=True)
    predicts[retrive_index[before_end].long()] = drafts[before_end].to(predicts.dtype)

    target = target_probs[rows, accepted]
    draft = draft_probs[rows, accepted.clamp(max=num_drafts - 1)] if num_drafts else torch.zeros_like(target)
    draft = torch.where((draft >= 0) & (draft <= 1), draft, 0.0)
    residual = (target - draft).clamp_(min=0.0)
    left = torch.where((accepted == num_drafts)[:, None], target, residual)
    bonus = _inverse_cdf(left, target, uniform_samples_for_final_sampling)
    predicts[retrive_index[rows, accepted].long()] = bonus.to(predicts.dtype)


def verify_uses_greedy(*, is_all_greedy: bool, **_: object) -> bool:
    """Whether a batch is verified by argmax: only if all its requests are greedy, on CPU as well."""
    return is_all_greedy


def _renormalise(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(-1, keepdim=True)


def _inverse_cdf(weights: torch.Tensor, fallback: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """One index per row with probability proportional to ``weights`` [rows, n]; coins: float [rows] in [0, 1).

    A row without any weight (p equals q up to rounding) is drawn from ``fallback``. Summed in double precision, or the
    tail of a large vocabulary would be off.
    """
    weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, fallback).double()
    cumulated = weights.cumsum(-1)
    threshold = coins.double()[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, threshold, right=True).squeeze(-1).clamp_(max=weights.shape[-1] - 1)
