"""Step times of the draft engine that the service runs, and of the target's verification, on this machine's CPU.

Only the models' forward passes are timed: what the service and the server add to them shows in the measured speeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reproduction.pair import CachedModel
from reproduction.plan import Plan
from speculator_service.draft.base import BranchStep, DraftModel
from speculator_service.draft.config import DraftConfig
from speculator_service.draft.engine import load_engine

CONTEXT = 128
"""Tokens of every sequence before the timed steps."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Shortest seconds at each batch size of the plan: what else runs on the machine can only add to them."""

    verification: list[float]
    """The target over K + 1 tokens of each sequence."""
    just_in_time: list[float]
    """K draft steps over one token of each sequence."""
    speculation: dict[int, list[float]]
    """By F: the K + 1 draft steps of a table with F bonus tokens at each position."""


def num_measurements(plan: Plan) -> int:
    """How often ``on_measured`` of `measure` is called."""
    return len(plan.batch_sizes) * plan.time_repeats


def measure(target: Any, draft_path: str, plan: Plan, on_measured: Callable[[], None]) -> StepTimes:
    """Load the draft engine and time it and the target at every batch size.

    Args:
        target: the loaded model.
        draft_path: the draft's folder.
        plan: K, batch sizes, fan-outs and repetitions.
        on_measured: called after every repetition.

    Raises:
        ConfigError: the draft engine cannot be loaded.
    """
    branches = (plan.lookahead + 1) * max(plan.backup_fan_outs)
    slots = max(plan.batch_sizes)
    engine = load_engine(
        DraftConfig(
            draft_path,
            slots,
            branches,
            plan.lookahead,
            context_length=CONTEXT + 2 * plan.lookahead + 2,
        )
    )
    for slot in range(slots):
        assert engine.reserve(slot, CONTEXT + plan.lookahead + 1)
        engine.extend(slot, 0, np.arange(CONTEXT) % engine.vocab_size)

    times = StepTimes([], [], {fan_out: [] for fan_out in plan.backup_fan_outs})
    for batch_size in plan.batch_sizes:
        actions = [_verification(target, batch_size, plan.lookahead), _just_in_time(engine, batch_size)]
        actions += [_speculation(engine, batch_size, fan_out) for fan_out in plan.backup_fan_outs]
        shortest = [math.inf] * len(actions)
        for _ in range(plan.time_repeats):  # in turns: what disturbs one is likely to disturb its neighbours, too
            for place, action in enumerate(actions):
                started = time.perf_counter()
                action()
                shortest[place] = min(shortest[place], time.perf_counter() - started)
            on_measured()
        for column, seconds in zip(
            (times.verification, times.just_in_time, *times.speculation.values()), shortest, strict=True
        ):
            column.append(seconds)
    return times


def _verification(target: Any, batch_size: int, lookahead: int) -> Callable[[], object]:
    sequences = CachedModel(target, [list(range(CONTEXT))] * batch_size)
    tokens = torch.arange(lookahead + 1).expand(batch_size, -1)

    def verify() -> None:
        sequences.extend(tokens)
        sequences.drop()

    return verify


def _just_in_time(engine: DraftModel, batch_size: int) -> Callable[[], object]:
    slots = np.arange(batch_size)

    def draft() -> None:
        for depth in range(engine.lookahead):
            engine.extend_one(slots, np.full(batch_size, CONTEXT + depth), slots)

    return draft


def _speculation(engine: DraftModel, batch_size: int, fan_out: int) -> Callable[[], object]:
    """The steps of a table: the trunk takes s_K in the first, the branches of k = K begin one step later."""
    lookahead = engine.lookahead
    position = np.repeat(np.arange(lookahead + 1), fan_out)  # k of each branch
    is_late = position == lookahead
    slots = np.arange(batch_size)
    trunk = CONTEXT + lookahead
    prefix = np.concatenate([[trunk], CONTEXT + 1 + position])
    steps = []
    for step in range(lookahead + 1):
        depth = np.concatenate([[0], step - is_late])
        live = (depth >= 0) & (depth < lookahead)
        live[0] = step == 0
        tokens, prefixes, depths, alive = (
            np.tile(row, (batch_size, 1))
            for row in (np.arange(len(prefix)), prefix, depth.clip(0, lookahead - 1), live)
        )
        steps.append(BranchStep(slots, tokens, prefixes, depths, alive))

    def speculate() -> None:
        for step in steps:
            engine.step(step)

    return speculate
