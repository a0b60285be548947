"""Verification that samples as plain decoding does, position by position.

SGLang's own verification takes shortcuts: penalties are those of the round's first position, min-p and
custom logit processors are left out.  Here the target's token is drawn at every verified position by
SGLang's own sampler, from logits processed exactly as if the tokens before it had been decoded one by
one.  A draft is accepted while it equals the drawn token, and the first drawn token that differs is the
bonus token (the target-only rule, coupled with the draws): the text is that of plain decoding by
construction, whatever the draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.speculative.eagle_info import EagleVerifyInput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

Verified = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""As `eagle_sample` returns: predict [b * N], accept_lens [b] (bonus included), accept_index [b, N]; all int32."""


@dataclasses.dataclass
class ChainVerifyInput(EagleVerifyInput):
    """A chain, with what its exact verification needs.

    ``sampler`` is SGLang's; ``outputs`` [b] are the output tokens of each request so far, the bonus token
    that the chain begins with included, where they are needed and known (TP rank 0).
    """

    sampler: Callable[..., torch.Tensor] | None = None
    outputs: Sequence[Sequence[int]] | None = None


def install() -> None:
    """Let SGLang's verification call `sample_chain` for our chains; to be called in the scheduler's process."""
    HookRegistry.register("sglang.srt.speculative.eagle_utils.eagle_sample", sample_chain, HookType.AROUND)
    HookRegistry.apply_hooks()


def sample_chain(
    original: Callable[..., Verified],
    verify_input: Any,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    grammar_mask: Any = None,
    **options: Any,
) -> Verified:
    """Hook around ``eagle_sample``. Greedy rounds without penalties and processors are SGLang's own business."""
    info: SamplingBatchInfo = batch.sampling_info
    if not isinstance(verify_input, ChainVerifyInput) or batch.forward_mode.is_idle():
        return original(verify_input, batch, logits_output, grammar_mask, **options)
    is_plain = not (has_penalties(info) or info.has_custom_logit_processor)
    if info.is_all_greedy and is_plain:
        return original(verify_input, batch, logits_output, grammar_mask, **options)
    width = verify_input.draft_token_num
    drafts = verify_input.draft_token.view(-1, width)
    logits = logits_output.next_token_logits
    # Other ranks draw, too, so that all take part in the same collectives; only rank 0's tokens count.
    _process_logits(logits, info, drafts, batch.reqs, verify_input.outputs, grammar_mask)
    drawn = _draw(logits, info, verify_input)
    verified = _accept(drawn, drafts, _rows_with_processor(info))
    group = get_parallel().tp_group
    if group.world_size > 1:
        for tensor in verified:
            group.broadcast(tensor, src=0)
    return verified


def has_penalties(info: SamplingBatchInfo) -> bool:
    """Whether sampling depends on the output so far."""
    return info.acc_additive_penalties is not None or info.acc_scaling_penalties is not None


def _process_logits(
    logits: torch.Tensor,
    info: SamplingBatchInfo,
    drafts: torch.Tensor,
    requests: Sequence[Req],
    outputs: Sequence[Sequence[int]] | None,
    grammar_mask: Any,
) -> None:
    """Turn raw logits [b * N, V] into those that plain decoding samples from, in place and in its order."""
    width = drafts.shape[1]
    if outputs is not None:
        apply_penalties(logits.view(*drafts.shape, -1), drafts, requests, outputs)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(width, 0))
    if info.has_custom_logit_processor:
        # A processor may look at its request, whose output ends before the first position: only there it is right.
        first = logits[::width].contiguous()
        apply_custom_logit_processor(first, info)
        logits[::width] = first


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
        additive[:missing, _stop_tokens(request)] = float("-inf")
    return additive, torch.where(counts > 0, params.repetition_penalty, 1.0)


def _running_counts(output: Sequence[int], drafts: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[N, V] float: how often each token occurs in the output up to each position of the chain."""
    device = drafts.device
    so_far = torch.tensor(output, dtype=torch.int64, device=device)
    counts = torch.zeros(len(drafts), vocab_size, device=device)
    counts[0].index_add_(0, so_far, torch.ones(len(so_far), device=device))
    counts[torch.arange(1, len(drafts), device=device), drafts[1:]] = 1.0
    return counts.cumsum_(0)


def _stop_tokens(request: Any) -> list[int]:
    """Tokens that may not be drawn before ``min_new_tokens``, as SGLang's own penalty lists them."""
    tokenizer = request.tokenizer
    stops = {*(request.sampling_params.stop_token_ids or ()), *(request.eos_token_ids or ())}
    stops |= {*(tokenizer.additional_stop_token_ids or ()), tokenizer.eos_token_id}
    return sorted(stop for stop in stops if stop is not None)


def _draw(logits: torch.Tensor, info: SamplingBatchInfo, verify_input: ChainVerifyInput) -> torch.Tensor:
    """Draw a token for every position, [b, N], with SGLang's sampler; leaves ``logits`` as they are."""
    assert verify_input.sampler is not None
    width = verify_input.draft_token_num
    drawn = verify_input.sampler(
        LogitsProcessorOutput(next_token_logits=logits.clone()),  # the sampler works in place
        _per_position(info, width),
        False,
        [],
        [],
        verify_input.positions,
    )
    return drawn.view(-1, width)


def _per_position(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """The parameters of every position; what was applied to the logits already is left out."""
    repeated = {
        name: getattr(info, name).repeat_interleave(width, 0)
        for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
        if getattr(info, name) is not None
    }
    return dataclasses.replace(
        info,
        **repeated,
        grammars=None,
        grammar_mask=None,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_custom_logit_processor=False,
        custom_params=None,
        custom_logit_processor=None,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
    )


def _rows_with_processor(info: SamplingBatchInfo) -> list[int]:
    entries = (info.custom_logit_processor or {}).values() if info.has_custom_logit_processor else ()
    return [row for entry in entries for row in entry.rows]


def _accept(drawn: torch.Tensor, drafts: torch.Tensor, single: list[int]) -> Verified:
    """Accept drafts while they equal the drawn tokens; rows ``single`` take the first drawn token only."""
    batch_size, width = drafts.shape
    equal = drafts[:, 1:] == drawn[:, :-1]
    if single:
        equal[single] = False
    num_accepted = equal.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)
    steps = torch.arange(width, device=drafts.device)
    index = torch.arange(batch_size * width, dtype=torch.int32, device=drafts.device).view(batch_size, width)
    accept_index = torch.where(steps <= num_accepted[:, None], index, -1)
    return drawn.flatten().to(torch.int32), num_accepted + 1, accept_index
