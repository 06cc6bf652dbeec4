"""Tests that take `uri` run on a directory store and on SQLite, both engines each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from storage_engine.explore import server
from storage_engine.maintenance import doctor
from tests.cli.support import fill


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
    fill(place.uri, place.engine)
    return place.uri


@pytest.fixture
def nothing_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For lines of all commands: a file to import, no Java that is started, no page that is served
    for ever."""
    monkeypatch.setattr(doctor, "_java", lambda: (17, "java"))
    monkeypatch.setattr(server, "serve", lambda *_args, **_options: True)
    (tmp_path / "in.jsonl").write_text('{"type":"Customer","key":"c9","fields":{"name":"Zed"}}\n')
