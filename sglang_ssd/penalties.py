"""Penalties of every verified position, as if the tokens before it had been decoded one by one.

SGLang accumulates them token by token as it decodes, and knows those of a round's first position only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

from sglang_ssd.request_sampling import stop_tokens

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


def has_penalties(info: SamplingBatchInfo) -> bool:
    """Whether sampling depends on the output so far."""
    return info.acc_additive_penalties is not None or info.acc_scaling_penalties is not None


def apply_penalties(
    logits: torch.Tensor, drafts: torch.Tensor, requests: Sequence[Any], outputs: Sequence[Sequence[int]]
) -> None:
    """Penalties of every position: those of the output up to it, drafts included. In place.

    Args:
        logits: [b, N, V]; position j follows drafts[:, j].
        drafts: [b, N] int; drafts[:, 0] is the bonus token, the last of ``outputs``.
        requests: [b], their ``sampling_params`` are read.
        outputs: [b] output tokens so far.
    """
    for row, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        if _is_penalised(request):
            additive, scaling = _penalties(request, output, drafts[row], logits.shape[-1])
            logits[row] += additive
            apply_scaling_penalties(logits[row], scaling)


def restore_history(info: SamplingBatchInfo, requests: Sequence[Any]) -> None:
    """Let the prefill of a retracted request sample with the penalties of its output, which SGLang has forgotten."""
    for row, request in enumerate(requests):
        output = request.output_ids
        if len(output) and _is_penalised(request):
            last = torch.tensor(output[-1:], device=info.device)
            additive, scaling = _penalties(request, output, last, info.vocab_size)
            if info.acc_additive_penalties is not None:
                info.acc_additive_penalties[row] = additive[0]
            if info.acc_scaling_penalties is not None:
                info.acc_scaling_penalties[row] = scaling[0]


def _is_penalised(request: Any) -> bool:
    params = request.sampling_params
    is_penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
    return bool(is_penalised or params.min_new_tokens > 0)


def _penalties(
    request: Any, output: Sequence[int], drafts: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added to, and then scales, the logits of every position of one request; [N, V] each."""
    params = request.sampling_params
    counts = _running_counts(output, drafts, vocab_size)
    additive = -params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    missing = params.min_new_tokens - len(output)
    if missing > 0:
        additive[:missing, stop_tokens(request)] = float("-inf")
    return additive, torch.where(counts > 0, params.repetition_penalty, 1.0)


def _running_counts(output: Sequence[int], drafts: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[N, V] float: how often each token occurs in the output up to each position of the chain."""
    device = drafts.device
    so_far = torch.tensor(output, dtype=torch.int64, device=device)
    counts = torch.zeros(len(drafts), vocab_size, device=device)
    counts[0].index_add_(0, so_far, torch.ones(len(so_far), device=device))
    counts[torch.arange(1, len(drafts), device=device), drafts[1:]] = 1.0
    return counts.cumsum_(0)
