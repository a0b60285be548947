"""The only module of the service that imports SGLang: a model on its ModelRunner, and batches built by hand.

Everything used here is internal to SGLang 0.5.23 and may move in any other version. A process can hold one runner:
SGLang keeps its configuration and its parallel groups in globals. All calls must come from one thread.
"""
# ruff: noqa: E402

from __future__ import annotations

from sglang.srt.plugins import load_plugins

# Before anything else of SGLang is imported: without a GPU the plugin supplies operators that SGLang looks up then.
load_plugins()

import logging
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import SpawnRanks, get_device, get_model, publish, spawn_world_rank
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils import get_available_gpu_memory

from speculator_service.draft.aliased_rows import upload
from speculator_service.draft.cells import CellTable
from speculator_service.draft.config import DraftConfig
from speculator_service.draft.lean import LeanForward, agrees, make_lean
from speculator_service.draft.products import Bfloat16Products, SGLangProducts, can_round
from speculator_service.draft.sglang_arguments import server_arguments
from speculator_service.draft.token_map import read_token_map
from speculator_service.draft.trunk_attention import AttentionPlan, attend, plan_extend
from ssd_proto.errors import ConfigError

logger = logging.getLogger(__name__)

_ROUNDING = 0.1
"""Share of the largest logit by which products in bfloat16 may change any: a guard against faults, not a measure."""


class DraftRunner:
    """One model with its KV cells and block table; made by :func:`load_runner`.

    ``device``: where token ids and cells are expected and logits are returned.
    ``token_map``: [V'] the token of each column of the logits; None: columns are tokens.
    """

    def __init__(self, runner: ModelRunner, planned: PlannedAttention | None) -> None:
        self._runner = runner
        self._planned = planned
        self._lean: LeanForward | None = None
        self.token_map: NDArray[np.int64] | None = None
        self.device = torch.device(runner.device if runner.device == "cpu" else f"{runner.device}:{runner.gpu_id}")
        self.vocab_size = int(runner.model_config.vocab_size)

    @property
    def block_table(self) -> torch.Tensor:
        """[rows, context_length] int32: the cells of each row by position. Row 0 is padding."""
        table: torch.Tensor = self._runner.req_to_token_pool.req_to_token
        return table

    def take_cells(self) -> NDArray[np.int64]:
        """All KV cells there are, for the caller to hand out. Waits for the device."""
        allocator = self._runner.token_to_kv_pool_allocator
        cells: NDArray[np.int64] = allocator.alloc(allocator.available_size()).cpu().numpy()
        return cells

    def take_rows(self, count: int) -> NDArray[np.int64]:
        """``count`` rows of the block table."""
        rows = self._runner.req_to_token_pool.alloc_rows(count)
        if rows is None:
            raise ConfigError(f"SGLang gave fewer than the {count} rows asked for; lower max_slots or the fan-out.")
        return np.array(rows, np.int64)

    def kv_buffers(self) -> list[torch.Tensor]:
        """Keys and values of every layer, [cells + 1, heads, D] each."""
        pool = self._runner.token_to_kv_pool
        return [*pool.k_buffer, *pool.v_buffer]

    @torch.inference_mode()
    def copy_cells(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> bool:
        """Copy keys and values of cells [n] to other cells [n], in every layer; False if there is more than these."""
        if type(self._runner.token_to_kv_pool) is not MHATokenToKVPool:
            return False
        from_cells, to_cells = upload(self.device, source, target)
        for buffer in self.kv_buffers():
            buffer.index_copy_(0, to_cells, buffer.index_select(0, from_cells))
        return True

    @torch.inference_mode()
    def extend(
        self, tokens: torch.Tensor, cells: torch.Tensor, *, row: int, start: int, plan: AttentionPlan | None = None
    ) -> torch.Tensor:
        """Positions [start, start + n) of one sequence; tokens and cells [n]; logits [V] of the last position.

        With the shared-trunk attention ``plan`` is needed and ``row`` is not read.
        """
        if self._lean is not None and plan is not None:
            return self._lean(tokens, plan, last_only=True)[0]
        n, total = len(tokens), start + len(tokens)
        device = self.device
        positions = torch.arange(start, total, device=device)
        lengths = torch.tensor([total])
        batch = self._batch(
            ForwardMode.EXTEND,
            tokens,
            positions,
            cells,
            torch.tensor([row], device=device),
            lengths.to(device),
            lengths,
            extend_num_tokens=n,
            extend_seq_lens=torch.tensor([n], dtype=torch.int32, device=device),
            extend_prefix_lens=torch.tensor([start], dtype=torch.int32, device=device),
            extend_start_loc=torch.zeros(1, dtype=torch.int32, device=device),
            extend_prefix_lens_cpu=[start],
            extend_seq_lens_cpu=[n],
            extend_logprob_start_lens_cpu=[0],
        )
        return self._forward(batch, plan)[0]

    @torch.inference_mode()
    def decode(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cells: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """One token for each of n rows; logits [n, V], valid until the next call.

        All arguments are [n] int64 on the device, except ``lengths`` (position + 1) which is on the host. Does not wait
        for the device.
        """
        return self._forward(
            self._batch(ForwardMode.DECODE, tokens, positions, cells, rows, positions + 1, lengths), None
        )

    @torch.inference_mode()
    def decode_planned(self, tokens: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """`decode` of ``tokens`` [n] with the shared-trunk attention."""
        if self._lean is not None:
            return self._lean(tokens, plan, last_only=False)
        rows, lengths = torch.zeros_like(plan.positions), plan.positions + 1
        batch = self._batch(ForwardMode.DECODE, tokens, plan.positions, plan.written, rows, lengths, lengths)
        return self._forward(batch, plan)

    def narrow(self, token_map: NDArray[np.int64]) -> None:
        """Compute the logits of these tokens [V'] only, in their order. Before any other use, and on a CPU.

        Raises:
            ConfigError: the output layer is of a kind that cannot be reduced.
        """
        head = getattr(self._runner.model, "lm_head", None)
        weight = getattr(head, "weight", None)
        is_packed = getattr(head, "use_intel_amx_backend", False)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.is_floating_point() and not is_packed:
            self._runner.model.lm_head = _NarrowHead(weight.detach()[torch.from_numpy(token_map)])
            self.token_map = token_map
        if self.token_map is None or len(self._trial(1)[2]) != len(token_map):  # some models do not use what they have
            raise ConfigError("The draft model's output layer cannot be reduced; leave out the token map.")

    def try_lean(self, context_length: int, *, is_rounded: bool) -> None:
        """Use the short forward from now on, if it knows the model and computes what the model computes.

        To be called before any cell holds something. ``is_rounded``: with products in bfloat16, where that is faster.
        """
        model, pool = self._runner.model, self._runner.token_to_kv_pool
        num_logits = self.vocab_size if self.token_map is None else len(self.token_map)
        make = partial(make_lean, model, pool.k_buffer, pool.v_buffer, context_length, num_logits)
        lean = make(SGLangProducts())
        if lean is None:
            return
        tokens, plan, wanted = self._trial(min(4, context_length))
        if not agrees(self._last_logits(lean, tokens, plan), wanted):
            logger.warning("The short CPU forward differs from SGLang's for this model and is not used.")
            return
        self._lean = lean
        if not is_rounded or not can_round(model, int(get_available_gpu_memory("cpu", 0) * 2**30)):
            return
        rounded = make(Bfloat16Products())
        assert rounded is not None
        if agrees(self._last_logits(rounded, tokens, plan), wanted, _ROUNDING):
            self._lean = rounded
        else:
            logger.warning("Products in bfloat16 change this model's logits too much and are not used.")

    @staticmethod
    @torch.inference_mode()
    def _last_logits(lean: LeanForward, tokens: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        return lean(tokens, plan, last_only=True)[0]

    def _trial(self, count: int) -> tuple[torch.Tensor, AttentionPlan, torch.Tensor]:
        """Tokens of a short prompt, its plan, and the logits of its last position. Writes to the first cells."""
        cells = CellTable(np.arange(1, count + 1), 1, 0, 1, count)
        cells.reserve(0, count)
        plan, tokens = plan_extend(cells, 0, 0, count), torch.arange(count)
        return tokens, plan, self.extend(tokens, plan.written, row=0, start=0, plan=plan)

    def _batch(
        self,
        mode: ForwardMode,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cells: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        lengths_cpu: torch.Tensor,
        **extend: object,
    ) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=tokens,
            req_pool_indices=rows,
            seq_lens=lengths,
            out_cache_loc=cells,
            seq_lens_sum=int(lengths_cpu.sum()),
            seq_lens_cpu=lengths_cpu,
            orig_seq_lens=lengths.to(torch.int32),
            positions=positions,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            spec_algorithm=self._runner.spec_algorithm,
            **extend,
        )

    def _forward(self, batch: ForwardBatch, plan: AttentionPlan | None) -> torch.Tensor:
        runner = self._runner
        batch._init_num_token_non_padded(device=self.device.type, is_draft_worker=False)
        if self._planned is None:
            translator = runner.kv_index_translator
            translator.own_plan(batch).bind(batch, translator)
            output = runner.forward(batch).logits_output
        else:
            # Not through ModelRunner.forward: copying the batch and choosing a graph, of which there is none on CPU,
            # is a seventh of a step of a small model.
            self._planned.plan = plan
            with (
                get_model().override(shared_experts=runner.model.shared_experts_config),
                forward_context(ForwardContext(attn_backend=self._planned), forward_batch=batch),
            ):
                output = runner.model.forward(batch.input_ids, batch.positions, batch)
        logits: torch.Tensor = output.next_token_logits
        return logits


class _NarrowHead(torch.nn.Module):
    """An output layer of some tokens. SGLang's logits are the product with its weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        """``weight``: [V', H]"""
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


class PlannedAttention(AttentionBackend):
    """SGLang attention backend that does what the current :class:`AttentionPlan` says."""

    plan: AttentionPlan | None = None

    def __init__(self, pool: MHATokenToKVPool) -> None:
        super().__init__()
        self._keys = pool.k_buffer
        self._values = pool.v_buffer

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing to prepare: the plan is made by the caller."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: object,
    ) -> torch.Tensor:
        """Write all rows' keys and values, then attend; q, k, v are [n, heads * D] or [n, heads, D]."""
        assert self.plan is not None
        keys, values = self._keys[layer.layer_id], self._values[layer.layer_id]
        if save_kv_cache:
            keys.index_copy_(0, self.plan.written, k.view(-1, *keys.shape[1:]))
            values.index_copy_(0, self.plan.written, v.view(-1, *values.shape[1:]))
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return attend(q, keys, values, self.plan, scale=layer.scaling, window=layer.sliding_window_size)


def load_runner(config: DraftConfig) -> DraftRunner:
    """Load the model of a resolved configuration. To be called once in a process.

    Raises:
        ConfigError: SGLang cannot serve this model in the way the engine needs it.
    """
    if config.device_type == "cpu":
        # Some models compile single functions (Gemma3 its norm): minutes on CPU, for nothing.
        torch._dynamo.config.disable = True
    args = ServerArgs(**server_arguments(config))
    args.resolve_once()
    ports = PortArgs.init_new(args)
    rank = spawn_world_rank(args, tp_rank=0, pp_rank=0)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=config.gpu_id))
    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_bf16_gemm_config()
    initialize_fp4_gemm_config()
    model_config = ModelConfig.from_server_args(args)
    bootstrap.init_parallel_runtime(server_args=args, device=get_device().device, dist_port=ports.nccl_port)
    bootstrap.init_layer_runtime(model_config=model_config)
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=resolving_view(args).mem_fraction_static,
        gpu_id=config.gpu_id,
        nccl_port=ports.nccl_port,
        server_args=args,
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    if config.device_type == "cpu":
        torch.set_num_threads(config.num_threads or 1)
    if runner.page_size != 1:
        raise ConfigError(
            f"SGLang uses pages of {runner.page_size} tokens with the attention backend {config.attention_backend}, "
            "the draft engine needs 1; choose the backend triton."
        )
    if config.attention_backend != "shared_trunk":
        return DraftRunner(runner, None)
    draft = DraftRunner(runner, _install_planned(runner))
    if config.token_map is not None:
        draft.narrow(read_token_map(config.token_map, draft.vocab_size, config.least_logits))
    if config.lean:
        draft.try_lean(model_config.context_len, is_rounded=config.dtype == "auto")
    return draft


def _install_planned(runner: ModelRunner) -> PlannedAttention:
    pool = runner.token_to_kv_pool
    layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
    plain = type(pool) is MHATokenToKVPool and pool.k_buffer[0].dtype == runner.dtype
    if not plain or any(layer.logit_cap for layer in layers):
        raise ConfigError(
            "The draft model's attention or KV cache is of a kind that the draft engine has no CPU code for; "
            "use --device cuda:N or a model of the Llama, Qwen or Gemma3 kind."
        )
    planned = PlannedAttention(pool)
    runner.attn_backend = planned
    return planned
