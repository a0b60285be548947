"""A verifier without a target and the speculator with a real draft model, in one process, over real shared memory."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from sglang_ssd.client import Connection
from sglang_ssd.handoff import HandedOver, Handoff
from sglang_ssd.metrics import VerifierMetrics
from sglang_ssd.request_sampling import RequestSampling
from sglang_ssd.sampling import Basis
from sglang_ssd.sessions import Sessions
from sglang_ssd.spec_input import ChainBuilder
from sglang_ssd.speculation import Speculation
from speculator_service.draft.base import DraftModel
from speculator_service.planner import Planner, PlannerSettings
from speculator_service.sessions import Verifier
from speculator_service.speculator import Speculator
from ssd_proto.channels.shm import ShmSpeculatorChannel, ShmVerifierChannel
from ssd_proto.records import NO_KEY
from ssd_proto.table import TableShape

PROMPT_LENGTH = 128
_STOP_TOKEN = 1
_SHARE_PREPARED = 0.9
"""Of the outcomes; the others miss."""
_INCARNATION = 7


class Durations:
    """A trace that keeps the seconds of its spans by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def span(self, name: str, **args: Any) -> Timed:
        """Times the block; ``args`` are of no interest."""
        return Timed(self.seconds[name])

    def close(self) -> None:
        """Nothing to do."""


class Timed:
    """Times a block."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds.append(time.perf_counter() - self._began)


@dataclass(eq=False)
class Request:
    """What the verifier reads of SGLang's requests."""

    rid: str
    origin_input_ids: Sequence[int]
    sampling_params: SimpleNamespace
    output_ids: Sequence[int] = ()
    eos_token_ids: frozenset[int] = frozenset({_STOP_TOKEN})
    tokenizer: None = None


class _Client:
    """Hands over one connection."""

    def __init__(self, channel: ShmVerifierChannel) -> None:
        self._connection: Connection | None = Connection(welcome=None, channel=channel)  # type: ignore[arg-type]

    def take(self) -> Connection | None:
        """The connection, once."""
        connection, self._connection = self._connection, None
        return connection


class BothEnds:
    """Runs rounds of ``batch_size`` sequences.

    Nine of ten outcomes are prepared ones, drawn evenly from the table, so the text means nothing; greedy and sampled
    sequences have the same outcomes.

    Args:
        engine: K and its branches, B of them; free slots for the batch.
        fan_out: F, the same for every k.
        num_kept: m.
        temperature: 0: greedy.
    """

    def __init__(
        self, engine: DraftModel, fan_out: int, batch_size: int, num_kept: int, temperature: float, seed: int = 0
    ) -> None:
        lookahead = engine.lookahead
        settings = PlannerSettings(fan_out=fan_out, backup="primary", adapt_depth=False, rest=False)
        shape = TableShape(batch_size, settings.num_outcomes(lookahead), lookahead, num_kept, engine.max_slots)
        self.durations = Durations()
        planner = Planner(settings, lookahead, engine.vocab_size)
        self._speculator = Speculator(engine, planner, num_kept=num_kept, trace=self.durations)
        ours = ShmSpeculatorChannel.create(shape, _INCARNATION, "")
        theirs = ShmVerifierChannel.attach(ours.address, shape, _INCARNATION, "")
        ours.unlink()
        self._channels = ours, theirs
        self._verifier = Verifier(1, _INCARNATION, "microbench", shape, ours)
        self._speculator.attach(self._verifier)
        sampling = RequestSampling(shares_noise=False, num_kept=num_kept, knows_law=True)
        self._sessions = Sessions(batch_size, lookahead)
        self._speculation = Speculation(
            _Client(theirs),  # type: ignore[arg-type]
            self._sessions,
            VerifierMetrics(CollectorRegistry()),
            sampling,
            deadline_s=0.0,  # whoever waited here would wait for itself
            vocab_size=engine.vocab_size,
            is_narrow=True,
        )
        worker: Any = SimpleNamespace(model_runner=SimpleNamespace(sampler=None))
        self._chains = ChainBuilder(lookahead, batch_size, "cpu", worker)
        self._handoff = Handoff("cpu", batch_size, lookahead, num_kept)
        self._rng = np.random.default_rng(seed)
        self._slots = np.arange(batch_size)
        self._requests = [self._request(slot, engine.vocab_size, temperature) for slot in range(batch_size)]
        self._is_sampled, self._vocab_size = temperature > 0, engine.vocab_size

    def run(self, num_rounds: int) -> None:
        """Open the sequences, run rounds, close the sequences."""
        for slot, request in enumerate(self._requests):
            request.rid += "'"
            self._speculation.open(self._slots[slot : slot + 1], [request])
        self._advance(until_answered=False)
        lengths = np.full(len(self._slots), PROMPT_LENGTH)
        self._round(HandedOver(self._slots, np.zeros_like(lengths), self._any_tokens(), lengths))
        for _ in range(num_rounds):
            self._round(self._next_outcome())
        self._speculation.close(self._slots.tolist())
        self._advance(until_answered=False)

    def close(self) -> None:
        """Give everything back, the engine's slots included."""
        self._speculator.detach(self._verifier)
        for channel in self._channels:
            channel.close()

    def _round(self, outcome: HandedOver) -> None:
        began = time.perf_counter()
        self._speculation.outcome(outcome)
        posted = time.perf_counter() - began
        self._advance(until_answered=True)
        seq_lens = torch.from_numpy(self._sessions.length - 1)
        bonus = torch.from_numpy(outcome.bonus)
        began = time.perf_counter()
        drafts, q = self._speculation.speculate(self._slots, self._requests)
        staged = self._handoff.stage_with_q(drafts, q)[0] if self._is_sampled else self._handoff.stage(drafts)
        self._chains.build(SimpleNamespace(seq_lens=seq_lens), bonus, staged, Basis())
        self.durations.seconds["verifier"].append(posted + time.perf_counter() - began)
        self._advance(until_answered=False)

    def _advance(self, *, until_answered: bool) -> None:
        """Let the speculator work until it has answered, or has nothing left to do."""
        rows = self._speculator._rows
        self._speculator.poll()
        while not (until_answered and (rows.awaited == NO_KEY).all()) and self._speculator.advance():
            pass

    def _next_outcome(self) -> HandedOver:
        keys = self._speculator._rows.keys[self._verifier.row[self._slots]]
        sent = self._sessions.outcomes(self._slots)["num_sent"]
        accepted, bonus = np.minimum(1, sent).astype(np.int64), self._any_tokens()
        for slot, prepared in enumerate(keys):
            prepared = prepared[prepared != NO_KEY]
            if len(prepared) and self._rng.random() < _SHARE_PREPARED:
                key = int(self._rng.choice(prepared))
                accepted[slot], bonus[slot] = key >> 32, key & 0xFFFF_FFFF
        return HandedOver(self._slots, accepted, bonus, None)

    def _any_tokens(self) -> NDArray[np.int64]:
        return self._rng.integers(_STOP_TOKEN + 1, self._vocab_size, len(self._slots))

    def _request(self, slot: int, vocab_size: int, temperature: float) -> Request:
        params = SimpleNamespace(
            temperature=temperature or 1.0,
            top_k=1 if temperature == 0 else vocab_size,
            top_p=1.0,
            min_p=0.0,
            sampling_seed=None,
            ignore_eos=False,
            min_new_tokens=0,
            stop_token_ids=None,
        )
        prompt = self._rng.integers(_STOP_TOKEN + 1, vocab_size, PROMPT_LENGTH)
        return Request(str(slot), prompt.tolist(), params)
