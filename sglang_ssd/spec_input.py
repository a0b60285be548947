"""What travels from round to round inside SGLang, and the chain that a round verifies."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_utils import default_tree_mask_mode
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sglang_ssd.sampling import Basis, ChainVerifyInput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker


_GENERATOR_SALT = 0x5D5D


class SSDDraftInput(SpecInput):
    """The bonus tokens of the last round: committed, sampled, their KV not yet written.

    ``bonus_tokens`` [b] int; with overlap scheduling SGLang carries them in its future map and here are
    only ``future_indices`` [b].  The remaining attributes are read by SGLang's relay and always None.
    """

    topk_p = topk_index = hidden_states = draft_probs = dsa_topk_indices = None

    def __init__(self, bonus_tokens: torch.Tensor | None = None, future_indices: torch.Tensor | None = None) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.bonus_tokens = bonus_tokens
        self.future_indices = future_indices

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: torch.Tensor | None = None) -> None:
        """Keep the rows ``new_indices``."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        else:
            assert self.bonus_tokens is not None
            self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: SSDDraftInput) -> None:
        """Append the rows of another batch."""
        if self.future_indices is not None:
            assert other.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
        else:
            assert self.bonus_tokens is not None
            assert other.bonus_tokens is not None
            self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])


class ChainBuilder:
    """Makes the verify input of a chain (a tree with one leaf): bonus, s_1..s_K at seq_len..seq_len+K."""

    def __init__(self, lookahead: int, max_batch_size: int, device: str, target_worker: TpModelWorker) -> None:
        self._lookahead = lookahead
        self._sampler = target_worker.model_runner.sampler
        self._generator = torch.Generator(device)
        self._generator.manual_seed(torch.initial_seed() ^ _GENERATOR_SALT)  # other numbers than SGLang's own generator
        self._device = device
        self._target_worker = target_worker
        self._places = np.arange(lookahead + 1)
        self._common: dict[tuple[int, int], dict[str, Any]] = {}
        """What all chains of a batch size and length have in common, on a CPU; SGLang only reads it."""
        # The degenerate tree of a chain, as SGLang's tree builder wants it (its own top-k 1 fast path).
        parents = lookahead if lookahead > 1 else 0
        self._parents = torch.arange(-1, parents - 1, device=device).repeat(max_batch_size, 1)
        self._scores = torch.arange(lookahead, device=device).repeat(max_batch_size, 1)

    def build(
        self,
        batch: ScheduleBatch,
        bonus: torch.Tensor,
        drafts: torch.Tensor,
        basis: Basis,
    ) -> ChainVerifyInput:
        """``bonus`` [b] int, ``drafts`` [b, n] int64, both on the target's device; no host synchronisation.

        n is K; on a CPU it may be less.
        """
        parts = self._parts_on_cpu(batch, bonus, drafts) if self._device == "cpu" else self._parts(batch, bonus, drafts)
        return ChainVerifyInput(**parts, sampler=self._sampler, generator=self._generator, basis=basis)

    def _parts(self, batch: ScheduleBatch, bonus: torch.Tensor, drafts: torch.Tensor) -> dict[str, Any]:
        """Fields of an `EagleVerifyInput`, by SGLang's tree builder."""
        batch_size = drafts.shape[0]
        tree = build_eagle_verify_input(
            batch,
            SSDDraftInput(bonus),
            self._parents[:batch_size],
            self._scores[:batch_size],
            drafts,
            None,
            target_worker=self._target_worker,
            topk=1,
            num_steps=self._lookahead,
            num_draft_tokens=self._lookahead + 1,
            tree_mask_mode=default_tree_mask_mode(),
            device=self._device,
        )
        return {part.name: getattr(tree, part.name) for part in dataclasses.fields(tree)}

    def _parts_on_cpu(self, batch: ScheduleBatch, bonus: torch.Tensor, drafts: torch.Tensor) -> dict[str, Any]:
        """The same: the tree builder's loops over rows would cost more than the whole rest."""
        batch_size, width = drafts.shape[0], drafts.shape[1] + 1
        if (batch_size, width) not in self._common:
            self._common[batch_size, width] = self._common_parts(batch_size, width)
        # With numpy, which needs a fraction of the time of torch for so few numbers.
        chain = np.empty((batch_size, width), np.int64)
        chain[:, 0], chain[:, 1:] = bonus.numpy(), drafts.numpy()
        positions = np.add(batch.seq_lens.numpy()[:, None], self._places[:width], dtype=np.int64)
        return {
            "draft_token": torch.from_numpy(chain.reshape(-1)),
            "positions": torch.from_numpy(positions.reshape(-1)),
            **self._common[batch_size, width],
        }

    def _common_parts(self, batch_size: int, width: int) -> dict[str, Any]:
        steps = torch.arange(width)
        next_token = torch.cat([steps[1:], steps.new_full((1,), -1)])
        return {
            "custom_mask": torch.ones(width, width, dtype=torch.bool).tril().flatten().repeat(batch_size),
            "retrieve_index": torch.arange(batch_size * width).view(batch_size, width),
            "retrieve_next_token": next_token.repeat(batch_size, 1),
            "retrieve_next_sibling": torch.full((batch_size, width), -1),
            "retrieve_cum_len": None,
            "spec_steps": width - 1,
            "topk": 1,
            "draft_token_num": width,
            "capture_hidden_mode": CaptureHiddenMode.NULL,
            "seq_lens_sum": None,
            "seq_lens_cpu": None,
        }
