"""Tests that take `uri` run on a directory store and on SQLite, both engines each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.support import Customer, Employment, Product, commit, create


@dataclass(frozen=True)
class Place:
    """Where a test keeps its storage."""

    backend: str
    engine: str
    uri: str


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the machine, and a folder of its own for `onto.db`."""
    for name in ("STORAGE_URI", "DB", "CONFIG", "LOG_LEVEL"):
        monkeypatch.delenv(f"ONTOLOGIA_{name}", raising=False)
    monkeypatch.chdir(tmp_path)


ENGINES = ["directory-v1", "directory-v2", "sqlite-v1", "sqlite-v2"]


def place_in(folder: Path, name: str) -> Place:
    backend, engine = name.split("-")
    uri = f"sqlite:///{folder}/shop.db" if backend == "sqlite" else f"file://{folder}/shop"
    return Place(backend, engine, uri)


@pytest.fixture(params=ENGINES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_in(tmp_path, request.param)


@pytest.fixture
def uri(place: Place) -> str:
    """A storage with two commits."""
    create(place.uri, place.engine)
    commit(
        place.uri,
        Customer(id="c1", name="Ann"),
        Product(sku="p1"),
        metadata={"source": "crm"},
    )
    commit(
        place.uri,
        Customer(id="c1", name="Anna"),
        Customer(id="c2", name="Bob"),
        Employment(left_key="c1", right_key="p1", stint="2024", role="clerk"),
    )
    return place.uri
