"""The closed loop of `tabular_loop` with the verifier that runs in SGLang: float32, padding, draws of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from tabular_loop import Speculation, TabularLoop

from sglang_ssd.rejection import SparseProbs, verify_by_ratio
from speculator_service.saguaro.rejection import Verified


@dataclass
class PluginLoop(TabularLoop):
    """Tokens past those that were sent are padding: they repeat the last token, and have no q.

    Args:
        num_offered: drafts that may be accepted, as for requests with a custom processor; None: all.
    """

    num_offered: int | None = None

    def _next(self, last: torch.Tensor, hit: torch.Tensor, before: Speculation | None) -> Speculation:
        speculation = super()._next(last, hit, before)
        is_padding = torch.arange(self.lookahead) >= speculation.num_sent[:, None]
        return replace(speculation, tokens=torch.where(is_padding, last[:, None], speculation.tokens))

    def _verify(self, last: torch.Tensor, speculation: Speculation) -> Verified:
        contexts = self._contexts(last, speculation.tokens)
        ids = torch.stack([q.ids[contexts[:, i]] for i, q in enumerate(self._q)], 1).long()
        probs = torch.stack([q.probs[contexts[:, i]] for i, q in enumerate(self._q)], 1)
        is_sent = torch.arange(self.lookahead) < speculation.num_sent[:, None]
        has_q = (is_sent & speculation.sampled[:, None]).unsqueeze(-1)
        q = SparseProbs(torch.where(has_q, ids, 0), torch.where(has_q, probs, 0.0))
        offered = None if self.num_offered is None else torch.full_like(last, self.num_offered)
        p = self.target[contexts].float()
        k, tokens = verify_by_ratio(p, speculation.tokens, q, offered, self._generator)
        return Verified(k, tokens.gather(1, k[:, None]).squeeze(1))
