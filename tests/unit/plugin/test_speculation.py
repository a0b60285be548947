"""The verifier's half of a round, against a speculator end that the test scripts."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ssd_proto.errors import ProtocolError
from ssd_proto.records import (
    CloseSequence,
    DraftProbs,
    Entries,
    OpenSequence,
    ProposalKind,
    Sampling,
    outcome_keys,
    pack_probs,
    unpack_probs,
)

from .conftest import SHAPE, FakeRequest, Pair, drain, params, prefilled, slots, verified

REQUEST = FakeRequest("a", [1, 2, 3])


def start(pair: Pair, slot: int = 2, bonus: int = 9, request: FakeRequest = REQUEST):
    """Connect, open a sequence and hand over its first token; returns the speculator end and the generation."""
    speculator = pair.connect()
    pair.speculation.open(slots(slot), [request])
    pair.speculation.outcome(prefilled(slot, len(request.origin_input_ids), bonus))
    opened, outcomes = drain(speculator)
    assert isinstance(opened, OpenSequence)
    assert opened.tokens.tolist() == request.origin_input_ids
    assert (outcomes["round"][0], outcomes["num_accepted"][0], outcomes["bonus"][0]) == (0, 0, bonus)
    return speculator, opened.generation


def write(speculator, slot: int, generation: int, round_: int, column: int, key, tokens, depth=None, q=None) -> None:
    depth = len(tokens) if depth is None else depth
    place = slots(slot), slots(generation), slots(round_), slots(column)
    probs = None if q is None else DraftProbs(slots(0), q[None])
    speculator.write(Entries(*place, key, slots(depth), np.array([True]), np.array([tokens]), probs))


def publish(speculator, slot: int, generation: int, round_: int, k: int, bonus: int, tokens: list[int], q=None) -> None:
    key = outcome_keys(slots(k), slots(bonus))
    keys = np.full((1, 4), -1)
    keys[0, 1] = key[0]
    speculator.begin(slots(slot), slots(round_), keys)
    write(speculator, slot, generation, round_, 1, key, tokens, q=q)


def drafts(pair: Pair, slot: int, request: FakeRequest) -> list[list[int]]:
    return pair.speculation.speculate(slots(slot), [request])[0].tolist()


def test_a_published_outcome_is_a_hit_without_waiting(pair: Pair) -> None:
    speculator, generation = start(pair)
    publish(speculator, 2, generation, 0, 0, 9, [10, 11, 12])
    assert drafts(pair, 2, REQUEST) == [[10, 11, 12]]
    assert pair.value("sglang_ssd:proposals_total", kind="hit") == 1

    pair.speculation.outcome(verified(2, 2, 40))
    (outcomes,) = drain(speculator)
    row = outcomes[0]
    assert (row["round"], row["num_accepted"], row["bonus"], row["num_sent"]) == (1, 2, 40, 3)
    assert row["tokens"].tolist() == [10, 11, 12]
    assert row["proposal"] == ProposalKind.HIT


def test_a_missing_outcome_waits_for_the_reply(pair: Pair) -> None:
    speculator, generation = start(pair)
    key = outcome_keys(slots(0), slots(9))
    write(speculator, 2, generation, 0, SHAPE.num_outcomes, key, [7, 8, 0], depth=2)
    assert drafts(pair, 2, REQUEST) == [[7, 8, 9]], "two tokens of the reply, then padding with the bonus token"
    pair.speculation.outcome(verified(2, 0, 5))
    (outcomes,) = drain(speculator)
    assert (outcomes[0]["num_sent"], outcomes[0]["proposal"]) == (2, ProposalKind.BACKUP)


def test_narrow_rounds_are_as_long_as_their_longest_speculation() -> None:
    narrow = Pair(is_narrow=True)
    try:
        speculator, generation = start(narrow)
        q = words([(7, 0.5), (9, 0.5)], [(8, 1.0), (0, 0.0)], [(0, 0.0), (0, 0.0)])
        key = outcome_keys(slots(0), slots(9))
        write(speculator, 2, generation, 0, SHAPE.num_outcomes, key, [7, 8, 0], depth=2, q=q)
        found, probs = narrow.speculation.speculate(slots(2), [REQUEST])
        assert found.tolist() == [[7, 8]]
        assert probs is not None
        assert probs.shape[:2] == (1, 2)
        narrow.speculation.outcome(verified(2, 2, 5))
        (outcomes,) = drain(speculator)
        assert (outcomes[0]["num_sent"], outcomes[0]["num_accepted"]) == (2, 2)
        assert narrow.speculation.speculate(slots(2), [REQUEST])[0].shape == (1, 0), "silence: as in plain decoding"
    finally:
        narrow.close()


def test_silence_costs_one_deadline_and_then_nothing(pair: Pair) -> None:
    speculator, generation = start(pair)
    began = time.monotonic()
    assert drafts(pair, 2, REQUEST) == [[9, 9, 9]]
    assert 0.04 < time.monotonic() - began < 1.0
    pair.speculation.outcome(verified(2, 0, 6))
    began = time.monotonic()
    for _ in range(20):
        pair.speculation.speculate(slots(2), [REQUEST])
        pair.speculation.outcome(verified(2, 0, 6))
    assert time.monotonic() - began < 0.05, "a suspect speculator is not waited for"
    assert pair.value("sglang_ssd:deadlines_missed_total") == 21

    round_ = int(drain(speculator)[-1][0]["round"])
    publish(speculator, 2, generation, round_, 0, 6, [1, 2, 3])
    assert drafts(pair, 2, REQUEST) == [[1, 2, 3]], "it answered: trusted again"


def test_an_answer_to_another_generation_or_round_is_not_used(pair: Pair) -> None:
    speculator, generation = start(pair)
    publish(speculator, 2, generation + 1, 0, 0, 9, [10, 11, 12])
    publish(speculator, 2, generation, 1, 0, 9, [20, 21, 22])
    assert drafts(pair, 2, REQUEST) == [[9, 9, 9]]


def test_tokens_that_the_target_does_not_have_become_padding(pair: Pair) -> None:
    speculator, generation = start(pair)
    publish(speculator, 2, generation, 0, 0, 9, [10, 100, 12])
    assert drafts(pair, 2, REQUEST) == [[10, 9, 12]]


def test_a_later_chunk_of_a_prompt_does_not_open_it_again(pair: Pair) -> None:
    speculator = pair.connect()
    for _ in range(3):
        pair.speculation.open(slots(4), [REQUEST])
    assert len(drain(speculator)) == 1


def test_a_freed_slot_is_closed_once_and_may_be_opened_again(pair: Pair) -> None:
    speculator, generation = start(pair)
    pair.speculation.close([2])
    pair.speculation.close([2, 5])
    pair.speculation.outcome(verified(2, 1, 5))  # a round that was running when the request ended
    assert drain(speculator) == [CloseSequence(2, generation)]
    pair.speculation.open(slots(2), [FakeRequest("b", [5])])
    (opened,) = drain(speculator)
    assert isinstance(opened, OpenSequence)
    assert opened.generation != generation


def test_without_a_speculator_decoding_is_plain(pair: Pair) -> None:
    pair.speculation.open(slots(2), [REQUEST])
    pair.speculation.outcome(prefilled(2, 3, 9))
    assert drafts(pair, 2, REQUEST) == [[9, 9, 9]]


@pytest.mark.parametrize("is_overlapped", [False, True], ids=["synchronous", "overlapped"])
def test_a_new_speculator_gets_all_that_is_committed(pair: Pair, is_overlapped: bool) -> None:
    request = FakeRequest("a", [1, 2, 3])
    speculator, generation = start(pair, request=request)
    publish(speculator, 2, generation, 0, 0, 9, [10, 11, 12])
    pair.speculation.speculate(slots(2), [request])
    pair.speculation.outcome(verified(2, 2, 40))
    request.output_ids = [9] if is_overlapped else [9, 10, 11, 40]

    pair.connections[0].lost = True
    second = pair.connect()
    pair.speculation.speculate(slots(2), [request])
    opened, outcomes = drain(second)
    assert opened.tokens.tolist() == [1, 2, 3, 9, 10, 11]
    assert (outcomes[0]["round"], outcomes[0]["bonus"], outcomes[0]["num_accepted"]) == (0, 40, 0)
    assert opened.generation == outcomes[0]["generation"] != generation


def test_a_full_channel_ends_the_connection_and_loses_no_request(pair: Pair) -> None:
    pair.connect(ring_bytes=1024)
    requests = [FakeRequest(str(slot), list(range(60))) for slot in range(6)]
    pair.speculation.open(slots(*range(6)), requests)
    assert pair.client.given_up == pair.connections[:1]
    for slot in range(6):
        pair.speculation.outcome(prefilled(slot, 60, 9))
        requests[slot].output_ids = [9]
    assert (pair.speculation.speculate(slots(*range(6)), requests)[0] == 9).all()

    second = pair.connect()
    pair.speculation.speculate(slots(*range(6)), requests)
    *opened, outcomes = drain(second)
    assert [event.slot for event in opened] == list(range(6))
    assert outcomes["bonus"].tolist() == [9] * 6


def test_a_close_that_cannot_be_posted_leaves_nothing_open(pair: Pair) -> None:
    start(pair)
    pair.connections[0].channel.close()
    pair.speculation.close([2])
    assert not pair.sessions.is_open.any()
    assert pair.client.given_up == pair.connections
    assert pair.sessions.track(2, REQUEST.rid), "the slot is free for the next request, even of the same id"


def test_a_damaged_channel_does_not_end_the_scheduler(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    start(pair)

    def damaged(*_: object) -> None:
        raise ProtocolError("the ring is damaged")

    for name in ("post", "open_sequence", "close_sequence", "lookup"):
        monkeypatch.setattr(pair.connections[-1].channel, name, damaged)
        pair.speculation.open(slots(3), [FakeRequest(name, [1])])
        pair.speculation.outcome(verified(2, 0, 6))
        pair.speculation.speculate(slots(2), [FakeRequest("a", [1, 2, 3], [9, 6])])
        pair.speculation.close([2, 3])
        assert pair.client.given_up[-1] is pair.connections[-1]
        monkeypatch.undo()
        start(pair)


def test_a_sign_of_life_restores_trust(pair: Pair) -> None:
    speculator, _generation = start(pair)
    pair.speculation.speculate(slots(2), [REQUEST])  # the deadline passes
    pair.speculation.outcome(verified(2, 0, 6))
    began = time.monotonic()
    pair.speculation.speculate(slots(2), [REQUEST])
    assert time.monotonic() - began < 0.01
    time.sleep(0.01)
    speculator.beat()
    pair.speculation.outcome(verified(2, 0, 6))
    began = time.monotonic()
    pair.speculation.speculate(slots(2), [REQUEST])
    assert 0.01 < time.monotonic() - began < 0.04, "waited for again, with less patience"


def test_a_slow_speculator_is_waited_for_less_and_less_until_it_answers(pair: Pair) -> None:
    speculator, generation = start(pair)
    waits = []
    for _ in range(12):
        speculator.beat()
        began = time.monotonic()
        pair.speculation.speculate(slots(2), [REQUEST])
        waits.append(time.monotonic() - began)
        time.sleep(0.001)
        pair.speculation.outcome(verified(2, 0, 6))
    assert sum(waits) < 0.15, "about twice the deadline of 50 ms, and little more for each further round"
    for round_ in range(12, 20):
        publish(speculator, 2, generation, round_, 0, 6, [1, 2, 3])
        pair.speculation.speculate(slots(2), [REQUEST])
        pair.speculation.outcome(verified(2, 0, 6))
    began = time.monotonic()
    pair.speculation.speculate(slots(2), [REQUEST])
    assert time.monotonic() - began > 0.04, "the whole deadline again"


def test_outputs_include_what_sglang_has_not_processed_yet(pair: Pair) -> None:
    request = FakeRequest("a", [1, 2, 3], [9])
    speculator, generation = start(pair, request=FakeRequest("a", [1, 2, 3]))
    publish(speculator, 2, generation, 0, 0, 9, [10, 11, 12])
    pair.speculation.speculate(slots(2), [request])
    pair.speculation.outcome(verified(2, 2, 40))
    assert pair.speculation.outputs(slots(2), [request]) == [[9, 10, 11, 40]]
    request.output_ids = [9, 10, 11, 40]
    assert pair.speculation.outputs(slots(2), [request]) == [[9, 10, 11, 40]]


SAMPLED = params(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05)


def words(*rows: list[tuple[int, float]]) -> np.ndarray:
    """[K, m] of q from token and probability."""
    ids, probs = np.moveaxis(np.array(rows), -1, 0)
    return pack_probs(ids.astype(np.int64), probs)


def test_q_comes_with_sampled_drafts_and_is_not_posted(pair: Pair) -> None:
    request = FakeRequest("a", [1, 2, 3], sampling_params=SAMPLED)
    speculator, generation = start(pair, request=request)
    sent = words([(10, 0.75), (11, 0.25)], [(11, 1.0), (0, 0.0)], [(5, 0.5), (12, 0.5)])
    publish(speculator, 2, generation, 0, 0, 9, [10, 11, 12], q=sent)
    tokens, q = pair.speculation.speculate(slots(2), [request])
    assert tokens.tolist() == [[10, 11, 12]]
    assert (q == sent).all()
    pair.speculation.outcome(verified(2, 3, 40))
    (outcomes,) = drain(speculator)
    assert set(outcomes.dtype.names) == {
        "slot",
        "generation",
        "round",
        "num_accepted",
        "bonus",
        "proposal",
        "num_sent",
        "tokens",
    }


def test_there_is_no_q_where_nothing_was_sampled(pair: Pair) -> None:
    speculator, generation = start(pair)
    assert pair.speculation.speculate(slots(2), [REQUEST])[1] is None, "nobody answered"
    pair.speculation.outcome(verified(2, 0, 6))
    publish(speculator, 2, generation, 1, 0, 6, [10, 11, 12])
    tokens, q = pair.speculation.speculate(slots(2), [REQUEST])
    assert (tokens.tolist(), q) == ([[10, 11, 12]], None)


def test_counters_show_all_rounds_when_a_sequence_ends(pair: Pair) -> None:
    speculator, generation = start(pair)
    for round_ in range(3):
        publish(speculator, 2, generation, round_, 0, 9, [10, 11, 12])
        pair.speculation.speculate(slots(2), [REQUEST])
        pair.speculation.outcome(verified(2, 0, 9))
    pair.speculation.close([2])
    assert pair.registry.get_sample_value("sglang_ssd:proposals_total", {"kind": "hit"}) == 3
    assert pair.registry.get_sample_value("sglang_ssd:proposed_tokens_total") == 9


def test_padding_has_no_q(pair: Pair) -> None:
    request = FakeRequest("a", [1, 2, 3], sampling_params=SAMPLED)
    speculator, generation = start(pair, request=request)
    sent = words([(10, 0.75), (11, 0.25)], [(11, 1.0), (0, 0.0)], [(9, 0.5), (12, 0.5)])
    write(speculator, 2, generation, 0, SHAPE.num_outcomes, outcome_keys(slots(0), slots(9)), [10, 11, 12], 1, sent)
    tokens, q = pair.speculation.speculate(slots(2), [request])
    assert tokens.tolist() == [[10, 9, 9]]
    assert (q[0, 0] == sent[0]).all()
    assert not q[0, 1:].any(), "the padding token may well have a probability among the words that came"


def test_q_of_tokens_that_the_target_lacks_is_what_it_is_given_that_the_draft_is_none(pair: Pair) -> None:
    request = FakeRequest("a", [1, 2, 3], sampling_params=SAMPLED)
    speculator, generation = start(pair, request=request)
    sent = words([(10, 0.25), (100, 0.75)], [(101, 0.5), (3, 0.5)], [(9, 0.5), (12, 0.5)])
    publish(speculator, 2, generation, 0, 0, 9, [10, 101, 12], q=sent)
    tokens, q = pair.speculation.speculate(slots(2), [request])
    assert tokens.tolist() == [[10, 9, 12]]
    ids, probs = unpack_probs(q)
    assert (ids[0, 0].tolist(), probs[0, 0].tolist()) == ([10, 0], [1.0, 0.0])
    assert not q[0, 1].any()
    assert (q[0, 2] == sent[2]).all()


def test_sequences_are_opened_with_the_sampling_of_their_request(pair: Pair) -> None:
    speculator = pair.connect()
    request = FakeRequest("a", [1], sampling_params=SAMPLED, eos_token_ids={7})
    pair.speculation.open(slots(1, 2), [request, FakeRequest("b", [1])])
    sampled, greedy = (event.sampling for event in drain(speculator))
    assert sampled[:4] == pytest.approx((0.7, 20, 0.9, 0.05))
    assert sampled[5:] == (False, (7,))
    assert greedy == Sampling()

    pair.speculation.outcome(prefilled(1, 1, 9))
    pair.connections[0].lost = True
    second = pair.connect()
    pair.speculation.speculate(slots(1), [request])
    assert drain(second)[0].sampling == sampled, "the same seed again"
    pair.speculation.close([1])
    pair.speculation.open(slots(5), [request])  # retracted, and prefilled in another slot
    assert drain(second)[-1].sampling == sampled
