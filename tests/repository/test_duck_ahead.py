"""DuckDB is opened while the store is asked what to read: nothing else is different by it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from storage_engine.errors import ForkedSessionError
from storage_engine.repository import duck as module
from storage_engine.repository import initialize_storage, open_repository
from storage_engine.repository.duck import Duck
from storage_engine.repository.duck_confined import ConfinedDuck
from tests.engines import CUSTOMER, customer, put


def new_duck() -> Duck:
    return Duck(uri="x", memory_limit="256MB")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Opening begins, and waits to be let go on."""
    begun, let_go = threading.Event(), threading.Event()
    right = Duck._open

    def slow(self: Duck) -> Any:
        begun.set()
        assert let_go.wait(60)
        return right(self)

    monkeypatch.setattr(Duck, "_open", slow)
    return begun, let_go


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


def test_who_needs_it_waits_for_it_and_it_is_opened_once(
    held: tuple[threading.Event, threading.Event],
) -> None:
    begun, let_go = held
    duck = new_duck()
    duck.open_ahead()
    assert begun.wait(60)
    duck.open_ahead()
    user, found = in_thread(lambda: duck.cursor().execute("SELECT 42").fetchall())
    assert user.is_alive()
    let_go.set()
    user.join(60)
    assert found == [[(42,)]]
    assert len(duck._spills) == 1
    duck.close()


def test_closing_waits_and_leaves_nothing_open(
    held: tuple[threading.Event, threading.Event],
) -> None:
    begun, let_go = held
    duck = new_duck()
    duck.open_ahead()
    assert begun.wait(60)
    closer, _ = in_thread(duck.close)
    let_go.set()
    closer.join(60)
    assert not closer.is_alive()
    assert (duck._connection, duck._spills, duck._opener) == (None, [], None)
    assert not [t for t in threading.enumerate() if t.name == "onto-duckdb"]


def test_what_fails_ahead_is_told_to_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("no room")

    monkeypatch.setattr(Duck, "_new_spill", fail)
    duck = new_duck()
    duck.open_ahead()
    with pytest.raises(RuntimeError, match="no room"):
        duck.cursor()
    duck.close()


def test_only_the_packaged_extension_is_loaded_unsigned(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only where no statements of users are run."""

    def settings(duck: Duck) -> tuple[bool, bool]:
        names = ("allow_unsigned_extensions", "autoload_known_extensions")
        with closing(duck), duck.cursor() as cursor:
            [found] = cursor.execute(
                "SELECT " + ", ".join(f"current_setting('{name}')" for name in names)
            ).fetchall()
        return found

    confined = ConfinedDuck(uri="x", memory_limit="256MB")
    assert settings(new_duck()) == (True, False)
    assert settings(confined) == (False, False)
    monkeypatch.setattr(module, "packaged_httpfs", lambda: None)
    assert settings(new_duck()) == (False, True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_waits_for_it(held: tuple[threading.Event, threading.Event]) -> None:
    """A child that came in between would wait for locks that nobody gives back."""
    begun, let_go = held
    duck = new_duck()
    duck.open_ahead()
    assert begun.wait(60)
    threading.Timer(0.05, let_go.set).start()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            own = new_duck()
            own.cursor().execute("SELECT 1")
            try:
                duck.open_ahead()
            except ForkedSessionError:
                status = 0
        finally:
            os._exit(status)
    assert let_go.is_set()
    assert os.waitpid(child, 0)[1] == 0
    duck.close()


def test_only_reads_open_it(tmp_path: Path) -> None:
    uri = str(tmp_path / "store")
    initialize_storage(uri)
    repository: Any = open_repository(uri)

    def is_opened() -> bool:
        return repository.duck._opener is not None

    with closing(repository):
        put(repository, customer("a"))
        assert not is_opened()
        assert repository.read(CUSTOMER).num_rows == 1
        assert is_opened()
    assert repository.duck._connection is None
