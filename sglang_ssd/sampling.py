"""Verification that samples as plain decoding does, position by position.

SGLang's own verification takes shortcuts: penalties are those of the round's first position, min-p and
custom logit processors are left out.  Here logits are processed at every verified position exactly as if
the tokens before it had been decoded one by one.  What is accepted of the drafts is then decided

* by the ratio rule, from the target's distribution and that which the drafts were sampled from (`rejection`);
* for requests with a seed, by equality with the token that the seed's noise draws (`coupling`);
* where SGLang's sampler has to draw by itself (deterministic inference, samplers of other plugins, greedy
  batches), by equality with what it draws at every position.

All three give the text the distribution of plain decoding, whatever the drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler, apply_custom_logit_processor
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_ssd.coupling import CoupledRows, coupled_rows, draw_coupled
from sglang_ssd.penalties import apply_penalties, has_penalties
from sglang_ssd.rejection import SparseProbs, Verified, verify_by_equality, verify_by_ratio
from sglang_ssd.request_sampling import seed_of
from sglang_ssd.target_distribution import BACKENDS, filtered, tempered

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

Sampled = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""As `eagle_sample` returns: predict [b * N], accept_lens [b] (bonus included), accept_index [b, N]; all int32."""


class Basis(NamedTuple):
    """What TP rank 0 alone knows of a round, and decides with for all ranks."""

    outputs: Sequence[Sequence[int]] | None = None
    """[b] output tokens of each request so far, the bonus token that the chain begins with included, where needed."""
    q: SparseProbs | None = None
    """What the drafts were sampled from; None where the rule does not ask."""
    coupled: CoupledRows | None = None
    """The requests whose draws are coupled; None if there are none."""


@dataclasses.dataclass
class ChainVerifyInput(EagleVerifyInput):
    """A chain, with what its exact verification needs. ``sampler`` is SGLang's; ``basis`` is empty on other ranks.

    ``generator`` draws on rank 0 alone, so it is not SGLang's own, which must stay the same on all ranks.
    """

    sampler: Callable[..., torch.Tensor] | None = None
    generator: torch.Generator | None = None
    basis: Basis = dataclasses.field(default_factory=Basis)


def install() -> None:
    """Let SGLang's verification and its sampler call us; to be called in the scheduler's process."""
    HookRegistry.register("sglang.srt.speculative.eagle_utils.eagle_sample", sample_chain, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler._sample_from_probs", draw_plain, HookType.AROUND)
    HookRegistry.apply_hooks()


def knows_law(sampler: Any) -> bool:
    """Whether the distribution that SGLang's ``sampler`` draws from can be computed here."""
    options = get_exec()
    if options.deterministic.enable_deterministic_inference:
        return False  # SGLang draws with seeds of its own
    return type(sampler) is Sampler and options.kernel.sampling_backend in BACKENDS


def has_explicit_law(info: SamplingBatchInfo, sampler: Any) -> bool:
    """Whether the target's distribution is computed for this batch; otherwise SGLang's sampler draws."""
    return not info.is_all_greedy and knows_law(sampler)


def sample_chain(
    original: Callable[..., Sampled],
    verify_input: Any,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    grammar_mask: Any = None,
    **options: Any,
) -> Sampled:
    """Hook around ``eagle_sample``. Greedy rounds without penalties and processors are SGLang's own business."""
    info: SamplingBatchInfo = batch.sampling_info
    if not isinstance(verify_input, ChainVerifyInput) or batch.forward_mode.is_idle():
        return original(verify_input, batch, logits_output, grammar_mask, **options)
    is_plain = not (has_penalties(info) or info.has_custom_logit_processor)
    if info.is_all_greedy and is_plain:
        return original(verify_input, batch, logits_output, grammar_mask, **options)
    drafts = verify_input.draft_token.view(-1, verify_input.draft_token_num)
    logits = logits_output.next_token_logits
    _process_logits(logits, info, drafts, batch.reqs, verify_input.basis.outputs, grammar_mask)
    group = get_parallel().tp_group
    if not has_explicit_law(info, verify_input.sampler):
        # All ranks draw, so that they take part in the same collectives; only rank 0's tokens count.
        drawn = _draw(logits, info, verify_input)
        sampled = _as_sampled(verify_by_equality(drawn, drafts[:, 1:], _num_offered(info, drafts[:, 1:])))
    elif group.rank_in_group == 0:
        sampled = _as_sampled(_verify(logits, info, verify_input))
    else:
        sampled = _as_sampled(Verified(torch.zeros_like(drafts[:, 0]), torch.zeros_like(drafts)))
    if group.world_size > 1:
        for tensor in sampled:
            group.broadcast(tensor, src=0)
    return sampled


def seed_first_tokens(info: SamplingBatchInfo, requests: Sequence[Any], sampler: Any) -> None:
    """Before a prefill: couple the requests with seeds. On every rank, since each draws by itself."""
    couple(info, coupled_rows(requests, seed_of, info.device) if has_explicit_law(info, sampler) else None)


def couple(info: SamplingBatchInfo, coupled: CoupledRows | None) -> None:
    """Before a forward without verification: let `draw_plain` know the coupled requests."""
    info.ssd_coupled = coupled


def draw_plain(
    original: Callable[..., Any],
    sampler: Sampler,
    probs: torch.Tensor,
    info: SamplingBatchInfo,
    positions: torch.Tensor,
    is_simple: bool,
) -> Any:
    """Hook around ``Sampler._sample_from_probs``: coupled requests get the tokens that a verification would draw."""
    tokens, mask = original(sampler, probs, info, positions, is_simple)
    coupled: CoupledRows | None = getattr(info, "ssd_coupled", None)
    if coupled is not None:
        drawn = draw_coupled(probs.unsqueeze(1), coupled, positions + 1, info)
        tokens = tokens.index_copy(0, coupled.rows, drawn.squeeze(1).to(tokens.dtype))
        mask = None if mask is None else mask._replace(selected_weight=None)  # it was that of another token
    return tokens, mask


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
    sanitize_nan_logits(logits, "verify: target model logits")
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


def _verify(logits: torch.Tensor, info: SamplingBatchInfo, verify_input: ChainVerifyInput) -> Verified:
    """The outcome of every row, by the rule that it obeys; leaves ``logits`` as they are."""
    width = verify_input.draft_token_num
    drafts = verify_input.draft_token.view(-1, width)[:, 1:]
    _, q, coupled = verify_input.basis
    num_offered = _num_offered(info, drafts)
    probs = tempered(logits, info.temperatures)
    verified = None
    if coupled is None or len(coupled.rows) < len(drafts):
        assert q is not None
        p = filtered(probs, info, get_exec().kernel.sampling_backend)
        verified = verify_by_ratio(p, drafts, q, num_offered, verify_input.generator)
    if coupled is not None:
        positions = verify_input.positions.view(-1, width) + 1
        drawn = draw_coupled(probs, coupled, positions, info)
        offered = None if num_offered is None else num_offered[coupled.rows]
        by_seed = verify_by_equality(drawn, drafts[coupled.rows], offered)
        if verified is None:
            return by_seed
        for values, own in zip(verified, by_seed, strict=True):
            values.index_copy_(0, coupled.rows, own)
    assert verified is not None
    return verified


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


def _num_offered(info: SamplingBatchInfo, drafts: torch.Tensor) -> torch.Tensor | None:
    """[b] int64 drafts that may be accepted: none where a processor made only the first logits right. None: all."""
    if not info.has_custom_logit_processor:
        return None
    offered = drafts.new_full((len(drafts),), drafts.shape[1])
    for entry in (info.custom_logit_processor or {}).values():
        offered.index_fill_(0, entry.indices, 0)
    return offered


def _as_sampled(verified: Verified) -> Sampled:
    num_accepted, tokens = verified
    batch_size, width = tokens.shape
    index = torch.arange(batch_size * width, dtype=torch.int32, device=tokens.device).view(batch_size, width)
    is_emitted = torch.arange(width, device=tokens.device) <= num_accepted.unsqueeze(-1)
    accept_index = torch.where(is_emitted, index, -1)
    return tokens.flatten().to(torch.int32), (num_accepted + 1).to(torch.int32), accept_index
