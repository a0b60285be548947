"""Runs in a process of its own: the draft engine beside a Hugging Face model, on random rounds.

SGLang keeps one configuration per process, hence the processes. Functions here raise AssertionError on a difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from speculator_service.draft.base import BranchStep
from speculator_service.draft.config import DraftConfig
from speculator_service.draft.engine import DraftEngine, load_engine

SLOTS, BRANCHES, K, CONTEXT = 3, 6, 3, 96
POISON = 50.0
TOLERANCE = 1e-3


def make_checkpoint(kind: str, path: Path) -> Path:
    """A tiny model of the given architecture with random weights, large enough that logits differ."""
    import transformers

    common = {
        "vocab_size": 200,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    special = {
        "Llama": {},
        "Qwen2": {"num_key_value_heads": 1},
        "Qwen3": {"head_dim": 32, "tie_word_embeddings": True},
        "Gemma3": {
            "head_dim": 32,
            "num_key_value_heads": 1,
            "sliding_window": 12,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    }[kind]
    config_class = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(11)
    model = model_class(config_class(**{**common, **special})).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path


@dataclass
class Slot:
    """What the trunk of a slot should hold."""

    tokens: list[int] = field(default_factory=list)
    own: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # branch -> (prefix, tokens stepped)


class Harness:
    """The engine, the reference, and the truth about every slot."""

    def __init__(self, model_path: str, backend: str, seed: int, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        config = DraftConfig(
            model_path,
            SLOTS,
            BRANCHES,
            K,
            device=device,
            dtype="float32",
            context_length=CONTEXT,
            attention_backend=backend,
        )
        self.engine: DraftEngine = load_engine(config)
        self.reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval().to(device)
        self.rng = np.random.default_rng(seed)
        self.slots: dict[int, Slot] = {}
        self.buffers = self.engine._path._runner.kv_buffers()  # type: ignore[attr-defined]
        self.compared = 0
        self.worst = 0.0
        self.spread = 0.0
        self.free_at_start = self.engine.free_tokens
        self.poison(everything=True)

    def token(self) -> int:
        return int(self.rng.integers(3, self.engine.vocab_size))

    @torch.inference_mode()
    def poison(self, *, everything: bool = False) -> None:
        """Fill the cells that nobody holds with a number that would show."""
        cells = self.engine._cells
        free = torch.from_numpy(cells._free[: cells.num_free])
        for buffer in self.buffers:
            if everything:
                buffer.fill_(POISON)
            else:
                buffer[free.to(buffer.device)] = POISON

    @torch.inference_mode()
    def check(self, logits: torch.Tensor, contexts: list[list[int]]) -> None:
        """Logits [n, V] must be the reference's after each of n contexts (padding after them is not seen)."""
        length = max(map(len, contexts))
        padded = torch.tensor([c + [0] * (length - len(c)) for c in contexts]).to(self.reference.device)
        last = torch.tensor([len(c) - 1 for c in contexts])
        wanted = self.reference(padded).logits[torch.arange(len(contexts)), last].float().cpu()
        got = logits.float().cpu()[:, : wanted.shape[1]]
        difference = (got - wanted).abs().max().item()
        assert difference <= TOLERANCE, f"logits differ by {difference} for contexts of {[len(c) for c in contexts]}"
        top = wanted.topk(2).values
        clear = (top[:, 0] - top[:, 1]) > 2 * TOLERANCE
        assert torch.equal(got.argmax(1)[clear], wanted.argmax(1)[clear])
        self.compared += len(contexts)
        self.worst = max(self.worst, difference)
        self.spread = max(self.spread, float(wanted.std()))

    # ------------------------------------------------------------------ what a speculator does

    def open(self, slot: int) -> None:
        """Prompt in chunks of random sizes; now and then another slot has its beginning."""
        prompt = [self.token() for _ in range(int(self.rng.integers(2, 60)))]
        start = 0
        others = list(self.slots)
        if others and self.rng.random() < 0.5:
            other = others[int(self.rng.integers(len(others)))]
            start = int(self.rng.integers(1, min(40, len(self.slots[other].tokens)) + 1))
            prompt = self.slots[other].tokens[:start] + prompt[:20]
        length = len(prompt)
        assert self.engine.reserve(slot, length)
        if start:
            middle = int(self.rng.integers(0, start + 1))
            self.engine.copy_trunk(other, slot, 0, middle)
            self.engine.copy_trunk(other, slot, middle, start)
        while start < length:
            count = int(self.rng.integers(1, length - start + 1))
            logits = self.engine.extend(slot, start, np.array(prompt[start : start + count]))
            start += count
            self.check(logits[None], [prompt[:start]])
        self.slots[slot] = Slot(prompt)

    def close(self, slot: int) -> None:
        self.engine.release(slot)
        del self.slots[slot]
        self.poison()

    def round(self, slots: list[int]) -> None:
        """K + 1 steps: row 0 extends the trunk in the first, half the late branches build on it one step later."""
        b, g = len(slots), 1 + BRANCHES
        length = np.array([len(self.slots[s].tokens) for s in slots])
        late = np.zeros((b, g), np.bool_)
        prefix = np.zeros((b, g), np.int64)
        for i, n in enumerate(length):
            prefix[i, 1:] = np.maximum(n - self.rng.integers(0, K + 1, BRANCHES), 1)
            late[i, 1:] = self.rng.random(BRANCHES) < 0.3
        prefix[late] = np.broadcast_to(length[:, None] + 1, (b, g))[late]
        prefix[:, 0] = length
        for i, s in enumerate(slots):
            assert self.engine.reserve(s, int(length[i]) + K + 2)
            self.slots[s].own = {branch: (int(prefix[i, branch]), []) for branch in range(1, g)}
        for x in range(K + 1):
            self.step(slots, prefix, late, x)

    def step(self, slots: list[int], prefix: np.ndarray, late: np.ndarray, x: int) -> None:
        shape = prefix.shape
        depth = x - late.astype(np.int64)
        live = (depth >= 0) & (depth < K)
        live[:, 0] = x == 0
        depth[:, 0] = 0
        live[:, 1:] &= self.rng.random((shape[0], BRANCHES)) > 0.1  # a branch may end early
        tokens = self.rng.integers(3, self.engine.vocab_size, shape)
        contexts = []
        for i, s in enumerate(slots):
            slot = self.slots[s]
            if live[i, 0]:
                slot.tokens.append(int(tokens[i, 0]))
                contexts.append(list(slot.tokens))
            for branch in range(1, shape[1]):
                at, own = slot.own[branch]
                live[i, branch] &= depth[i, branch] == len(own)
                if live[i, branch]:
                    own.append(int(tokens[i, branch]))
                    contexts.append(slot.tokens[:at] + own)
        if not live.any():
            return
        logits = self.engine.step(BranchStep(np.array(slots), tokens, prefix, depth, live))
        assert logits.shape == (*shape, self.engine.vocab_size)
        assert torch.isfinite(logits).all()
        self.check(logits[torch.from_numpy(live)], contexts)

    def end_round(self, slots: list[int]) -> None:
        """Each slot adopts a branch, fully or in part, or is taken back to an earlier position."""
        adopt = []
        for s in slots:
            slot = self.slots[s]
            branch = int(self.rng.integers(1, BRANCHES + 1))
            at, own = slot.own[branch]
            if own and self.rng.random() < 0.7:
                count = len(own) if self.rng.random() < 0.6 else int(self.rng.integers(1, len(own) + 1))
                adopt.append((s, branch, at, count))
                slot.tokens = slot.tokens[:at] + own[:count]
            else:
                slot.tokens = slot.tokens[: max(1, len(slot.tokens) - int(self.rng.integers(0, K + 1)))]
        if adopt:
            self.engine.adopt(*(np.array(column) for column in zip(*adopt, strict=True)))
        self.catch_up(slots)
        tokens = [self.token() for _ in slots]
        positions = [len(self.slots[s].tokens) for s in slots]
        logits = self.engine.extend_one(np.array(slots), np.array(positions), np.array(tokens))
        for s, t in zip(slots, tokens, strict=True):
            self.slots[s].tokens.append(t)
        self.check(logits, [self.slots[s].tokens for s in slots])

    def catch_up(self, slots: list[int]) -> None:
        """Some slots get up to K tokens in one forward; there are logits after each."""
        some = [s for s in slots if self.rng.random() < 0.7]
        if not some:
            return
        counts = self.rng.integers(1, K + 1, len(some))
        tokens = self.rng.integers(3, self.engine.vocab_size, (len(some), int(counts.max())))
        starts = np.array([len(self.slots[s].tokens) for s in some])
        for s, start in zip(some, starts, strict=True):
            assert self.engine.reserve(s, int(start) + 2 * K + 2)
        logits = self.engine.extend_each(np.array(some), starts, tokens, counts)
        contexts, is_wanted = [], np.arange(tokens.shape[1]) < counts[:, None]
        for s, of_slot, count in zip(some, tokens.tolist(), counts, strict=True):
            for token in of_slot[:count]:
                self.slots[s].tokens.append(token)
                contexts.append(list(self.slots[s].tokens))
        self.check(logits[torch.from_numpy(is_wanted)], contexts)


def compare(
    model_path: str, backend: str, rounds: int, seed: int = 0, device: str = "cpu"
) -> tuple[int, float, float, bool]:
    """Random opens, rounds, adoptions, rejections and closes; see the return value."""
    harness = Harness(model_path, backend, seed, device)
    for number in range(rounds):
        for s in range(SLOTS):
            if s not in harness.slots and (number == 0 or harness.rng.random() < 0.8):
                harness.open(s)
        part = [s for s in harness.slots if harness.rng.random() < 0.8] or list(harness.slots)[:1]
        if part:
            harness.round(part)
            harness.end_round(part)
        for s in list(harness.slots):
            if len(harness.slots[s].tokens) > CONTEXT - 3 * K or harness.rng.random() < 0.1:
                harness.close(s)
    for s in list(harness.slots):
        harness.close(s)
    assert harness.engine.free_tokens == harness.free_at_start, "cells were lost"
    if device == "cpu":
        assert torch.get_num_threads() == 1
    short_forward = harness.engine._path._runner._lean is not None  # type: ignore[attr-defined]
    return harness.compared, harness.worst, harness.spread, short_forward
