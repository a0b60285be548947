"""The best that speculation can do: the draft, run by Hugging Face on the target's own text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from tests.support.sglang_server import DRAFT


class IdealSpeculation:
    """Counts rounds of greedy speculation with the tiny draft, in float32, without any cache."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32).eval()

    def rounds(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        """Rounds until ``output`` is complete; its first token comes from the prompt's own forward."""
        produced, rounds = 1, 0
        while produced < len(output):
            rounds += 1
            produced += 1 + self._accepted([*prompt, *output[:produced]], output[produced:])
        return rounds

    @torch.inference_mode()
    def _accepted(self, prefix: list[int], following: Sequence[int]) -> int:
        """How many greedy drafts after ``prefix`` the target accepts."""
        tokens = list(prefix)
        for accepted, expected in enumerate(following[: self._lookahead]):
            logits = self._draft(torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits
            token = int(logits[0, -1].argmax())
            if token != expected:
                return accepted
            tokens.append(token)
        return min(self._lookahead, len(following))
