"""Verification position by position: penalties as SGLang's own penalizers give them, acceptance by equality."""

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
    from sglang_ssd.sampling import apply_penalties

    torch.manual_seed(seed)
    width, length = 5, 4
    outputs = torch.randint(0, VOCAB_SIZE, (len(REQUESTS), length)).tolist()
    drafts = torch.randint(0, 8, (len(REQUESTS), width))  # few tokens, so that drafts repeat
    drafts[:, 0] = torch.tensor([output[-1] for output in outputs])
    logits = torch.randn(len(REQUESTS), width, VOCAB_SIZE)
    expected = one_by_one(logits, outputs, drafts)
    apply_penalties(logits, drafts, REQUESTS, outputs)
    torch.testing.assert_close(logits, expected)


def test_accepts_while_drafts_equal_what_was_drawn() -> None:
    from sglang_ssd.sampling import _accept

    drafts = torch.tensor([[9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3]])
    drawn = torch.tensor([[1, 2, 3, 4], [1, 7, 3, 4], [5, 2, 3, 4], [1, 2, 3, 4]])
    predict, accept_lens, accept_index = _accept(drawn, drafts, single=[3])
    assert accept_lens.tolist() == [4, 2, 1, 1]
    assert accept_index.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1], [12, -1, -1, -1]]
    assert predict.view(4, 4).tolist() == drawn.tolist()
    assert {tensor.dtype for tensor in (predict, accept_lens, accept_index)} == {torch.int32}


def test_the_law_is_the_samplers_whatever_the_draft() -> None:
    """First two tokens of sequences that are decoded from a Markov chain by rounds with a bad draft."""
    from scipy.stats import chisquare

    from sglang_ssd.sampling import _accept

    torch.manual_seed(0)
    size, count, width = 4, 200_000, 3
    table = torch.distributions.Dirichlet(torch.ones(size)).sample((size,))
    bonus = torch.zeros(count, dtype=torch.int64)
    drafts = torch.stack([bonus, torch.randint(0, size, (count,)), torch.randint(0, size, (count,))], 1)
    drawn = torch.multinomial(table[drafts.flatten()], 1).view(count, width)
    predict, accept_lens, _ = _accept(drawn, drafts, single=[])
    first = predict.view(count, width)[:, 0].long()
    second = predict.view(count, width)[:, 1].long()
    # A second token that the round did not reach is drawn by the next round.
    later = torch.multinomial(table[first], 1)[:, 0]
    second = torch.where(accept_lens > 1, second, later)
    expected = (table[0][:, None] * table).flatten() * count
    observed = torch.bincount(first * size + second, minlength=size * size)
    assert chisquare(observed.numpy(), expected.double().numpy() / expected.double().sum().item() * count).pvalue > 1e-3
    greedy = torch.where(drafts[:, 1] == table[0].argmax(), drafts[:, 1], first)  # a wrong rule: accept the likeliest
    wrong = torch.bincount(greedy, minlength=size).numpy()
    assert chisquare(wrong, table[0].double().numpy() / table[0].double().sum().item() * count).pvalue < 1e-6
