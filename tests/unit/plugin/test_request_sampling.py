"""What the speculator is told about a request, and which requests draw with the noise of a seed."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_ssd.request_sampling import RequestSampling, seed_of
from ssd_proto.records import MAX_STOP_TOKENS, Sampling

from .conftest import FakeRequest, params


def request(stops: set[int] | None = None, output_ids: list[int] | None = None, **changes: Any) -> FakeRequest:
    return FakeRequest("a", [1], output_ids or [], params(**changes), stops)


def by_ratio(num_kept: int = 32, knows_law: bool = True) -> RequestSampling:
    return RequestSampling(shares_noise=False, num_kept=num_kept, knows_law=knows_law)


def by_noise() -> RequestSampling:
    return RequestSampling(shares_noise=True, num_kept=32, knows_law=True)


def test_greedy_requests_are_greedy_whatever_else_they_say() -> None:
    for told in (by_ratio(), by_noise()):
        asked = request(sampling_seed=5, top_p=0.5)
        assert told.sampling(asked) == Sampling()
        assert told.coupled_seed(asked) is None


def test_sampled_requests_have_a_seed_each_that_lasts() -> None:
    told, first, second = by_ratio(), request(top_k=TOP_K_ALL), request(top_k=40)
    sampling = told.sampling(first)
    assert sampling._replace(seed=0) == Sampling(temperature=1.0)
    assert told.sampling(first) == sampling
    assert told.sampling(second).top_k == 40
    assert told.sampling(second).seed != sampling.seed
    assert told.coupled_seed(first) is None


@pytest.mark.parametrize("seed", [0, 7, -1, -(2**63), 2**63 - 1])
def test_a_seed_of_the_request_couples_it(seed: int) -> None:
    asked = request(top_k=TOP_K_ALL, sampling_seed=seed)
    for told in (by_ratio(), by_ratio(num_kept=0), by_noise()):
        sampling = told.sampling(asked)
        assert sampling.shared_noise
        assert sampling.seed == told.coupled_seed(asked) == seed_of(asked) == seed % 2**63


def test_shared_noise_gives_every_sampled_request_a_seed() -> None:
    told, asked = by_noise(), request(top_k=TOP_K_ALL)
    sampling = told.sampling(asked)
    assert sampling.shared_noise
    assert sampling.seed == told.coupled_seed(asked)
    assert seed_of(asked) is None, "its first token is drawn as SGLang draws"


def test_drafts_are_greedy_where_the_rule_could_not_use_their_q() -> None:
    asked = request(top_k=TOP_K_ALL, stops={3})
    assert by_ratio(num_kept=0).sampling(asked) == Sampling(stop_tokens=(3,))
    told = by_ratio(knows_law=False)
    assert told.sampling(request(top_k=TOP_K_ALL, sampling_seed=5)) == Sampling()
    assert told.coupled_seed(request(top_k=TOP_K_ALL, sampling_seed=5)) is None


def test_seeds_are_forgotten_with_their_requests() -> None:
    told, asked = by_noise(), request(top_k=TOP_K_ALL)
    told.sampling(asked)
    del asked
    gc.collect()
    assert len(told._seeds) == 0


def test_extreme_parameters_fit_into_the_record() -> None:
    sampling = by_ratio().sampling(request(top_k=TOP_K_ALL, temperature=1e300, top_p=1e-300))
    assert (sampling.temperature, sampling.top_p) == (1e6, 1e-6)


def test_stop_tokens() -> None:
    tokenizer = SimpleNamespace(additional_stop_token_ids={9}, eos_token_id=4)
    asked = FakeRequest("a", [1], [], params(stop_token_ids={5}), {4, 6}, tokenizer)
    assert by_ratio().sampling(asked).stop_tokens == (4, 5, 6, 9)
    assert by_ratio().sampling(request(stops={4}, ignore_eos=True)).stop_tokens == ()
    assert by_ratio().sampling(request(stops=set(range(40)))).stop_tokens == tuple(range(MAX_STOP_TOKENS))


def test_stop_tokens_wait_for_min_new_tokens() -> None:
    assert by_ratio().sampling(request(stops={4}, output_ids=[1], min_new_tokens=2)).stop_tokens == ()
    assert by_ratio().sampling(request(stops={4}, output_ids=[1, 2], min_new_tokens=2)).stop_tokens == (4,)
