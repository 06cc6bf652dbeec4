"""Imports that are not alone: the same one at once, a migration beside it, a process that dies at
any of its writes and is run again."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from storage_engine import Entity, Field, OntologiaConfig, Session
from storage_engine.errors import ImportConflictError, OntologiaError, SchemaOutdatedError
from storage_engine.model import spec_of
from storage_engine.objectstore.memory import MemoryBackend, SimulatedCrash
from storage_engine.objectstore.protocol import ObjectStore
from storage_engine.repository.object import admin
from storage_engine.repository.open import open_object_repository
from storage_engine.runtime.exchange import ImportReport, import_types
from storage_engine.testing.faults import Fault, FaultKind, FaultPlan, FaultRule
from tests.runtime.support import make_storage, names
from tests.shop import Customer

PEOPLE = {f"c{n}": f"person {n}" for n in range(20)}


def lines(people: dict[str, str]) -> io.BytesIO:
    rows = [{"type": "Customer", "key": k, "fields": {"name": n}} for k, n in people.items()]
    return io.BytesIO(b"".join(json.dumps(row).encode() + b"\n" for row in rows))


@pytest.fixture(params=["directory-v2", "sqlite-v2"])
def uri(request: pytest.FixtureRequest, tmp_path: Any) -> str:
    return make_storage(tmp_path, request.param)


def at_once(uri: str, *inputs: dict[str, str]) -> list[ImportReport | OntologiaError]:
    """What each of several processes, as it were, has to tell; they begin together."""
    begin = Barrier(len(inputs))

    def run(people: dict[str, str]) -> ImportReport | OntologiaError:
        config = OntologiaConfig(s3_lock_timeout_ms=120_000)
        with Session(uri, entity_types=[Customer], config=config) as session:
            begin.wait(60)
            try:
                return session.import_files(lines(people), format="jsonl", apply=True)
            except OntologiaError as error:
                return error

    with ThreadPoolExecutor(len(inputs)) as pool:
        return list(pool.map(run, inputs))


def test_the_same_import_twice_at_once_is_done_once(uri: str) -> None:
    reports = at_once(uri, PEOPLE, PEOPLE, PEOPLE)

    assert all(isinstance(each, ImportReport) and each.applied for each in reports), reports
    assert {each.commit_id for each in reports if isinstance(each, ImportReport)} == {1}
    assert names(uri) == PEOPLE
    with Session(uri) as session:
        assert len(session.list_commits()) == 1


def test_of_two_that_contradict_each_other_one_is_refused_as_a_whole(uri: str) -> None:
    other = {"c0": "somebody else", "d0": "only there"}
    first, second = at_once(uri, PEOPLE, other)

    refused = [each for each in (first, second) if isinstance(each, ImportConflictError)]
    assert len(refused) == 1, (first, second)
    assert names(uri) == (other if refused == [first] else PEOPLE)


def test_a_migration_beside_it(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class is another one when the rows are to be committed: nothing is."""

    class Later(Entity, name="Customer"):
        id: Field[str] = Field(primary_key=True)
        name: Field[str]
        tier: Field[str] = Field(default="Standard")

    class Earlier(Entity, name="Customer"):
        id: Field[str] = Field(primary_key=True)
        name: Field[str]

    with Session(uri, entity_types=[Earlier]) as session:
        session.ensure(Earlier(id="ann", name="Ann"))
        session.commit()
    with Session(uri, entity_types=[Earlier]) as session:
        engine, migrations = type(session.repository), ["one"]
        commit = engine.commit

        def beside(self: Any, request: Any) -> Any:
            if migrations:
                migrations.pop()
                with Session(uri, entity_types=[Later]) as other:
                    other.migrate(dry_run=False, force=True)
            return commit(self, request)

        monkeypatch.setattr(engine, "commit", beside)
        with pytest.raises(SchemaOutdatedError):
            session.import_files(lines(PEOPLE), format="jsonl", apply=True)
    with Session(uri, entity_types=[Later]) as session:
        assert session.query().entities(Later).count() == 1
        report = session.import_files(lines(PEOPLE), format="jsonl", apply=True)
        assert report.applied
        tiers = {each.tier for each in session.query().entities(Later).collect()}
        assert (tiers, session.query().entities(Later).count()) == ({"Standard"}, 21)


# --- killed, and run again -----------------------------------------------------------------------


def imported(store: ObjectStore) -> ImportReport:
    """By a process of its own, which waits until the lease of a dead one has run out."""
    repository = open_object_repository(store, OntologiaConfig(s3_lock_timeout_ms=60_000))
    try:
        declared = {("entity", "Customer"): spec_of(Customer)}
        return import_types(
            repository, lines(PEOPLE), declared=declared, file_format="jsonl", apply=True
        )
    finally:
        repository.close()


def deaths() -> Iterator[MemoryBackend]:
    """A storage for each write of the import after which the process died."""
    for nth in itertools.count(1):
        backend = MemoryBackend()
        admin.create(backend.client(), "v2", admin.look(backend.client()))
        dead = Fault(FaultKind.CRASH_AFTER)
        plan = FaultPlan([FaultRule(dead, "WRITE", nth=nth, times=None)])
        with contextlib.suppress(SimulatedCrash):
            imported(backend.client(faults=plan))
        if not plan.fired:
            return
        yield backend


def test_an_import_that_was_killed_is_run_again() -> None:
    outcomes = set()
    for backend in deaths():
        report = imported(backend.client())

        assert report.applied
        assert report.commit_id == 1
        outcomes.add(report.already_applied)
        repository = open_object_repository(backend.client(), OntologiaConfig())
        assert len(repository.list_commits(9)) == 1
        found = repository.read(spec_of(Customer)).to_pylist()
        assert {row["entity_key"]: row["name"] for row in found} == PEOPLE
        repository.close()
    assert outcomes == {True, False}  # it died before the commit was published, and after
