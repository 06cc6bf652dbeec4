"""`onto lock`: show and break."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_engine import initialize_storage
from storage_engine.commitlog import layout
from storage_engine.commitlog.lock import WriteLock
from storage_engine.objectstore.open import open_store
from tests.cli.support import Customer, commit, onto


@pytest.fixture
def uri(tmp_path: Path) -> str:
    uri = f"file://{tmp_path}/store"
    initialize_storage(uri)
    return uri


def take(uri: str) -> str:
    store = open_store(uri)
    lock = WriteLock(store, owner_id="stuck", lease_ttl_ms=10**9, timeout_ms=0, keep_alive=False)
    lease = lock.acquire()
    store.close()
    return lease.token


def test_a_free_lock(uri: str) -> None:
    assert "Nobody holds" in onto("lock", "show", "--storage-uri", uri).out
    assert onto("lock", "show", "--storage-uri", uri, "--json").json == {
        "lock": None,
        "problem": None,
        "waiting": [],
    }
    for confirmed in (["--yes"], []):  # nobody is asked about what cannot be done
        refused = onto("lock", "break", "--storage-uri", uri, "--token", "t", *confirmed)
        assert refused.code == 4
        assert "nobody holds" in refused.error()


def test_show_and_break(uri: str) -> None:
    token = take(uri)
    shown = onto("lock", "show", "--storage-uri", uri)
    assert token in shown.out
    assert "stuck" in shown.out
    assert onto("lock", "show", "--storage-uri", uri, "--json").json["lock"]["token"] == token

    refused = onto("lock", "break", "--storage-uri", uri, "--yes")
    assert refused.code == 2
    assert "--token" in refused.error()
    for confirmed in (["--yes"], []):
        refused = onto("lock", "break", "--storage-uri", uri, "--token", "other", *confirmed)
        assert refused.code == 4
        assert "another token" in refused.error()
    refused = onto("lock", "break", "--storage-uri", uri, "--token", token)
    assert refused.code == 2
    assert "--yes" in refused.error()

    broken = onto("lock", "break", "--storage-uri", uri, "--token", token, "--yes", "--json")
    assert broken.code == 0
    assert broken.json["lock"]["token"] == token
    commit(uri, Customer(id="c", name="C"))


def test_an_unreadable_lock_is_shown_and_broken_without_a_token(uri: str, tmp_path: Path) -> None:
    path = tmp_path / "store" / layout.LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"{")
    assert "onto lock break" in onto("lock", "show", "--storage-uri", uri).out
    broken = onto("lock", "break", "--storage-uri", uri, "--yes")
    assert broken.code == 0
    assert not path.exists()


def test_sqlite_says_that_it_locks_by_itself(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/onto.db"
    initialize_storage(uri)
    for command in ("show", "break"):
        refused = onto("lock", command, "--storage-uri", uri)
        assert refused.code == 4
        assert "SQLite itself locks" in refused.error()
