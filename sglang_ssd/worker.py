"""The verifier: SGLang's speculative worker that gets its drafts from the speculator service.

A round (`SSDWorker._round`): take the speculations that follow from the last outcome, verify them with
one target forward through SGLang's own EAGLE verification (a chain is a tree with one leaf), hand the
new outcome to the speculator.  A round without drafts is one of plain decoding.  There is no draft model
and no draft memory in this process.
"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_device, get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_worker_common import run_eagle_verify
from sglang.srt.speculative.spec_utils import get_plan_stream

from sglang_ssd import plain, sampling
from sglang_ssd.coupling import coupled_rows
from sglang_ssd.flags import verifier_config
from sglang_ssd.handoff import Handoff
from sglang_ssd.penalties import has_penalties, restore_history
from sglang_ssd.rejection import unpack
from sglang_ssd.spec_input import ChainBuilder, SSDDraftInput
from sglang_ssd.speculation import Speculation, connect
from ssd_proto.trace import open_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import ServerArgs


class SSDWorker(BaseSpecWorker):
    """One per TP rank. Rank 0 talks to the speculator and broadcasts the drafts to the others."""

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        super().__init__()
        self._server_args = server_args
        self._target_worker = target_worker
        self._device: str = get_device().device
        self._lookahead: int = get_spec().speculative_num_steps
        self._tp_group = get_parallel().tp_group
        # Graphs are captured for K + 1 tokens, and other ranks expect so many.
        has_graphs = self._device != "cpu" or server_args.enable_torch_compile
        self._is_narrow = not has_graphs and self._tp_group.world_size == 1
        self._plan_stream, self._plan_stream_ctx = get_plan_stream(self._device)
        self._speculation: Speculation | None = None  # rank 0 only
        self._trace = open_trace(verifier_config(server_args).trace, f"verifier, rank {self._tp_group.rank_in_group}")
        atexit.register(self._trace.close)
        sampling.install()
        _widen_rows()

    # -- what SGLang asks of a speculative worker --------------------------------------------------

    @property
    def draft_worker(self) -> None:
        """There is none in this process."""
        return None

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        """Take SGLang's pools, and connect: the number of slots is known only now."""
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        max_slots = req_to_token_pool.req_to_token.shape[0]
        self._chains = ChainBuilder(self._lookahead, max_slots, self._device, self._target_worker)
        num_kept = verifier_config(self._server_args).num_kept
        self._handoff = Handoff(self._device, max_slots, self._lookahead, num_kept)
        if self._tp_group.rank_in_group == 0:
            runner = self._target_worker.model_runner
            model, knows_law = runner.model_config, sampling.knows_law(runner.sampler)
            self._speculation = connect(
                self._server_args,
                self._lookahead,
                max_slots,
                model.context_len,
                model.vocab_size,
                knows_law,
                self._is_narrow,
                self._trace,
            )
            _close_freed_slots(req_to_token_pool, self._speculation)

    def clear_cache_pool(self) -> None:
        """``flush_cache``: SGLang is idle and forgets everything, so do we."""
        if self._speculation is not None:
            self._speculation.close_all()

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Run one batch: prefill, or one round of speculative decoding."""
        self._hand_over()
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            result = self._prefill(batch)
        else:
            result = self._round(batch, grammar_barrier)
        if self._device == "cpu":
            self._hand_over()  # the outcome is here already: the speculator need not wait for the next batch
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    # -- helpers, in call order --------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Give the outcome of the latest forward to the speculator (the only host synchronisation)."""
        if self._speculation is not None and (outcome := self._handoff.finish()) is not None:
            with self._trace.span("post"):
                self._speculation.outcome(outcome)

    def _prefill(self, batch: ScheduleBatch) -> GenerationBatchResult:
        slots = batch.req_pool_indices_cpu.numpy()
        if self._speculation is not None:
            # Before the target's forward, so that both prefills overlap and the first round can hit.
            self._speculation.open(slots, batch.reqs)
        if has_penalties(batch.sampling_info):
            restore_history(batch.sampling_info, batch.reqs)
        sampling.seed_first_tokens(batch.sampling_info, batch.reqs, self._target_worker.model_runner.sampler)
        with self._trace.span("prefill", batch=len(batch.reqs)):
            result = self._target_worker.forward_batch_generation(batch)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = SSDDraftInput(bonus_tokens=result.next_token_ids)
        # A middle chunk samples a token, too; it means nothing.
        rows = [row for row, req in enumerate(batch.reqs) if req is not batch.chunked_req]
        if self._speculation is not None and rows:
            lengths = np.array([len(batch.reqs[r].origin_input_ids) + len(batch.reqs[r].output_ids) for r in rows])
            self._handoff.begin_prefill(result.next_token_ids, rows, slots[rows], lengths)
        return result

    def _round(self, batch: ScheduleBatch, grammar_barrier: Any) -> GenerationBatchResult:
        with self._trace.span("draft"):
            drafts, basis = self._drafts(batch)
        if drafts.shape[1] == 0 and plain.is_enough(batch):
            result = self._decode(batch, basis)
        else:
            result = self._verify(batch, drafts, basis, grammar_barrier)
        if self._speculation is not None:
            bonus = result.next_draft_input.bonus_tokens
            self._handoff.begin_round(result.accept_lens, bonus, batch.req_pool_indices_cpu.numpy())
        return result

    def _decode(self, batch: ScheduleBatch, basis: sampling.Basis) -> GenerationBatchResult:
        plain.become_plain(batch, batch.spec_info.bonus_tokens, self.req_to_token_pool.req_to_token)
        sampling.couple(batch.sampling_info, basis.coupled)
        with self._trace.span("decode", batch=len(batch.reqs)):
            result = plain.as_verified(self._target_worker.forward_batch_generation(batch), batch)
        result.next_draft_input = SSDDraftInput(bonus_tokens=result.next_token_ids)
        return result

    def _verify(
        self, batch: ScheduleBatch, drafts: torch.Tensor, basis: sampling.Basis, grammar_barrier: Any
    ) -> GenerationBatchResult:
        batch.spec_info = self._chains.build(batch, batch.spec_info.bonus_tokens, drafts, basis)
        with self._trace.span("verify", batch=len(batch.reqs)):
            result = run_eagle_verify(
                batch,
                target_worker=self._target_worker,
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
                plan_stream=self._plan_stream,
                plan_stream_ctx=self._plan_stream_ctx,
                topk=1,
                num_draft_tokens=batch.spec_info.draft_token_num,
                device=self._device,
                metadata_ready_pre_pad=False,
                finalize_tree_path=True,
                grammar_barrier=grammar_barrier,
            )
        result.next_draft_input = SSDDraftInput(bonus_tokens=result.next_draft_input.bonus_tokens)
        return result

    def _drafts(self, batch: ScheduleBatch) -> tuple[torch.Tensor, sampling.Basis]:
        """Drafts of the round, [b, n] int64 on the target's device, the same on every rank; the basis on rank 0.

        n is K; where rounds may be narrow, it may be less.
        """
        if self._speculation is not None:
            drafts, basis = self._speculate(self._speculation, batch)
        else:
            drafts = torch.empty((len(batch.reqs), self._lookahead), dtype=torch.int64, device=self._device)
            basis = sampling.Basis()
        # Missing drafts travel as data, too: no rank ever waits for one that has none.
        if self._tp_group.world_size > 1:
            drafts = self._tp_group.broadcast(drafts, src=0)
        return drafts, basis

    def _speculate(self, speculation: Speculation, batch: ScheduleBatch) -> tuple[torch.Tensor, sampling.Basis]:
        slots = batch.req_pool_indices_cpu.numpy()
        outputs = None
        if has_penalties(batch.sampling_info):
            outputs = speculation.outputs(slots, batch.reqs)
        drafts, q = speculation.speculate(slots, batch.reqs)
        if not sampling.has_explicit_law(batch.sampling_info, self._target_worker.model_runner.sampler):
            return self._handoff.stage(drafts), sampling.Basis(outputs)
        staged, words = self._handoff.stage_with_q(drafts, q)
        coupled = coupled_rows(batch.reqs, speculation.sampling.coupled_seed, self._device)
        return staged, sampling.Basis(outputs, unpack(words), coupled)


def _widen_rows() -> None:
    """Make room in the rows of SGLang's pool for all that a round reserves beyond the context; to be called before it.

    SGLang counts the tokens of one round there, but reserves those of two; from K = 8 on a request near the end of
    the context would write past its row.
    """
    target = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"
    HookRegistry.register(target, lambda original: max(original(), get_alloc_reserve_per_decode()), HookType.AROUND)
    HookRegistry.apply_hooks()


def _close_freed_slots(pool: Any, speculation: Speculation) -> None:
    """SGLang frees a request's row on every path of its end: finish, abort, retraction, death at prefill."""
    free_rows = pool.free_rows

    def free_rows_and_close(indices: list[int]) -> None:
        free_rows(indices)
        speculation.close(indices)

    pool.free_rows = free_rows_and_close
