"""Rounds without drafts: plain decoding, for which SGLang needs less time than to verify chains of one token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_ssd.penalties import has_penalties

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult


def is_enough(batch: ScheduleBatch) -> bool:
    """Whether plain decoding of ``batch`` returns all that a verification does.

    The others are few: SGLang keeps no penalties and no grammar masks for plain decoding beside speculation, and gives
    log-probabilities in another shape.
    """
    info = batch.sampling_info
    return not (batch.has_grammar or batch.return_logprob or info.has_custom_logit_processor or has_penalties(info))


def become_plain(batch: ScheduleBatch, bonus: torch.Tensor, req_to_token: torch.Tensor) -> None:
    """Make of a speculative round one of plain decoding, as ``ScheduleBatch.prepare_for_decode`` does.

    SGLang undoes it after the forward. The places in the KV cache are reserved already.

    Args:
        bonus: [b] int, the token to be fed of each sequence.
        req_to_token: [slots, T] int, of SGLang's pool.
    """
    batch.spec_info = None
    batch.input_ids = bonus.to(torch.int64)
    batch.out_cache_loc = req_to_token[batch.req_pool_indices, batch.seq_lens].to(torch.int64)
    batch.seq_lens = batch.seq_lens + 1
    batch.orig_seq_lens = batch.orig_seq_lens + 1
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
    batch.seq_lens_sum = None


def as_verified(result: GenerationBatchResult, batch: ScheduleBatch) -> GenerationBatchResult:
    """What a verification returns that accepted nothing; ``batch`` is as the forward left it."""
    result.next_token_ids = result.next_token_ids.to(torch.int32)
    result.accept_lens = torch.ones_like(result.next_token_ids)
    result.new_seq_lens = batch.seq_lens
    result.speculative_num_draft_tokens = 1
    return result
