"""launch/distill: the target's text, what the student learns, and the checkpoint that it becomes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd_proto.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "launch"))  # launch/ is not a package

from chat.pair import TOKEN_MAP, draft_checkpoint  # noqa: E402
from distillation.corpus import NUM_LIKELIEST, Corpus  # noqa: E402
from distillation.instructions import make_instructions  # noqa: E402
from distillation.muon import Muon32  # noqa: E402
from distillation.student import Student, choose_tokens  # noqa: E402
from distillation.training import Batches, score, train  # noqa: E402
from distillation.writer import Prompt, Writer, _Document  # noqa: E402

TARGET = ROOT / "tests" / "models" / "tiny-target"
ROWS, LENGTH, MAX_ANSWER, STOP = 6, 48, 10, 1
PROMPTS = ((5, 300, 41), (7, 8), (100, 200, 300, 400, 500, 600))
LAYERS = (0, 9)


@pytest.fixture(scope="module")
def target() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def corpus(target: Any) -> Corpus:
    return write(target, seed=3)


def write(target: Any, seed: int) -> Corpus:
    def prompts() -> Iterator[Prompt]:
        while True:
            yield from map(Prompt, PROMPTS)

    steps: list[int] = []
    writer = Writer(target, STOP, ROWS, LENGTH, MAX_ANSWER)
    found = writer.write(prompts(), np.random.default_rng(seed), steps.append)
    assert sum(steps) == ROWS * LENGTH
    return found


@pytest.fixture(scope="module")
def student(target: Any, corpus: Corpus) -> Student:
    token_map = choose_tokens(corpus, target.config.vocab_size, (0, 1, 2), 512)
    return Student(target, LAYERS, token_map)


def documents(corpus: Corpus) -> list[tuple[int, int, int]]:
    """Row, first and last place of each document."""
    found = []
    for row in range(len(corpus)):
        begins = sorted(set(corpus.starts[row].tolist()))
        found += [(row, begin, end) for begin, end in zip(begins, [*begins[1:], LENGTH], strict=True)]
    return found


class TestText:
    def test_every_document_is_a_prompt_and_an_answer(self, corpus: Corpus) -> None:
        for row, begin, end in documents(corpus):
            tokens = corpus.tokens[row, begin:end].tolist()
            prompt = next(prompt for prompt in PROMPTS if tuple(tokens[: len(prompt)]) == prompt[: len(tokens)])
            is_written = corpus.is_written[row, begin:end]
            assert is_written.tolist() == [at >= len(prompt) - 1 for at in range(len(tokens))]
            assert is_written.sum() <= MAX_ANSWER

    @pytest.mark.parametrize("num_ends", [1, 2])
    def test_a_document_ends_with_its_last_message(self, num_ends: int) -> None:
        generator = SimpleNamespace(choice=lambda of: of[0], random=lambda: 1.0)  # never goes on after its end
        document = _Document(Prompt((5, 300), num_ends), 0, generator)  # type: ignore[arg-type]
        assert [document.next_token(), document.next_token()] == [5, 300]
        goes_on = [document.take(token, STOP, MAX_ANSWER) for token in (7, STOP, 8, STOP)]
        assert goes_on == [True, num_ends > 1, num_ends > 1, False]

    def test_rows_are_full(self, corpus: Corpus) -> None:
        assert len(documents(corpus)) > 2 * ROWS
        assert corpus.is_written.mean() > 0.4

    def test_distributions_are_those_of_the_document_alone(self, target: Any, corpus: Corpus) -> None:
        for row, begin, end in documents(corpus)[:8]:
            tokens = torch.from_numpy(corpus.tokens[row, begin:end].astype(np.int64))[None]
            target.set_attn_implementation("sdpa")
            with torch.no_grad():
                wanted = target(input_ids=tokens).logits[0].log_softmax(-1)
            likeliest = torch.from_numpy(corpus.likeliest[row, begin:end].astype(np.int64))
            assert torch.equal(likeliest[:, 0], wanted.argmax(-1))
            found = torch.from_numpy(corpus.log_probs[row, begin:end].astype(np.float32))
            assert (found - wanted.gather(1, likeliest)).abs().max() < 0.02

    def test_answers_are_drawn_from_the_likeliest(self, corpus: Corpus) -> None:
        drawn = corpus.is_written[:, :-1] & (corpus.starts[:, :-1] == corpus.starts[:, 1:])
        after, likeliest = corpus.tokens[:, 1:][drawn], corpus.likeliest[:, :-1][drawn]
        assert (after[:, None] == likeliest).any(1).all()
        assert 0.3 < (after == likeliest[:, 0]).mean() < 0.99

    def test_the_same_seed_writes_the_same(self, target: Any, corpus: Corpus) -> None:
        assert np.array_equal(write(target, seed=3).tokens, corpus.tokens)
        assert not np.array_equal(write(target, seed=4).tokens, corpus.tokens)

    def test_parts_are_read_in_order(self, corpus: Corpus, tmp_path: Path) -> None:
        first, second = corpus.split(2)
        second.write(tmp_path, 1, {})
        first.write(tmp_path, 0, {})
        assert np.array_equal(Corpus.read(tmp_path).log_probs, corpus.log_probs)

    def test_no_text(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="There is no training text"):
            Corpus.read(tmp_path)


def test_instructions_are_varied_and_seeded() -> None:
    made = make_instructions(2000, 5)
    assert made == make_instructions(2000, 5)
    assert made != make_instructions(2000, 6)
    assert len(set(made)) > 1600
    assert not any("{" in text and "}" in text for text in made)


class TestStudent:
    def test_begins_as_layers_of_the_target(self, target: Any, student: Student, corpus: Corpus) -> None:
        batch = Batches(corpus, student.token_map.numpy(), 2048).take(np.arange(2))
        logits = student(batch.tokens, batch.starts, batch.wanted)
        assert logits.shape == (int(batch.wanted.sum()), 512)
        hidden = target.model.norm.weight
        assert torch.equal(student.model.norm.weight, hidden)
        assert torch.equal(student.model.layers[1].mlp.up_proj.weight, target.model.layers[9].mlp.up_proj.weight)

    def test_documents_do_not_see_each_other(self, student: Student, corpus: Corpus) -> None:
        row, begin, end = documents(corpus)[1]
        tokens = torch.from_numpy(corpus.tokens[row].astype(np.int64))[None]
        starts = torch.from_numpy(corpus.starts[row].astype(np.int64))[None]
        wanted = torch.zeros(1, LENGTH, dtype=torch.bool)
        wanted[0, begin:end] = True
        alone = torch.ones(1, end - begin, dtype=torch.bool)
        packed = student(tokens, starts, wanted)
        assert torch.allclose(packed, student(tokens[:, begin:end], starts[:, begin:end] * 0, alone), atol=1e-4)

    def test_tokens_with_most_probability_are_kept(self, corpus: Corpus) -> None:
        kept = choose_tokens(corpus, 2048, (2047,), 40)
        assert len(kept) == 40
        assert 2047 in kept
        assert (np.diff(kept) > 0).all()
        firsts, counts = np.unique(corpus.likeliest[corpus.is_written][:, 0], return_counts=True)
        assert set(firsts[np.argsort(-counts)[:3]]) <= set(kept)

    def test_targets_are_columns_of_the_token_map(self, corpus: Corpus) -> None:
        token_map = np.array([3, 50, 700])
        batch = Batches(corpus, token_map, 2048).take(np.arange(ROWS))
        likeliest = corpus.likeliest[corpus.is_written]
        assert batch.probs.shape == (len(likeliest), NUM_LIKELIEST)
        is_mapped = np.isin(likeliest, token_map)
        assert np.array_equal(batch.probs.numpy() > 0, is_mapped)
        assert np.array_equal(token_map[batch.columns.numpy()[is_mapped]], likeliest[is_mapped])

    def test_weights_that_are_none(self, target: Any, tmp_path: Path) -> None:
        (tmp_path / "draft.safetensors").write_bytes(b"none")
        with pytest.raises(ConfigError, match="cannot be gone on from"):
            Student.read(target, tmp_path / "draft.safetensors")

    def test_learns_and_becomes_a_checkpoint(
        self, target: Any, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        token_map = choose_tokens(corpus, 2048, (0, 1, 2), 512)
        student = Student(target, LAYERS, token_map)
        batches = Batches(corpus, token_map, 2048)
        before = score(student, batches, ROWS, 4)
        train(student, batches.shuffled(3, np.random.default_rng(1)), 30, 2e-3, lambda step, loss: None)
        after = score(student, batches, ROWS, 4)
        assert after.loss < before.loss - 0.3
        assert after.same_first > before.same_first
        assert after.overlap > before.overlap

        monkeypatch.setenv("SGLANG_SSD_MODEL_CACHE", str(tmp_path / "models"))
        student.save(tmp_path / "draft.safetensors", {"steps": "30"})
        again = Student.read(target, tmp_path / "draft.safetensors")
        assert score(again, batches, ROWS, 4).loss == pytest.approx(after.loss, abs=0.02)
        folder = draft_checkpoint(TARGET, tmp_path / "draft.safetensors")
        assert draft_checkpoint(TARGET, tmp_path / "draft.safetensors") == folder
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        assert torch.load(folder / TOKEN_MAP) == token_map.tolist()
        assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(TARGET).get_vocab()
        tokens = torch.tensor([PROMPTS[2]])
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        with torch.no_grad():
            mine = student(tokens, tokens * 0, everywhere)
            theirs = loaded(input_ids=tokens).logits[0][:, token_map]
        assert torch.allclose(mine, theirs, atol=0.3)
        assert (mine - theirs).abs().mean() < 0.03  # bfloat16 rounds the layers


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_muon_is_that_of_torch_but_for_its_precision(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    mine, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    optimizers = (
        Muon32([mine], lr=0.1, weight_decay=0.01),
        torch.optim.Muon([theirs], lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        gradient = torch.randn(shape)
        for weight, optimizer in zip((mine, theirs), optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    change, difference = mine.detach() - 1, mine.detach() - theirs.detach()
    assert difference.norm() < 0.02 * change.norm()
