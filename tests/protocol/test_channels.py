"""The conformance suite, bound to every kind of channel."""

from __future__ import annotations

from collections.abc import Iterator

import conformance
import pytest
from links import Link, channel_names, make_link

from ssd_proto.channels import CHANNEL_KINDS

pytestmark = pytest.mark.filterwarnings("error")
kinds = pytest.mark.parametrize("kind", CHANNEL_KINDS)


@pytest.fixture(params=CHANNEL_KINDS)
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    link = make_link(request.param)
    assert not channel_names(), "the name is gone once both ends are mapped"
    yield link
    link.close()
    link.close()
    assert not channel_names()


def test_order(link: Link) -> None:
    conformance.check_order(link)


def test_batch_sizes(link: Link) -> None:
    conformance.check_batch_sizes(link)


def test_big_prompt(link: Link) -> None:
    conformance.check_big_prompt(link)


@kinds
def test_many_records(kind: str) -> None:
    conformance.check_many_records(kind)


def test_back_pressure(link: Link) -> None:
    conformance.check_back_pressure(link)


def test_table(link: Link) -> None:
    conformance.check_table(link)


def test_sampled_table(link: Link) -> None:
    conformance.check_sampled_table(link)


@kinds
def test_other_incarnation(kind: str) -> None:
    conformance.check_other_incarnation(kind)


def test_lookup_and_wait(link: Link) -> None:
    conformance.check_lookup_and_wait(link)


def test_short_entries(link: Link) -> None:
    conformance.check_short_entries(link)


def test_accepted_padding(link: Link) -> None:
    conformance.check_accepted_padding(link)


def test_wait_ends(link: Link) -> None:
    conformance.check_wait_ends(link)


def test_beat(link: Link) -> None:
    conformance.check_beat(link)


def test_close(link: Link) -> None:
    conformance.check_close(link)
