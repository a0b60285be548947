"""Sampled text has the target's law, whatever the speculator does: texts of real servers beside the exact law.

`tests/support/text_law.py` says how they are compared, `tests/statistical/test_text_law.py` that wrong rules are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from signal import SIGKILL
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.answers import Answer, Payload, greedy
from tests.support.external import ExternalPair
from tests.support.pool import DEADLINE_MS, ServerPool
from tests.support.processes import wait_until
from tests.support.service import Service
from tests.support.sglang_server import SGLangServer, total
from tests.support.text_law import LIMIT, Comparison, Filtering, TinyPair, openings

NUM_TOKENS = 32
NUM_TEXTS = {1: 32, 4: 64, 8: 128}
"""By batch size."""
LEAST_EXERCISED = 20
AUTOMATIC = ("--fan-out", "auto", "--downweight", "auto", "--no-rest")
"""Flags of a service that changes depth, fan-out, backup and C as it measures."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


class Case(NamedTuple):
    """How texts are drawn."""

    backup: str
    downweight: float
    filtering: Filtering
    batch_size: int

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the service."""
        return ("--backup", self.backup, "--downweight", f"{self.downweight:g}", "--no-adapt-depth", "--no-rest")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def law() -> TinyPair:
    """What the texts are compared with."""
    return TinyPair()


@pytest.fixture(scope="module")
def pairs(pool: ServerPool) -> Iterator[Callable[..., ExternalPair]]:
    """The server with this K and this verification; the one before it is ended."""
    pool.end_ssd()
    running: dict[tuple[int, str], ExternalPair] = {}

    def pair_of(lookahead: int, verification: str = "ratio") -> ExternalPair:
        key = lookahead, verification
        if key not in running:
            while running:
                running.popitem()[1].end()
            options = {"deadline_ms": DEADLINE_MS, "verification": verification}
            running[key] = ExternalPair(f"ssd-{verification}-{lookahead}", lookahead, options, pool.logs)
        return running[key]

    yield pair_of
    while running:
        running.popitem()[1].end()


def sampled(prompt: list[int], filtering: Filtering, **sampling: Any) -> Payload:
    return greedy(prompt, NUM_TOKENS, **filtering._asdict(), ignore_eos=True, **sampling)


def draw(server: SGLangServer, filtering: Filtering, batch_size: int) -> list[Answer]:
    """`NUM_TEXTS` texts after as many `openings`, so many requests at once."""
    payloads = [sampled(prompt, filtering) for prompt in openings(NUM_TEXTS[batch_size])]
    return server.generate_all(payloads, concurrency=batch_size)


def compare(law: TinyPair, answers: Sequence[Answer], filtering: Filtering, downweight: float = 1.0) -> Comparison:
    return law.compare(openings(len(answers)), [answer.ids for answer in answers], filtering, downweight)


def assert_law(law: TinyPair, answers: Sequence[Answer], filtering: Filtering, downweight: float = 1.0) -> Comparison:
    """The texts after `openings` follow the target's law."""
    comparison = compare(law, answers, filtering, downweight)
    assert comparison.deviation < LIMIT, (comparison.deviations, comparison.num_impossible)
    return comparison


class Exercised:
    """What a service has done since this was made."""

    def __init__(self, service: Service) -> None:
        self._service, self._before = service, self._counts(service)

    def __call__(self) -> Mapping[str, float]:
        """Hits, misses answered by each backup, and outcomes by the number of accepted tokens."""
        return {name: count - self._before[name] for name, count in self._counts(self._service).items()}

    @staticmethod
    def _counts(service: Service) -> dict[str, float]:
        backups = {name: service.metric("backups_total", f'backup="{name}"') for name in ("primary", "suffix", "empty")}
        accepted = {f"accepted {k}": service.metric("accepted_total", f'k="{k}"') for k in range(5)}
        return {"hit": service.outcomes("hit", "short_hit"), **backups, **accepted}


def assert_batch_size(service: Service, batch_size: int) -> None:
    """As the service saw it: now and then a request ends before the next one has come."""
    assert batch_size / 2 <= service.metric("plan_batch_size") <= batch_size


# -- without speculation --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filtering", [Filtering(1.3, top_k=4), Filtering(top_p=0.8), Filtering(0.6, min_p=0.05)], ids=["k", "p", "min-p"]
)
def test_plain_decoding(plain: SGLangServer, law: TinyPair, filtering: Filtering) -> None:
    """The law that is compared with is that of SGLang; and another one would not do."""
    answers = draw(plain, filtering, 4)
    assert_law(law, answers, filtering)
    assert compare(law, answers, filtering._replace(temperature=1.8 * filtering.temperature)).deviation > 8


# -- with speculation -----------------------------------------------------------------------------------------

CASES = [
    Case("primary", 1.0, Filtering(1.0), 8),
    Case("primary", 1.0, Filtering(0.6, top_p=0.9), 1),
    Case("primary", 0.3, Filtering(1.3, top_k=4), 4),
    Case("suffix", 0.0, Filtering(0.6, top_k=4), 8),
    Case("empty", 0.0, Filtering(1.3, min_p=0.05), 8),
]
"""Every backup, C, filter and batch size; neighbours share a service, whose start takes most of the time."""


def name_of(case: Case) -> str:
    options = {name: value for name, value in case.filtering._asdict().items() if value != Filtering()._asdict()[name]}
    return f"{case.backup}-{case.downweight:g}-{options}-{case.batch_size}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_four_tokens(pairs: Callable[..., ExternalPair], law: TinyPair, case: Case) -> None:
    """K = 4; hits, and this backup alone."""
    pair = pairs(4)
    service = pair.service(*case.flags)
    exercised = Exercised(service)
    answers = draw(pair.server, case.filtering, case.batch_size)
    assert_law(law, answers, case.filtering, case.downweight)
    counts = exercised()
    assert counts["hit"] > LEAST_EXERCISED
    assert [name for name in ("primary", "suffix", "empty") if counts[name] > LEAST_EXERCISED] == [case.backup]
    assert sum(counts[f"accepted {k}"] for k in range(1, 5)) > LEAST_EXERCISED
    assert_batch_size(service, case.batch_size)
    service.assert_empty()


def test_everything_automatic(pairs: Callable[..., ExternalPair], law: TinyPair) -> None:
    """Whatever is chosen meanwhile, and how far the service speculates."""
    pair = pairs(4)
    service = pair.service(*AUTOMATIC, "--rest")
    exercised = Exercised(service)
    assert_law(law, draw(pair.server, Filtering(1.0, top_k=6), 8), Filtering(1.0, top_k=6))
    assert exercised()["hit"] > LEAST_EXERCISED
    service.assert_empty()


def test_beside_other_requests(pairs: Callable[..., ExternalPair], law: TinyPair) -> None:
    """Penalised, constrained, seeded and greedy ones in the same batches."""
    pair, filtering = pairs(4), Filtering(1.0, top_k=12)
    service = pair.service(*AUTOMATIC)
    payloads = []
    for index, prompt in enumerate(openings(NUM_TEXTS[4])):
        other = [
            sampled(prompt, filtering, frequency_penalty=1.0, repetition_penalty=1.3),
            greedy(prompt, NUM_TOKENS, temperature=1.3, regex="[a-z ]{40,80}"),
            sampled(prompt, filtering, sampling_seed=index),
            greedy(prompt, NUM_TOKENS),
        ]
        payloads += [sampled(prompt, filtering), other[index % len(other)]]
    answers = pair.server.generate_all(payloads, concurrency=8)
    assert_law(law, answers[::2], filtering)
    assert all(set(answer.text) <= set("abcdefghijklmnopqrstuvwxyz ") for answer in answers[3::8])
    service.assert_empty()


# -- seeds ----------------------------------------------------------------------------------------------------

SEEDED = [
    sampled(prompt, filtering, sampling_seed=seed)
    for seed, (prompt, filtering) in enumerate(
        zip(
            openings(4),
            [Filtering(1.3), Filtering(top_k=4), Filtering(0.6, top_p=0.9), Filtering(min_p=0.1)],
            strict=True,
        )
    )
]


def alone(server: SGLangServer) -> list[tuple[int, ...]]:
    return [answer.ids for answer in server.generate_all(SEEDED, concurrency=1)]


@pytest.fixture(scope="module")
def seeded(pairs: Callable[..., ExternalPair]) -> list[tuple[int, ...]]:
    """The texts of `SEEDED`."""
    pair = pairs(4)
    pair.service(*AUTOMATIC)
    return alone(pair.server)


def test_seeds_in_a_mixed_batch(pairs: Callable[..., ExternalPair], seeded: list[tuple[int, ...]]) -> None:
    """Their texts are those they have alone."""
    pair = pairs(4)
    others = [sampled(prompt, Filtering(1.3, top_k=20)) for prompt in openings(8)]
    answers = pair.server.generate_all([*SEEDED, *others, *SEEDED], concurrency=16)
    assert [answer.ids for answer in answers[: len(SEEDED)]] == seeded
    assert [answer.ids for answer in answers[-len(SEEDED) :]] == seeded
    assert len(set(seeded)) == len(SEEDED)


def test_seeds_draw_by_the_law(pairs: Callable[..., ExternalPair], law: TinyPair) -> None:
    """Texts of many seeds, with drafts drawn by the same noise."""
    pair, filtering = pairs(4), Filtering(1.0, top_p=0.9)
    pair.service(*AUTOMATIC)
    prompts = openings(NUM_TEXTS[4])
    payloads = [sampled(prompt, filtering, sampling_seed=seed) for seed, prompt in enumerate(prompts)]
    assert_law(law, pair.server.generate_all(payloads, concurrency=8), filtering)


# -- a service that dies --------------------------------------------------------------------------------------


def test_killed_while_texts_are_drawn(
    pairs: Callable[..., ExternalPair], law: TinyPair, seeded: list[tuple[int, ...]]
) -> None:
    """By the law before, meanwhile and after; and seeds draw the same texts as ever."""
    pair, filtering = pairs(4), Filtering(1.0, top_k=4)
    service = pair.service(*AUTOMATIC)
    before = service.outcomes()
    with ThreadPoolExecutor(1) as pool:
        drawing = pool.submit(draw, pair.server, filtering, 8)
        wait_until(lambda: service.outcomes() > before + 200, 120, pair.server.process.log_end)
        service.process.signal(SIGKILL)
        assert not drawing.done()
        answers = drawing.result()
    assert_law(law, answers, filtering)
    pair.end_service()
    proposed = total(pair.server.metrics(), "sglang_ssd:proposed_tokens_total")
    assert_law(law, draw(pair.server, filtering, 4), filtering)
    assert total(pair.server.metrics(), "sglang_ssd:proposed_tokens_total") == proposed
    assert alone(pair.server) == seeded


# -- other servers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [Case("primary", 1.0, Filtering(1.0, top_k=4), 8), Case("primary", 1.0, Filtering(1.3), 1)], ids=name_of
)
def test_one_token(pairs: Callable[..., ExternalPair], law: TinyPair, case: Case) -> None:
    """K = 1, where the share of accepted drafts is the overlap of p and q: they are verified with their q."""
    pair = pairs(1)
    service = pair.service(*case.flags)
    exercised = Exercised(service)
    answers = draw(pair.server, case.filtering, case.batch_size)
    comparison = assert_law(law, answers, case.filtering)
    counts = exercised()
    assert min(counts["hit"], counts["primary"]) > LEAST_EXERCISED
    share = counts["accepted 1"] / (counts["accepted 0"] + counts["accepted 1"])
    assert share == pytest.approx(comparison.overlap, abs=0.1)
    assert comparison.coincidence < comparison.overlap - 0.2
    assert_batch_size(service, case.batch_size)


def test_one_token_down_weighted(pairs: Callable[..., ExternalPair], law: TinyPair) -> None:
    case = Case("empty", 0.3, Filtering(0.6, min_p=0.05), 4)
    pair = pairs(1)
    service = pair.service(*case.flags)
    exercised = Exercised(service)
    assert_law(law, draw(pair.server, case.filtering, case.batch_size), case.filtering, case.downweight)
    assert min(exercised()["hit"], exercised()["empty"]) > LEAST_EXERCISED


def test_seeds_do_not_depend_on_the_lookahead(
    pairs: Callable[..., ExternalPair], seeded: list[tuple[int, ...]]
) -> None:
    assert alone(pairs(1).server) == seeded


def test_shared_noise(pairs: Callable[..., ExternalPair], law: TinyPair, seeded: list[tuple[int, ...]]) -> None:
    """Requests without seeds get one each; those with seeds draw the same texts as ever."""
    pair, filtering = pairs(4, "shared_noise"), Filtering(1.0, min_p=0.02)
    service = pair.service("--backup", "primary", "--no-adapt-depth", "--no-rest")
    exercised = Exercised(service)
    answers = draw(pair.server, filtering, 8)
    assert_law(law, answers, filtering)
    assert len({answer.ids for answer in answers}) == len(answers)
    counts = exercised()
    assert min(counts["hit"], counts["primary"]) > LEAST_EXERCISED
    assert sum(counts[f"accepted {k}"] for k in range(2, 5)) > LEAST_EXERCISED
    assert alone(pair.server) == seeded
