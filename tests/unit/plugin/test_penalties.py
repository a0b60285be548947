"""Penalties at every verified position: as SGLang's own penalizers give them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

VOCAB_SIZE = 40
STOPS = {3, 5}


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


def request(**params: Any) -> SimpleNamespace:
    sampling = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": STOPS,
        **params,
    }
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=1)
    return SimpleNamespace(sampling_params=SimpleNamespace(**sampling), eos_token_ids={2}, tokenizer=tokenizer)


REQUESTS = [
    request(),
    request(frequency_penalty=0.7),
    request(presence_penalty=-0.4),
    request(repetition_penalty=1.5),
    request(min_new_tokens=6),
    request(frequency_penalty=0.3, presence_penalty=0.2, repetition_penalty=1.2, min_new_tokens=30),
]


def one_by_one(logits: torch.Tensor, outputs: list[list[int]], drafts: torch.Tensor) -> torch.Tensor:
    """Penalised logits by SGLang's penalizers, fed one token at a time as in plain decoding."""
    from sglang.srt.sampling import penaltylib

    class Batch:
        device = "cpu"
        reqs = REQUESTS

    batch = Batch()
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(
        vocab_size=VOCAB_SIZE,
        batch=batch,  # type: ignore[arg-type]
        penalizers={
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
            penaltylib.BatchedPresencePenalizer,
            penaltylib.BatchedRepetitionPenalizer,
        },
    )
    for step in range(len(outputs[0])):
        orchestrator.cumulate_output_tokens(torch.tensor([output[step] for output in outputs]))
    result = []
    for position in range(drafts.shape[1]):
        if position:
            orchestrator.cumulate_output_tokens(drafts[:, position])
        penalised = logits[:, position].clone()
        additive = torch.zeros_like(penalised)
        orchestrator.accumulate_additive_penalties(additive)
        penalised += additive
        scaling = orchestrator.accumulate_scaling_penalties()
        assert scaling is not None
        result.append(torch.where(penalised < 0, penalised * scaling, penalised / scaling))
    return torch.stack(result, 1)


@pytest.mark.parametrize("seed", range(5))
def test_penalties_are_those_of_plain_decoding_at_every_position(seed: int) -> None:
    from sglang_ssd.penalties import apply_penalties

    torch.manual_seed(seed)
    width, length = 5, 4
    outputs = torch.randint(0, VOCAB_SIZE, (len(REQUESTS), length)).tolist()
    drafts = torch.randint(0, 8, (len(REQUESTS), width))  # few tokens, so that drafts repeat
    drafts[:, 0] = torch.tensor([output[-1] for output in outputs])
    logits = torch.randn(len(REQUESTS), width, VOCAB_SIZE)
    expected = one_by_one(logits, outputs, drafts)
    apply_penalties(logits, drafts, REQUESTS, outputs)
    torch.testing.assert_close(logits, expected)
