"""SGLang's sampling parameters of a batch, and its sampler on a CPU, for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL

PLAIN = {"temperature": 1.0, "top_k": TOP_K_ALL, "top_p": 1.0, "min_p": 0.0}
GREEDY = PLAIN | {"top_k": 1}


def batch_info(rows: list[dict[str, float]], vocab_size: int) -> SamplingBatchInfo:
    """As SGLang makes it of the requests' parameters (``SamplingBatchInfo.from_schedule_batch``)."""
    rows = [PLAIN | row for row in rows]
    top_ks = [int(row["top_k"]) for row in rows]
    return SamplingBatchInfo(
        temperatures=torch.tensor([[row["temperature"]] for row in rows]),
        top_ps=torch.tensor([row["top_p"] for row in rows]),
        top_ks=torch.tensor(top_ks, dtype=torch.int32),
        min_ps=torch.tensor([row["min_p"] for row in rows]),
        is_all_greedy=all(k <= 1 for k in top_ks),
        is_any_greedy=any(k <= 1 for k in top_ks),
        need_top_p_sampling=any(row["top_p"] != 1 for row in rows),
        need_top_k_sampling=any(k != TOP_K_ALL for k in top_ks),
        need_min_p_sampling=any(row["min_p"] > 0 for row in rows),
        max_top_k=max(top_ks) if max(top_ks) < TOP_K_ALL else None,
        vocab_size=vocab_size,
        device="cpu",
    )


def sampler_on_cpu(monkeypatch: pytest.MonkeyPatch, rank: int = 0, deterministic: bool = False) -> Any:
    """SGLang's sampler in a process of one rank, without a server."""
    from sglang.srt.layers import sampler as sglang_sampler

    from sglang_ssd import sampling

    parallel = SimpleNamespace(tp_group=SimpleNamespace(world_size=1, rank_in_group=rank, device_group=None))
    options = SimpleNamespace(
        kernel=SimpleNamespace(sampling_backend="pytorch"),
        deterministic=SimpleNamespace(rl_on_policy_target=None, enable_deterministic_inference=deterministic),
        features=SimpleNamespace(sampling_mask_max_tokens=0),
    )
    for module in (sglang_sampler, sampling):
        monkeypatch.setattr(module, "get_exec", lambda: options)
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    monkeypatch.setattr(sglang_sampler, "is_dp_attention_enabled", lambda: False)
    return sglang_sampler.Sampler()
