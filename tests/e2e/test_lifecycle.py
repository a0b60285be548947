"""The embedded service lives exactly as long as its server, however that ends, and comes back when it dies before."""

from __future__ import annotations

import signal

import pytest

from tests.support.answers import greedy
from tests.support.pool import Oracle, SSDServer
from tests.support.processes import children, wait_until

END_WITHIN_S = 20.0
BACK_WITHIN_S = 90.0

pytestmark = [pytest.mark.e2e, pytest.mark.last]


def embedded_service(server: SSDServer) -> int | None:
    """Process id of the server's own speculator service."""
    found = [pid for pid, command in children(server.process.pid).items() if "speculator_service" in command]
    return found[0] if found else None


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ssd", ["sync"], indirect=True)
def test_killed_embedded_service_comes_back(ssd: SSDServer, oracle: Oracle, prompts: list[str]) -> None:
    """No token changes, and later speculation works again."""
    first = embedded_service(ssd)
    assert first is not None
    payload = greedy(prompts[0], 64)
    stream = ssd.stream(payload)
    next(stream)
    ssd.process.signal_descendant(first, signal.SIGKILL)
    *_, last = stream
    assert last["output_ids"] == list(oracle(payload).ids)
    oracle.assert_same(ssd, [greedy(prompt, 40) for prompt in prompts[1:5]])

    wait_until(lambda: embedded_service(ssd) not in (None, first), BACK_WITHIN_S, ssd.process.log_end)
    ssd.wait_connected(within_s=BACK_WITHIN_S)
    answers = oracle.assert_same(ssd, [greedy(prompt, 40) for prompt in prompts[1:5]])
    assert sum(len(a.ids) for a in answers) > 1.5 * sum(a.rounds for a in answers)
    assert ssd.service.outcomes("hit", "short_hit") > 0


@pytest.mark.parametrize(
    ("ssd", "way"),
    [("sync", signal.SIGTERM), ("overlap", signal.SIGINT), ("sync-retract", signal.SIGKILL)],
    indirect=["ssd"],
    ids=["SIGTERM", "Ctrl-C", "SIGKILL"],
)
def test_service_ends_with_its_server(ssd: SSDServer, prompts: list[str], way: signal.Signals) -> None:
    """In the middle of a generation: every process ends, and (as after every test) no shared memory is left."""
    stream = ssd.stream(greedy(prompts[0], 800, ignore_eos=True))
    next(stream)
    assert embedded_service(ssd) is not None
    if way == signal.SIGINT:
        ssd.process.signal_group(way)  # a terminal sends it to all
    else:
        ssd.process.signal(way)
    stream.close()
    wait_until(ssd.process.is_gone, END_WITHIN_S, lambda: f"still there: {ssd.process.group()}")
