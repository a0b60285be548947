"""A scripted greedy verifier and an in-process channel, to run the speculator in a closed loop without a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speculator_service.draft.tabular import TabularDraft
from speculator_service.planner import Planner, PlannerSettings
from speculator_service.sessions import Verifier
from speculator_service.speculator import Speculator
from ssd_proto.channel import SpeculatorChannel, VerifierChannel
from ssd_proto.channels.shm import ShmSpeculatorChannel, ShmVerifierChannel
from ssd_proto.records import (
    GREEDY,
    CloseSequence,
    Event,
    OpenSequence,
    ProposalKind,
    Proposals,
    Sampling,
    outcome_dtype,
)
from ssd_proto.table import SpeculationTable, TableShape

VOCAB = 40
MakeChannels = Callable[[TableShape, int], tuple[SpeculatorChannel, VerifierChannel]]


class LocalSpeculatorChannel(SpeculatorChannel):
    def __init__(self, table: SpeculationTable, events: deque[Event]) -> None:
        self.table, self._events, self.closed = table, events, False

    def poll(self) -> Event | None:
        return self._events.popleft() if self._events else None

    def pending(self) -> bool:
        return bool(self._events)

    def close(self) -> None:
        self.closed = True


class LocalVerifierChannel(VerifierChannel):
    def __init__(self, table: SpeculationTable, events: deque[Event]) -> None:
        self.table, self._events = table, events

    def open_sequence(
        self, slot: int, generation: int, tokens: NDArray[np.integer], sampling: Sampling = GREEDY
    ) -> None:
        self._events.append(OpenSequence(slot, generation, np.array(tokens, np.int32), sampling))

    def close_sequence(self, slot: int, generation: int) -> None:
        self._events.append(CloseSequence(slot, generation))

    def post(self, outcomes: NDArray[np.void]) -> None:
        self._events.append(outcomes.copy())

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass


def local_channels(shape: TableShape, incarnation: int) -> tuple[LocalSpeculatorChannel, LocalVerifierChannel]:
    """Both ends of a channel inside one process."""
    memory, events = bytearray(shape.nbytes), deque[Event]()
    return (
        LocalSpeculatorChannel(SpeculationTable(shape, memory, incarnation), events),
        LocalVerifierChannel(SpeculationTable(shape, memory, incarnation), events),
    )


def shm_channels(shape: TableShape, incarnation: int) -> tuple[SpeculatorChannel, VerifierChannel]:
    """Both ends of a channel through real shared memory."""
    ours = ShmSpeculatorChannel.create(shape, incarnation, "")
    theirs = ShmVerifierChannel.attach(ours.address, shape, incarnation, "")
    ours.unlink()
    return ours, theirs


class Models:
    """A tabular draft and a target that agrees with it often."""

    def __init__(self, draft: TabularDraft, disagreement: float = 0.35, seed: int = 77) -> None:
        self.draft, self._disagreement = draft, disagreement
        self._other = TabularDraft(1, 0, 1, 1, vocab_size=draft.vocab_size, seed=seed)

    def target(self, text: Sequence[int]) -> int:
        logits = self.draft.next_logits(text) + self._disagreement * self._other.next_logits(text)
        return int(logits.argmax())

    def continuation(self, text: Sequence[int], count: int) -> list[int]:
        """What the draft alone would propose."""
        chain: list[int] = []
        for _ in range(count):
            chain.append(int(self.draft.next_logits([*text, *chain]).argmax()))
        return chain

    def autoregressive(self, prompt: Sequence[int], count: int) -> list[int]:
        text = list(prompt)
        for _ in range(count):
            text.append(self.target(text))
        return text


@dataclass
class ScriptedSequence:
    generation: int
    prompt: list[int]
    wanted: int
    text: list[int] = field(default_factory=list)
    round: int = 0
    proposal: list[int] = field(default_factory=list)
    kind: ProposalKind = ProposalKind.EMPTY
    accepted: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.text) - len(self.prompt) >= self.wanted


class ScriptedVerifier:
    """Greedy verification with scripted accidents.

    ``context`` bounds the draft's tokens; every proposal is compared with what the draft alone would say after
    the committed text, so that a wrong trunk shows in the round where it happens (unless there are other ``backups``
    than the draft).
    """

    def __init__(
        self,
        channel: VerifierChannel,
        models: Models,
        rng: np.random.Generator,
        drive: Callable[[], object],
        context: int,
    ) -> None:
        self.channel, self.models, self.rng, self.drive, self.context = channel, models, rng, drive, context
        self.lookahead = channel.table.shape.lookahead
        self.sequences: dict[int, ScriptedSequence] = {}
        self.drop_probability = 0.0
        self.lucky_padding = 0.0
        self.deadline_probability = 0.0
        self.unserved_allowed = False
        self.foreign_backups = False
        self.steps_while_verifying = 64
        self.kinds = dict.fromkeys(ProposalKind, 0)
        self._generation = 0

    def open(self, slot: int, prompt: Sequence[int], wanted: int, sampling: Sampling = GREEDY) -> ScriptedSequence:
        self._generation += 1
        sequence = ScriptedSequence(self._generation, list(prompt), wanted, list(prompt))
        self.sequences[slot] = sequence
        self.channel.open_sequence(slot, sequence.generation, np.array(prompt), sampling)
        return sequence

    def reopen(self, slot: int) -> None:
        """Retraction: the same request comes back under a new generation."""
        sequence = self.sequences[slot]
        self._generation += 1
        sequence.generation, sequence.round, sequence.proposal = self._generation, 0, []
        self.channel.open_sequence(slot, sequence.generation, np.array(sequence.text))

    def close(self, slot: int) -> ScriptedSequence:
        sequence = self.sequences.pop(slot)
        self.channel.close_sequence(slot, sequence.generation)
        return sequence

    def round(self) -> None:
        """Verify all sequences, post the outcomes and fetch the next speculations."""
        for _ in range(int(self.rng.integers(0, self.steps_while_verifying + 1))):
            self.drive()
        slots = np.array(sorted(self.sequences))
        outcomes = np.zeros(len(slots), outcome_dtype(self.lookahead))
        for outcome, slot in zip(outcomes, slots.tolist(), strict=True):
            self._verify(outcome, slot, self.sequences[slot])
        self.channel.post(outcomes)
        proposals = self.channel.lookup(outcomes)
        impatient = self.rng.random() < self.deadline_probability
        for _ in range(int(self.rng.integers(0, 6)) if impatient else 400):
            if (proposals.depth >= 0).all():
                break
            self.drive()
            proposals = self.channel.wait(outcomes, proposals, timeout=0.0)
        assert impatient or (proposals.depth >= 0).all(), f"no answer for slots {slots[proposals.depth < 0]}"
        self._take(slots, proposals)

    def _verify(self, outcome: np.void, slot: int, sequence: ScriptedSequence) -> None:
        padding = self.rng.integers(0, self.models.draft.vocab_size, self.lookahead).tolist()
        if self.rng.random() < self.lucky_padding:
            padding = self.models.autoregressive(sequence.text, self.lookahead)[len(sequence.text) :]
        tokens = (sequence.proposal + padding[len(sequence.proposal) :])[: self.lookahead]
        accepted = 0
        if sequence.round > 0:  # round 0 is the prompt's own first token
            while accepted < self.lookahead and tokens[accepted] == self.models.target(sequence.text):
                sequence.text.append(tokens[accepted])
                accepted += 1
        bonus = self.models.target(sequence.text)
        sequence.text.append(bonus)
        sequence.accepted.append(accepted)
        outcome["slot"], outcome["generation"], outcome["round"] = slot, sequence.generation, sequence.round
        outcome["num_accepted"], outcome["bonus"], outcome["tokens"] = accepted, bonus, tokens
        outcome["num_sent"], outcome["proposal"] = len(sequence.proposal), sequence.kind
        sequence.round += 1

    def _take(self, slots: NDArray[np.int64], proposals: Proposals) -> None:
        for row, slot in enumerate(slots.tolist()):
            sequence, depth = self.sequences[slot], int(proposals.depth[row])
            if depth < 0:  # the deadline has passed
                sequence.proposal, sequence.kind = [], ProposalKind.EMPTY
                continue
            chain = proposals.tokens[row, :depth].tolist()
            room = max(0, min(self.lookahead, self.context - len(sequence.text)))
            if not self.foreign_backups or proposals.kind[row] == ProposalKind.HIT:
                assert chain == self.models.continuation(sequence.text, depth)
            assert depth == room or (self.unserved_allowed and depth < room)
            self.kinds[ProposalKind(int(proposals.kind[row]))] += 1
            sequence.kind = ProposalKind(int(proposals.kind[row]))
            sequence.proposal = chain
            if self.rng.random() < self.drop_probability:
                sequence.proposal, sequence.kind = [], ProposalKind.EMPTY


@dataclass
class Loop:
    """Speculator, draft and any number of verifiers in one thread."""

    speculator: Speculator
    draft: TabularDraft
    models: Models
    rng: np.random.Generator
    verifiers: list[ScriptedVerifier] = field(default_factory=list)

    @classmethod
    def build(
        cls,
        seed: int = 0,
        *,
        lookahead: int = 4,
        fan_out: int | str | Sequence[int] = 3,
        max_sequences: int = 8,
        context: int = 256,
        chunk: int = 64,
        max_total_tokens: int | None = None,
        disagreement: float = 0.35,
        backup: str = "primary",
        adapt_depth: bool = False,
        rest: bool = False,
        **settings: Any,
    ) -> Loop:
        written = fan_out if isinstance(fan_out, int | str) else tuple(fan_out)
        options = PlannerSettings(fan_out=written, backup=backup, adapt_depth=adapt_depth, rest=rest, **settings)
        planner = Planner(options, lookahead, VOCAB)
        draft = TabularDraft(
            max_sequences,
            planner.num_outcomes,
            lookahead,
            context,
            vocab_size=VOCAB,
            seed=seed,
            max_total_tokens=max_total_tokens,
        )
        speculator = Speculator(draft, planner, prefill_chunk=chunk)
        return cls(speculator, draft, Models(draft, disagreement), np.random.default_rng(seed))

    def drive(self) -> bool:
        self.speculator.poll()
        return self.speculator.advance()

    def settle(self) -> None:
        """Run the speculator until it has nothing to do."""
        for _ in range(100_000):
            if not self.drive() and not self.speculator.pending():
                return
        raise AssertionError("the speculator never comes to rest")

    def connect(self, make: MakeChannels = local_channels) -> ScriptedVerifier:
        shape = TableShape(8, self.speculator.planner.num_outcomes, self.draft.lookahead)
        number = len(self.verifiers)
        ours, theirs = make(shape, 1000 + number)
        self.speculator.attach(Verifier(number, 1000 + number, f"scripted-{number}", shape, ours))
        verifier = ScriptedVerifier(theirs, self.models, self.rng, self.drive, self.draft.context_length)
        self.verifiers.append(verifier)
        return verifier

    def prompt(self, low: int = 1, high: int = 60) -> list[int]:
        return self.rng.integers(0, VOCAB, int(self.rng.integers(low, high))).tolist()
