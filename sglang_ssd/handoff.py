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


class Handoff:
    """Carries at most one outcome. Copies start with the forward and are waited for in `finish`.

    On a GPU the copies go to pinned memory behind the forward, and `finish` waits for an event; on a CPU
    nothing is copied or waited for.  Drafts go the other way through `stage`.
    """

    def __init__(self, device: str, max_batch_size: int, lookahead: int) -> None:
        self._device = device
        self._on_cpu = device == "cpu"
        self._pending: tuple[NDArray[np.int64], NDArray[np.int64] | None, torch.Tensor, torch.Tensor] | None = None
        if not self._on_cpu:
            self._event = torch.get_device_module(device).Event()
            self._host = torch.empty((2, max_batch_size), dtype=torch.int64, pin_memory=True)
            # Two staging buffers: with overlap scheduling the copy of the last round may still be queued.
            self._staging = torch.empty((2, max_batch_size, lookahead), dtype=torch.int64, pin_memory=True)
            self._turn = 0

    def begin_prefill(
        self, tokens: torch.Tensor, rows: list[int], slots: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        """The forward sampled ``tokens`` [b]; those of ``rows`` are the first tokens of ``slots`` after ``lengths``."""
        bonus = tokens if len(rows) == len(tokens) else tokens[rows]
        self._begin(slots, lengths, torch.ones_like(bonus), bonus)

    def begin_round(self, accept_lens: torch.Tensor, bonus: torch.Tensor, slots: NDArray[np.int64]) -> None:
        """The forward accepted ``accept_lens`` [b] tokens (bonus included), the last of which is ``bonus`` [b]."""
        self._begin(slots, None, accept_lens, bonus)

    def finish(self) -> HandedOver | None:
        """Wait for the pending outcome, if there is one, and take it."""
        if self._pending is None:
            return None
        slots, lengths, accept_lens, bonus = self._pending
        self._pending = None
        if not self._on_cpu:
            self._event.synchronize()
        return HandedOver(slots, accept_lens.numpy().astype(np.int64) - 1, bonus.numpy().astype(np.int64), lengths)

    def stage(self, drafts: NDArray[np.int32]) -> torch.Tensor:
        """Drafts [b, K] as int64 on the device, without waiting for the copy."""
        if self._on_cpu:
            return torch.from_numpy(drafts.astype(np.int64))
        self._turn ^= 1
        staging = self._staging[self._turn, : len(drafts)]
        staging.numpy()[:] = drafts
        return staging.to(self._device, non_blocking=True)

    def _begin(
        self,
        slots: NDArray[np.int64],
        lengths: NDArray[np.int64] | None,
        accept_lens: torch.Tensor,
        bonus: torch.Tensor,
    ) -> None:
        assert self._pending is None, "the last outcome was not handed over"
        if not self._on_cpu:
            host_lens, host_bonus = self._host[0, : len(slots)], self._host[1, : len(slots)]
            host_lens.copy_(accept_lens, non_blocking=True)
            host_bonus.copy_(bonus, non_blocking=True)
            self._event.record()
            accept_lens, bonus = host_lens, host_bonus
        # The scheduler reuses its index tensors; a copy keeps the rows of this forward.
        self._pending = (slots.copy(), lengths, accept_lens, bonus)
