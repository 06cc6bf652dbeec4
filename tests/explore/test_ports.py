"""What the page asks of a repository beyond other readers, on both engines of both backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storage_engine import Entity, Event, Field, Session, initialize_storage
from storage_engine.config import OntologiaConfig
from storage_engine.maintenance.restore import restore
from storage_engine.model import spec_of
from storage_engine.query.spec import When
from storage_engine.repository import open_repository
from storage_engine.repository.object.read import executor
from storage_engine.repository.protocol import WrittenRows
from storage_engine.runtime.migration import apply_drop, preview_drop
from tests.explore.conftest import Browse


class Part(Entity):
    id: Field[str] = Field(primary_key=True)
    size: Field[int]


class Told(Event):
    what: Field[str]


@pytest.fixture(params=["directory-v1", "directory-v2", "sqlite-v1", "sqlite-v2"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    backend, engine = request.param.split("-")
    uri = f"sqlite:///{tmp_path}/parts.db" if backend == "sqlite" else f"file://{tmp_path}/parts"
    initialize_storage(uri, engine)
    return uri


def parts(first: int, last: int, size: int) -> list[Part]:
    return [Part(id=f"p{number:03d}", size=size) for number in range(first, last)]


def test_commits_tell_what_they_wrote_and_sent(uri: str) -> None:
    with Session(uri) as session:
        session.ensure(parts(0, 5, 1))
        session.commit()
        session.ensure(parts(3, 9, 2))
        session.commit(Told(what="x"))
        repository: Any = open_repository(uri, OntologiaConfig())
        first, second = repository.commits_between(0, 2)
        assert first.written == [WrittenRows("entity", "Part", 5, 5)]
        assert second.written == [WrittenRows("entity", "Part", 6, 4)]
        assert second.written[0].updated == 2
        assert repository.get_commit(2).written == second.written
        assert "written" not in second.as_dict()
        assert list(repository.sent_events(1)) == []
        assert [event["payload"] for event in repository.sent_events(2)] == [{"what": "x"}]
        assert list(repository.sent_events(99)) == []
        repository.close()


def test_identities_are_counted_from_the_log(uri: str) -> None:
    repository = open_repository(uri, OntologiaConfig())
    assert repository.identity_counts() == {}
    with Session(uri) as session:
        for size in (1, 2, 3):
            session.ensure(parts(0, 4 * size, size))
            session.commit()
            assert repository.identity_counts() == {("entity", "Part"): 4 * size}
    restore(repository, 1, apply=True)
    assert repository.identity_counts() == {("entity", "Part"): 12}
    repository.close()


def test_a_dropped_type_stays_in_the_past_and_may_come_again(uri: str, browse: Browse) -> None:
    with Session(uri) as session:
        session.ensure(parts(0, 4, 1))
    repository = open_repository(uri, OntologiaConfig())
    apply_drop(repository, "Part", token=preview_drop(repository, "Part").token)
    assert repository.identity_counts() == {}
    client = browse(uri)
    assert client.document("/types")["others"][0]["dropped_commit_id"] == 2
    assert "was dropped by commit 2" in client.shown("/types/Part")
    assert client.document("/types/Part")["objects"] == []
    assert len(client.document("/types/Part?as_of=1")["objects"]) == 4
    assert client.document("/types/Part/objects/p001?as_of=1")["fields"]["size"] == 1
    assert client.get("/types/Part/objects/p001").status == 404
    assert "Changed the schema of Part" in client.shown("/commits/2")

    with Session(uri, entity_types=[Part]) as session:
        session.migrate(dry_run=False, force=True)
        session.ensure(parts(0, 2, 5))
    assert repository.identity_counts() == {("entity", "Part"): None}  # the log has both
    page = client.document("/types/Part?count=1")
    assert (page["rows"], page["matching"], len(page["objects"])) == (None, 2, 2)
    assert client.document("/types/Part/objects/p001")["fields"]["size"] == 5
    repository.close()


def test_reads_are_cut_where_files_end(
    uri: str, browse: Browse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a type is cut, its pages are the same."""
    with Session(uri) as session:
        for number in range(6):
            session.ensure(parts(10 * number, 10 * number + 10, number))
            session.commit()
        session.ensure(parts(5, 25, 7))
    repository = open_repository(uri, OntologiaConfig())
    assert list(repository.key_splits(spec_of(Part), When())) == []  # too small to be cut
    monkeypatch.setattr(executor, "_SPLIT_ROWS", 10)
    splits = list(repository.key_splits(spec_of(Part), When()))
    assert splits == ([] if uri.startswith("sqlite") else sorted(set(splits)))
    assert bool(splits) is not uri.startswith("sqlite")
    repository.close()

    client = browse(uri)
    for query, count in (("", 60), ("&filter=size == 7", 20), ("&filter=size == 5", 10)):
        seen: list[str] = []
        url: str | None = f"/types/Part?limit=7{query}"
        while url is not None:
            page = client.document(url)
            seen += [row["identity"][0] for row in page["objects"]]
            url = page["next_url"]
        assert (len(seen), seen) == (count, sorted(set(seen)))
