"""Schemas that have lived: several versions, renamed, dropped, purged and created anew, as they are
copied between every pair of engines."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from storage_engine.errors import TypeDroppedError
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.model import Field
from storage_engine.repository import Repository
from storage_engine.transfer import copy_storage
from tests.conformance.test_rfc0009_migration import (
    V1,
    V2,
    V3,
    drop,
    entity,
    latest,
    migrate,
    row,
    write,
)
from tests.engines import Storage

THING = entity("Thing", size=Field[int])
THING_AGAIN = entity("Thing", colour=Field[str])
SECRET = entity("Secret", word=Field[str])
CLIENT = entity(
    "Client",
    renamed_from="Customer",
    full_name=Field[str],
    age=Field[float],
    tier=(Field[str], Field(default="basic")),
)
EMPTY = entity("Empty", note=Field[str])
_UPGRADERS: Any = {
    ("Customer", 2): lambda r: {
        "id": r["id"],
        "full_name": r["name"],
        "age": r["age"],
        "tier": r["tier"],
    }
}


def live(storage: Storage) -> None:
    with closing(storage.open(checkpoint_interval=4, runtime_id="maker")) as repo:
        write(repo, V1, row("a", name="Ann", age=1), row("b", name="Bob", age=2))
        write(repo, V1, row("a", name="Anna", age=1))
        write(repo, THING, row("t", size=1))
        write(repo, SECRET, row("s", word="hush"))
        migrate(repo, V2)
        write(repo, V2, row("b", name="Bobby", age=2.5, tier="gold"))
        migrate(repo, EMPTY)
        migrate(repo, V3, upgraders=_UPGRADERS)
        drop(repo, "Thing")
        drop(repo, "Secret", purge=True)
        migrate(repo, THING_AGAIN)
        write(repo, THING_AGAIN, row("t", colour="red"))
        repo.flush()


def told(repo: Repository) -> dict[str, Any]:
    return {
        "histories": {
            ref: _without_times(history.as_dict()) for ref, history in repo.type_histories().items()
        },
        "commits": [_of_any_engine(c.as_dict()) for c in repo.list_commits(100)],
        "types": [spec.ref for spec in repo.known_types()],
        "customers": latest(repo, V3),
        "things": latest(repo, THING_AGAIN),
        "empty": latest(repo, EMPTY),
    }


def _of_any_engine(commit: dict[str, Any]) -> dict[str, Any]:
    """Only SQLite names types of which a commit changed the schema and wrote no rows."""
    return commit if commit["kind"] == "data" else {**commit, "types": None}


def _without_times(history: dict[str, Any]) -> dict[str, Any]:
    """When a version was made is told by some engines in another way; commits have the time."""
    for version in history["versions"]:
        del version["created_at"]
    return history


def state_of(storage: Storage) -> dict[str, Any]:
    """Without the rows that commits wrote: of a purged type none are copied."""
    with closing(storage.open()) as repo:
        state = told(repo)
    for commit in state["commits"]:
        del commit["rows"]
    return state


def copied(source: Storage, target: Storage, **options: Any) -> Any:
    return copy_storage(
        source.uri, target.uri, apply=True, engine_version=target.engine_version, **options
    )


def test_versions_drops_and_purges_are_copied_as_they_are(source: Storage, target: Storage) -> None:
    live(source)
    report = copied(source, target)
    assert report.comparison.differences == ()
    assert state_of(target) == state_of(source)
    with closing(target.open()) as repo:
        assert verify_storage(repo).findings == []
        with pytest.raises(TypeDroppedError):
            write(repo, SECRET, row("s", word="again"))
        write(repo, V3, row("d", full_name="Dan", age=4.0, tier="basic"))
        migrate(repo, CLIENT)  # the rename takes over what was copied
        assert {r["id"] for r in latest(repo, CLIENT)} == {"a", "b", "d"}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("directory-v2", "sqlite-v2"),
        ("sqlite-v1", "directory-v2"),
        ("directory-v1", "directory-v1"),
    ],
    indirect=True,
)
def test_the_schema_moves_on_between_two_runs(source: Storage, target: Storage) -> None:
    with closing(source.open()) as repo:
        write(repo, V1, row("a", name="Ann", age=1))
        write(repo, SECRET, row("s", word="hush"))
    copied(source, target)
    with closing(source.open()) as repo:
        migrate(repo, V2)
        migrate(repo, V3, upgraders=_UPGRADERS)
        migrate(repo, CLIENT)
        drop(repo, "Secret", purge=True)
    report = copied(source, target)
    assert (report.since, report.upto) == (2, 6)
    assert report.comparison.differences == ()
    with closing(source.open()) as ours, closing(target.open()) as theirs:
        assert latest(theirs, CLIENT) == latest(ours, CLIENT) != []
        for ref, history in ours.type_histories().items():
            copy = theirs.type_histories()[ref]
            assert _without_times(copy.as_dict()) == _without_times(history.as_dict())
