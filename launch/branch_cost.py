"""What many branches cost: a step of the draft model with all branches of a sequence beside a step with one of them."""

from __future__ import annotations

import time

import numpy as np
import torch
from both_ends import PROMPT_LENGTH

from speculator_service.draft.base import BranchStep, DraftModel
from speculator_service.draft.config import DraftConfig
from speculator_service.draft.engine import load_engine

CONTEXT = 512
_REPEATS = 30
_WARM_UP = 3


def measure_branch_cost(model_path: str, device: str, num_branches: int) -> tuple[float, float]:
    """Median seconds of a step with one branch, and of one with ``num_branches``, after 512 tokens.

    To be called in a process without another engine. Raises `ConfigError`.
    """
    config = DraftConfig(
        model_path,
        max_slots=1,
        num_branches=num_branches,
        lookahead=1,
        device=device,
        dtype="float32" if device == "cpu" else "auto",
        context_length=CONTEXT + 2,
    )
    engine = load_engine(config)
    tokens = np.random.default_rng(1).integers(0, engine.vocab_size, CONTEXT)
    assert engine.reserve(0, CONTEXT + 1), "the default pool is too small for one sequence"
    for start in range(0, CONTEXT, PROMPT_LENGTH):
        engine.extend(0, start, tokens[start : start + PROMPT_LENGTH])
    steps = [_step(num_branches, number) for number in (1, num_branches)]
    seconds: list[list[float]] = [[], []]
    for _ in range(_WARM_UP + _REPEATS):
        for step, found in zip(steps, seconds, strict=True):
            found.append(_timed(engine, step))
    one, all_of_them = (float(np.median(found[_WARM_UP:])) for found in seconds)
    return one, all_of_them


def _step(num_branches: int, num_live: int) -> BranchStep:
    shape = (1, 1 + num_branches)
    live = np.zeros(shape, np.bool_)
    live[0, 1 : 1 + num_live] = True
    return BranchStep(
        np.zeros(1, np.int64), np.full(shape, 3), np.full(shape, CONTEXT), np.zeros(shape, np.int64), live
    )


def _timed(engine: DraftModel, step: BranchStep) -> float:
    began = time.perf_counter()
    logits = engine.step(step)
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    return time.perf_counter() - began
