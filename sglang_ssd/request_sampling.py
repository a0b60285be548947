"""How requests are sampled, as the speculator is told and as seeds decide."""

from __future__ import annotations

import secrets
from typing import Any
from weakref import WeakKeyDictionary

from sglang.srt.sampling.sampling_params import TOP_K_ALL

from ssd_proto.records import MAX_STOP_TOKENS, Sampling

_SEED_MASK = 2**63 - 1
_HOTTEST = 1e6
_LEAST_TOP_P = 1e-6
"""What fits into the record's numbers; beyond these drafts could not follow the target anyway."""


def seed_of(request: Any) -> int | None:
    """The seed that a sampled request asks for, 0..2**63 - 1; None if it is greedy or asks for none."""
    params = request.sampling_params
    if params.sampling_seed is None or is_greedy(params):
        return None
    return int(params.sampling_seed) & _SEED_MASK


def is_greedy(params: Any) -> bool:
    """SGLang turns temperature 0 into top-k 1."""
    return bool(params.top_k <= 1)


def stop_tokens(request: Any) -> list[int]:
    """Tokens that end a request, or may not be drawn before ``min_new_tokens``."""
    stops = {*(request.sampling_params.stop_token_ids or ()), *(request.eos_token_ids or ())}
    tokenizer = request.tokenizer
    if tokenizer is not None:
        stops |= {*(tokenizer.additional_stop_token_ids or ()), tokenizer.eos_token_id}
    return sorted(stop for stop in stops if stop is not None)


class RequestSampling:
    """Sampling of requests, and the random seeds of those that bring none: kept for as long as the request lives.

    Args:
        shares_noise: every sampled request draws with the noise of its seed (``verification`` of the config).
        num_kept: m; with 0 no q is sent, so drafts that were sampled would be accepted less than greedy ones.
        knows_law: False if SGLang's sampler draws by itself, so that drafts can follow neither its noise nor its law.
    """

    def __init__(self, shares_noise: bool, num_kept: int, knows_law: bool) -> None:
        self._shares_noise = shares_noise
        self._num_kept = num_kept
        self._knows_law = knows_law
        self._seeds: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def coupled_seed(self, request: Any) -> int | None:
        """The seed with whose noise the target draws; None for greedy requests and those of the ratio rule."""
        if not self._knows_law or is_greedy(request.sampling_params):
            return None
        seed = seed_of(request)
        return self._own_seed(request) if seed is None and self._shares_noise else seed

    def sampling(self, request: Any) -> Sampling:
        """What the speculator is told when the sequence is opened."""
        params = request.sampling_params
        stops = self._stops(request)
        if is_greedy(params) or not self._knows_law:
            return Sampling(stop_tokens=stops)
        seed = self.coupled_seed(request)
        if seed is None and self._num_kept == 0:
            return Sampling(stop_tokens=stops)
        return Sampling(
            temperature=min(params.temperature, _HOTTEST),
            top_k=0 if params.top_k >= TOP_K_ALL else params.top_k,
            top_p=max(params.top_p, _LEAST_TOP_P),
            min_p=params.min_p,
            seed=self._own_seed(request) if seed is None else seed,
            shared_noise=seed is not None,
            stop_tokens=stops,
        )

    def _own_seed(self, request: Any) -> int:
        if request not in self._seeds:
            self._seeds[request] = secrets.randbits(63)
        return self._seeds[request]

    def _stops(self, request: Any) -> tuple[int, ...]:
        params = request.sampling_params
        if params.ignore_eos or len(request.output_ids) < params.min_new_tokens:
            return ()
        return tuple(stop for stop in stop_tokens(request) if stop >= 0)[:MAX_STOP_TOKENS]
