"""SGLang's attention backend ``torch_cpu``: any causal decoder on CPU, with the speculative modes.

SGLang's own CPU backends are a native one (missing from the PyPI wheel) and ``torch_native``, which loops over
requests and cannot verify drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_ssd.cpu.attention import attend
from sglang_ssd.cpu.attention_plan import NO_WINDOW, Block, plan_ragged, plan_uniform

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class TorchCpuAttnBackend(AttentionBackend):
    """One gather and one attention call per layer; indices and masks are made in ``init_forward_metadata``."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        pool = self.token_to_kv_pool
        self._swa_pool = pool if isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0 else None
        self._swa_write_slots: torch.Tensor | None = None
        self.blocks: list[Block] = []

    def support_triton(self) -> bool:
        """No Triton kernel may be launched on this device."""
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the attention of the coming forward pass."""
        mode = forward_batch.forward_mode
        slot_table = self.req_to_token_pool.req_to_token
        rows = forward_batch.req_pool_indices.to(torch.int64)
        if mode.is_decode_or_idle():
            self.blocks = plan_uniform(slot_table, rows, forward_batch.seq_lens, num_queries=1)
        elif mode.is_target_verify():
            self.blocks = self._plan_verify(forward_batch, slot_table, rows)
        else:
            counts = forward_batch.extend_seq_lens.tolist()
            self.blocks = plan_ragged(slot_table, rows, forward_batch.seq_lens.tolist(), counts)
        self._translate_write_slots(forward_batch)

    def init_draft_step(
        self, forward_batch: ForwardBatch, slot_table: torch.Tensor, table_rows: torch.Tensor, key_lens: torch.Tensor
    ) -> None:
        """Plan a draft step whose branches have a slot table of their own (see TorchCpuMultiStepDraftBackend)."""
        self.blocks = plan_uniform(slot_table, table_rows, key_lens, num_queries=1)
        self._translate_write_slots(forward_batch)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """One new token per request. q: [requests, heads * head_dim]; returns [requests, heads * v_dim]."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attention of the new tokens of prefill, verify and draft extend, all requests one after the other."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                "the torch_cpu attention backend serves causal decoder layers only; "
                "start with --attention-backend torch_native for encoders and cross-attention"
            )
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self._swa_write_slots), k, v)
        swa = self._swa_pool is not None and self._swa_pool.layers_mapping[layer.layer_id][1]
        window = layer.sliding_window_size
        out = attend(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self.blocks,
            scale=layer.scaling,
            window=window if window is not None and window > 0 else NO_WINDOW,
            logit_cap=layer.logit_cap or 0.0,
            sinks=sinks,
            translate=pool.translate_loc_from_full_to_swa if swa else None,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _plan_verify(self, forward_batch: ForwardBatch, slot_table: torch.Tensor, rows: torch.Tensor) -> list[Block]:
        spec = forward_batch.spec_info
        n = spec.draft_token_num
        tree_mask = None
        # tree_topk 1 is a chain: the causal rule says the same as its mask.
        if spec.tree_topk != 1 and spec.custom_mask is not None and spec.custom_mask.numel() > 0:
            tree_mask = spec.custom_mask[: forward_batch.batch_size * n * n].view(-1, n, n).to(torch.bool)
        return plan_uniform(slot_table, rows, forward_batch.seq_lens + n, num_queries=n, tree_mask=tree_mask)

    def _translate_write_slots(self, forward_batch: ForwardBatch) -> None:
        if self._swa_pool is not None and forward_batch.out_cache_loc is not None:
            self._swa_write_slots = self._swa_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)


class TorchCpuMultiStepDraftBackend:
    """The attention of the draft steps of one round: step s decodes token s of every branch.

    ``attn_backends[s]`` serves step s; SGLang hands it to the draft model itself.
    """

    def __init__(self, model_runner: ModelRunner, topk: int, speculative_num_steps: int) -> None:
        self.topk = topk
        self.num_steps = speculative_num_steps
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.attn_backends = [TorchCpuAttnBackend(model_runner) for _ in range(speculative_num_steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan all steps. The slots of the branches follow the committed ones: branch t owns num_steps of them."""
        table, rows = self._branch_table(forward_batch)
        lens = forward_batch.seq_lens.to(torch.int64).repeat_interleave(self.topk)
        for step, backend in enumerate(self.attn_backends):
            backend.init_draft_step(forward_batch, table, rows, lens + step + 1)

    def _branch_table(self, forward_batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot table with a line per branch, and which line each branch uses."""
        slot_table = self.req_to_token_pool.req_to_token
        rows = forward_batch.req_pool_indices.to(torch.int64)
        if self.topk == 1:
            return slot_table, rows
        lens = forward_batch.seq_lens.to(torch.int64)
        column = torch.arange(int(lens.max()) + self.num_steps)
        branch = torch.arange(self.topk)[None, :, None]
        # Columns at and after the committed length jump over the slots of the branches before this one.
        source = column + torch.where(column >= lens[:, None, None], branch * self.num_steps, 0)
        source = source.clamp(max=slot_table.shape[1] - 1)
        table = slot_table[rows[:, None, None], source].flatten(0, 1)
        return table, torch.arange(table.shape[0])
