"""Servers of the end-to-end tests, the order that starts few of them, and what every test must leave behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pool import CONFIGURATIONS, Oracle, ServerPool, SSDServer
from tests.support.service import assert_no_shared_memory, shared_memory
from tests.support.sglang_server import SGLangServer

_ORDER = {name: position for position, name in enumerate(CONFIGURATIONS)}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "last: runs after the other tests of its server, which it may end")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one server configuration run one after the other; those that end the server come last."""

    def position(item: pytest.Item) -> tuple[int, bool]:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        return _ORDER.get(str(parameters.get("ssd")), len(_ORDER)), "last" in item.keywords

    here = Path(__file__).parent
    places = [index for index, item in enumerate(items) if here in item.path.parents]
    for index, item in zip(places, sorted((items[index] for index in places), key=position), strict=True):
        items[index] = item


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """All shared servers."""
    servers = ServerPool(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.end()


@pytest.fixture(scope="session")
def oracle(pool: ServerPool) -> Oracle:
    """What the server without speculation answers."""
    return Oracle(pool)


@pytest.fixture
def plain(pool: ServerPool) -> SGLangServer:
    """The server without speculation."""
    return pool.plain()


@pytest.fixture
def ssd(request: pytest.FixtureRequest, pool: ServerPool) -> SSDServer:
    """The server with SSD in the configuration that the test names as its parameter ``ssd``."""
    return pool.ssd(request.param)


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Texts of 50 to 110 tokens in the manner of what the tiny models were trained on."""
    return json.loads((Path(__file__).parents[1] / "support" / "prompts.json").read_text())


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After the test, the speculator service holds nothing and the system no shared memory."""
    before = shared_memory()
    server = request.getfixturevalue("ssd") if "ssd" in request.fixturenames else None
    yield
    if server is not None and server.process.exit_code is None:
        server.service.assert_empty()
    assert_no_shared_memory(before)
