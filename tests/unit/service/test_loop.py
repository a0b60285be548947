from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from speculator_service.draft.tabular import TabularDraft
from speculator_service.loop import ModelLoop
from speculator_service.planner import Planner, PlannerSettings
from speculator_service.sessions import Verifier
from speculator_service.speculator import Speculator
from ssd_proto.channels.shm import ShmSpeculatorChannel, ShmVerifierChannel
from ssd_proto.channels.zmq import ZmqHub
from ssd_proto.doorbell import Doorbell
from ssd_proto.records import outcome_dtype
from ssd_proto.table import TableShape

LOOKAHEAD = 3


class Parts:
    def __init__(self, spin_s: float = 0.0) -> None:
        self.draft = TabularDraft(4, 4 * (LOOKAHEAD + 1), LOOKAHEAD, 128)
        settings = PlannerSettings(fan_out=2, backup="primary", adapt_depth=False)
        self.speculator = Speculator(self.draft, Planner(settings, LOOKAHEAD, self.draft.vocab_size))
        self.doorbell = Doorbell()
        self.hub = ZmqHub("tcp://127.0.0.1:0")
        self.loop = ModelLoop(self.speculator, self.hub, self.doorbell, spin_s)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            self.error = error

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(10.0)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.loop.stop()
        if self._thread.ident is not None:
            self.join()
        for verifier in self.speculator.verifiers:
            self.speculator.detach(verifier)
        self.loop.close()
        self.hub.close()
        self.doorbell.close()


@contextmanager
def parts() -> Iterator[Parts]:
    made = Parts()
    try:
        yield made
    finally:
        made.close()


def test_calls_run_in_the_model_thread_and_give_results_or_errors() -> None:
    with parts() as made:
        made.start()
        assert made.loop.call(threading.get_ident).result(5.0) != threading.get_ident()

        def fail() -> None:
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            made.loop.call(fail).result(5.0)
        assert made.loop.call(lambda: 7).result(5.0) == 7
        assert made.loop.beat_age < 5.0
    assert made.error is None


def test_error_of_the_engine_ends_the_loop() -> None:
    with parts() as made:

        def poll() -> bool:
            raise RuntimeError("the device is gone")

        made.speculator.poll = poll  # type: ignore[method-assign]
        made.start()
        made.join()
        assert "the device is gone" in str(made.error)


def test_error_of_another_thread_ends_the_loop() -> None:
    with parts() as made:
        made.start()
        made.loop.fail(ValueError("the other"))
        made.join()
        assert isinstance(made.error, RuntimeError)
        assert isinstance(made.error.__cause__, ValueError)


def test_error_of_a_posted_call_ends_the_loop() -> None:
    with parts() as made:

        def fail() -> None:
            raise ValueError("posted")

        made.start()
        made.loop.post(fail)
        made.join()
        assert isinstance(made.error, ValueError)


def test_posts_wake_a_sleeping_loop() -> None:
    with parts() as made:
        shape = TableShape(4, made.speculator.planner.num_outcomes, LOOKAHEAD)
        made.start()

        def attach() -> ShmSpeculatorChannel:
            channel = ShmSpeculatorChannel.create(shape, 5, made.doorbell.address)
            made.speculator.attach(Verifier(0, 5, "test", shape, channel))
            return channel

        channel = made.loop.call(attach).result(5.0)
        theirs = ShmVerifierChannel.attach(channel.address, shape, 5, made.doorbell.address)
        theirs.open_sequence(1, 1, np.arange(6))
        text = list(range(6))
        for round_ in range(20):
            time.sleep(0.01)  # asleep by now
            outcomes = np.zeros(1, outcome_dtype(LOOKAHEAD))
            outcomes["slot"], outcomes["generation"], outcomes["round"] = 1, 1, round_
            outcomes["bonus"] = bonus = round_ % 7
            text.append(bonus)
            theirs.post(outcomes)
            proposals = theirs.wait(outcomes, theirs.lookup(outcomes), 5.0)
            assert proposals.depth[0] == LOOKAHEAD
            for token in proposals.tokens[0].tolist():
                assert token == int(made.draft.next_logits(text).argmax())
                text.append(token)
            del text[-LOOKAHEAD:]
        assert theirs.last_beat() > 0.0
        theirs.close()
    assert made.error is None
