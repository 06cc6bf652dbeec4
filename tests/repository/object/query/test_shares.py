"""Plans that other processes carry out: their shares together are what the engine itself reads."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage_engine import CompactionPolicy, ConfigurationError, Session, initialize_storage
from storage_engine.commitlog import layout
from storage_engine.model import TypeSpec
from storage_engine.query.spec import When
from storage_engine.repository import ReadWindow
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.object.read import splits
from storage_engine.repository.object.read.files import versioned_schema
from storage_engine.repository.object.read.plan import TypePlan
from storage_engine.repository.object.read.splits import ChangePlan, change_schema, shares
from tests.engines import CUSTOMER, EMPLOYMENT, Customer, Employment

SPECS = [TypeSpec.from_schema_dict(spec.schema_dict()) for spec in (CUSTOMER, EMPLOYMENT)]
WINDOWS = (
    ReadWindow(),
    ReadWindow(as_of=2),
    ReadWindow(as_of=4),
    ReadWindow(history=True),
    ReadWindow(history=True, since=2),
    ReadWindow(as_of=4, history=True, since=1),
)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Overlapping small and bulk commits; every file is a share of its own."""
    monkeypatch.setattr(splits, "SHARE_BYTES", 1)
    initialize_storage(tmp_path)
    with Session(tmp_path) as session:
        write(session, range(10), 1)
        ingest(session, range(5, 15), 2)
        write(session, range(3, 7), 3)
        ingest(session, range(12, 20), 4)
        write(session, [0, 19], 5)
        yield session


def write(session: Session, numbers: Any, age: int) -> None:
    session.ensure(Customer(id=f"c{n:02}", name="x", age=age) for n in numbers)
    session.ensure(
        Employment(left_key="c01", right_key=f"c{n:02}", stint=str(n % 2), role=f"r{age}")
        for n in numbers
    )
    session.commit()
    session.flush()


def ingest(session: Session, numbers: Any, age: int) -> None:
    ids = [f"c{n:02}" for n in numbers]
    session.ingest(
        Customer, pa.table({"id": ids, "name": ["x"] * len(ids), "age": [age] * len(ids)})
    )
    session.commit()
    session.flush()


def repository(session: Session) -> ObjectRepository:
    assert isinstance(session.repository, ObjectRepository)
    return session.repository


def plan_of(session: Session, spec: TypeSpec, window: ReadWindow) -> TypePlan:
    when = When(window.as_of, history=window.history, since=window.since)
    return repository(session).executor().plan(spec, when)


def scanned(session: Session, plans: Any, condition: str | None = None) -> list[dict[str, Any]]:
    """All rows of the shares, each sent elsewhere first."""
    found = []
    for plan in plans:
        sent: TypePlan | ChangePlan = pickle.loads(pickle.dumps(plan))
        rows = sent.rows if isinstance(sent, ChangePlan) else sent
        schema = versioned_schema(rows.spec)
        names = (change_schema(schema) if isinstance(sent, ChangePlan) else schema).names
        columns = {name: name for name in names}
        got = repository(session).executor().scan(sent, columns, names, condition)
        found += pa.Table.from_batches(got.batches, schema=got.schema).to_pylist()
    return sorted(found, key=repr)


def expected(session: Session, spec: TypeSpec, window: ReadWindow) -> list[dict[str, Any]]:
    return sorted(session.repository.read(spec, window).to_pylist(), key=repr)


def changes(session: Session, spec: TypeSpec, since: int) -> list[tuple[Any, ...]]:
    names = ("key",) if spec.kind == "entity" else spec.identity
    return sorted(
        (c["commit_id"], c["operation"], *(c[name] for name in names))
        for c in session.changes(since)
        if c["type_name"] == spec.name
    )


def fed(session: Session, spec: TypeSpec, since: int) -> list[tuple[Any, ...]]:
    upto = session.repository.head_commit_id()
    plans = repository(session).executor().plan_changes(spec, since=since, upto=upto)
    rows = scanned(session, plans)
    return sorted(
        (row["commit_id"], row["operation"], *(row[name] for name in spec.identity)) for row in rows
    )


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_shares_are_the_rows_of_every_window(session: Session, spec: TypeSpec) -> None:
    kept = [(w, plan_of(session, spec, w), expected(session, spec, w)) for w in WINDOWS]
    for compacted in (False, True):
        if compacted:
            session.compact(CompactionPolicy(min_entries=2))
            session.flush()
            write(session, [1, 7], 6)
        for window in WINDOWS:
            plan = plan_of(session, spec, window)
            made = shares(plan)
            assert [item for one in made for item in one.rows] == list(plan.rows)
            assert scanned(session, made) == expected(session, spec, window)
        for since in range(session.repository.head_commit_id() + 1):
            assert fed(session, spec, since) == changes(session, spec, since)
    for window, plan, rows in kept:
        if window.as_of is None:
            assert expected(session, spec, window) != rows  # head has moved
        assert scanned(session, shares(plan)) == rows  # but not what was planned


def test_conditions_do_not_bring_old_versions_back(session: Session) -> None:
    plan = plan_of(session, SPECS[0], ReadWindow())
    assert len(shares(plan_of(session, SPECS[0], ReadWindow(history=True)))) == len(plan.rows) == 5
    # Each share looks through the newer files by itself, so there are fewer.
    assert 1 < len(shares(plan)) < 5
    assert scanned(session, shares(plan), "age = 1") == [
        row for row in expected(session, SPECS[0], ReadWindow()) if row["age"] == 1
    ]
    with pytest.raises(ConfigurationError, match=r"filter 'aeg = 1' on Customer: .*aeg"):
        scanned(session, shares(plan), "aeg = 1")


def test_an_index_that_names_what_is_gone_is_not_believed(session: Session, tmp_path: Path) -> None:
    spec = SPECS[0]
    index = tmp_path / layout.index("entity", "Customer")
    old = index.read_bytes()
    before = expected(session, spec, ReadWindow())
    replaced = plan_of(session, spec, ReadWindow(history=True)).rows
    session.compact(CompactionPolicy(min_entries=2))
    session.flush()
    for item in replaced:  # as a purge does, which also writes the index anew
        (tmp_path / item.file.path).unlink()
    index.write_bytes(old)
    with Session(tmp_path) as other:
        assert scanned(other, shares(plan_of(other, spec, ReadWindow()))) == before
