"""Hands the outcome of a forward from the device to the host: the one synchronisation of a round."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class HandedOver(NamedTuple):
    """An outcome on the host. All arrays are [n]."""

    slots: NDArray[np.int64]
    num_accepted: NDArray[np.int64]
    bonus: NDArray[np.int64]
    prefill_lengths: NDArray[np.int64] | None
    """Tokens before the bonus token, for prefills; None for a round."""


class _Pending(NamedTuple):
    slots: NDArray[np.int64]
    rows: list[int] | None
    lengths: NDArray[np.int64] | None
    accept_lens: torch.Tensor | None
    bonus: torch.Tensor


class Handoff:
    """Carries at most one outcome. Copies start with the forward and are waited for in `finish`.

    On a GPU the copies go to pinned memory behind the forward, and `finish` waits for an event; on a CPU
    nothing is copied or waited for.  Drafts go the other way through `stage`.

    Args:
        num_kept: words of q that come with each draft.
    """

    def __init__(self, device: str, max_batch_size: int, lookahead: int, num_kept: int) -> None:
        self._device = device
        self._on_cpu = device == "cpu"
        self._pending: _Pending | None = None
        if not self._on_cpu:
            self._event = torch.get_device_module(device).Event()
            # int32 as on the device: a copy that converts would not be asynchronous.
            self._host = torch.empty((2, max_batch_size), dtype=torch.int32, pin_memory=True)
            # Two staging buffers: with overlap scheduling the copy of the last round may still be queued.
            shape = (2, max_batch_size, lookahead)
            self._staging = torch.empty(shape, dtype=torch.int64, pin_memory=True)
            self._staging_with_q = torch.empty((*shape, 1 + num_kept), dtype=torch.int64, pin_memory=True)
            self._turn = 0

    def begin_prefill(
        self, tokens: torch.Tensor, rows: list[int], slots: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        """The forward sampled ``tokens`` [b]; those of ``rows`` are the first tokens of ``slots`` after ``lengths``."""
        self._begin(_Pending(slots, rows, lengths, None, tokens))

    def begin_round(self, accept_lens: torch.Tensor, bonus: torch.Tensor, slots: NDArray[np.int64]) -> None:
        """The forward accepted ``accept_lens`` [b] tokens (bonus included), the last of which is ``bonus`` [b]."""
        # The scheduler reuses its index tensors; a copy keeps the slots of this forward.
        self._begin(_Pending(slots.copy(), None, None, accept_lens, bonus))

    def finish(self) -> HandedOver | None:
        """Wait for the pending outcome, if there is one, and take it."""
        if self._pending is None:
            return None
        slots, rows, lengths, accept_lens, bonus = self._pending
        self._pending = None
        if not self._on_cpu:
            self._event.synchronize()
        tokens = bonus.numpy().astype(np.int64)
        if rows is not None:
            tokens = tokens[rows]
        accepted = np.zeros_like(tokens) if accept_lens is None else accept_lens.numpy().astype(np.int64) - 1
        return HandedOver(slots, accepted, tokens, lengths)

    def stage(self, drafts: NDArray[np.int32]) -> torch.Tensor:
        """Drafts [b, K] as int64 on the device, without waiting for the copy."""
        if self._on_cpu:
            return torch.from_numpy(drafts.astype(np.int64))
        self._turn ^= 1
        staging = self._staging[self._turn, : len(drafts)]
        staging.numpy()[:] = drafts
        return staging.to(self._device, non_blocking=True)

    def stage_with_q(self, drafts: NDArray[np.int32], q: NDArray[np.int64] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts as `stage` gives them, and words of q [b, K, m], by one copy; [b, K, 0] if ``q`` is None."""
        if q is None:
            staged = self.stage(drafts)
            return staged, staged.new_empty((*staged.shape, 0))
        if self._on_cpu:
            return self.stage(drafts), torch.from_numpy(q)
        self._turn ^= 1
        staging = self._staging_with_q[self._turn, : len(drafts)]
        words = staging.numpy()
        words[..., 0], words[..., 1:] = drafts, q
        on_device = staging.to(self._device, non_blocking=True)
        return on_device[..., 0].contiguous(), on_device[..., 1:]

    def _begin(self, pending: _Pending) -> None:
        assert self._pending is None, "the last outcome was not handed over"
        if not self._on_cpu:
            bonus = self._to_host(0, pending.bonus)
            lens = None if pending.accept_lens is None else self._to_host(1, pending.accept_lens)
            self._event.record()
            pending = pending._replace(bonus=bonus, accept_lens=lens)
        self._pending = pending

    def _to_host(self, line: int, values: torch.Tensor) -> torch.Tensor:
        host = self._host[line, : len(values)]
        return host.copy_(values.to(torch.int32), non_blocking=True)
