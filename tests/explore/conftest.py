"""A storage like the demo's, filled once for each backend, and clients of its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from storage_engine.cli.explore import read_filters
from storage_engine.config import OntologiaConfig
from storage_engine.explore.access import Access
from storage_engine.explore.app import ExploreApp
from storage_engine.explore.view import Storage
from storage_engine.model import spec_of
from storage_engine.repository import open_repository
from tests.explore import airports
from tests.explore.client import PORT, PageClient

Browse = Callable[..., PageClient]


def browsing() -> Iterator[Browse]:
    """For fixtures of any scope."""
    with ExitStack() as opened:

        def client(
            uri: str,
            *,
            host: str = "127.0.0.1",
            token: str | None = None,
            declared: Sequence[type] = (),
            **settings: Any,
        ) -> PageClient:
            config = OntologiaConfig(**settings)
            repository = open_repository(uri, config)
            opened.callback(repository.close)
            specs = {spec_of(cls).ref: spec_of(cls) for cls in declared}
            storage = Storage(repository, config, read_filters, specs)
            opened.callback(storage.close)
            made = PageClient(ExploreApp(storage, Access(host, PORT, token)), storage)
            opened.callback(made.close)
            return made

        yield client


@pytest.fixture
def browse() -> Iterator[Browse]:
    """Opens storages, and makes clients that see their pages."""
    yield from browsing()


@pytest.fixture(scope="session", params=["directory", "sqlite"])
def air(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Nobody writes to it."""
    uri = airports.uri_in(tmp_path_factory.mktemp(f"air-{request.param}"), request.param)
    airports.fill(uri)
    return uri


@pytest.fixture(scope="session")
def page(air: str) -> Iterator[PageClient]:
    for browse in browsing():
        yield browse(air)
