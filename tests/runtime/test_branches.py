"""Branches as users have them: sessions, queries, events, differences, merges."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest

from storage_engine import Event, Field, HandlerContext, Session, left, on_event
from storage_engine.errors import (
    BranchExistsError,
    ConfigurationError,
    MergeConflictError,
    ProtectedBranchError,
    UnknownBranchError,
    UnsupportedEngineError,
)
from storage_engine.model import spec_of
from storage_engine.objectstore.memory import MemoryStore, SimulatedCrash
from storage_engine.objectstore.open import memory_backend
from storage_engine.repository import initialize_storage
from storage_engine.testing.faults import Fault, FaultKind, FaultRule, plan_of
from tests.conformance.test_rfc0009_migration import drop, migrate
from tests.shop import Customer, Product, Subscription


class Signed(Event):
    customer: Field[str]


@pytest.fixture
def uri() -> str:
    name = f"memory://{uuid.uuid4().hex}"
    initialize_storage(name, "v2")
    with Session(name) as session:
        session.ensure([Customer(id="a", name="Ann"), Customer(id="b", name="Bo")])
    return name


def names(session: Session) -> dict[str, str]:
    return {c.id: c.name for c in session.query().entities(Customer).collect()}


def test_a_session_on_a_branch(uri: str) -> None:
    with Session(uri) as main:
        assert main.branch == "main"
        made = main.create_branch("run/42", owner="ann", expires_in=timedelta(hours=1))
        assert (made.name, made.owner, made.commits) == ("run/42", "ann", 0)
        with pytest.raises(BranchExistsError):
            main.create_branch("run/42")
    with Session(uri, branch="run/42") as session:
        assert session.branch == "run/42"
        assert names(session) == {"a": "Ann", "b": "Bo"}
        session.ensure([Customer(id="a", name="Anna"), Product(sku="p", price=2.0)])
        session.ensure(Subscription(left_key="a", right_key="p", seats=3))
        assert session.commit() == 2
        assert names(session) == {"a": "Anna", "b": "Bo"}
        query = session.query().relations(Subscription).where(left(Subscription).name == "Anna")
        assert [found.seats for found in query.collect()] == [3]
        assert session.query().entities(Customer).count() == 2
        assert session.sql("SELECT name FROM Customer ORDER BY id").collect() == [
            {"name": "Anna"},
            {"name": "Bo"},
        ]
        history = session.query().entities(Customer).with_history().collect()
        assert [(c.id, c.name) for c in history] == [("a", "Ann"), ("b", "Bo"), ("a", "Anna")]
        older = session.query().entities(Customer).as_of(1).collect()
        assert {c.name for c in older} == {"Ann", "Bo"}
        assert session.query().entities(Customer).as_of("run/42@1").count() == 2
        assert [c["kind"] for c in session.diff(1, 2)] == ["entity", "entity", "relation"]
        assert session.list_commit_changes(2)[0]["operation"] == "update"
        assert session.storage_info()["branch"]["parent"] == "main"
        with pytest.raises(ConfigurationError, match="not compacted"):
            session.compact()
    with Session(uri) as main:
        assert names(main) == {"a": "Ann", "b": "Bo"}
        assert [b.name for b in main.list_branches()] == ["main", "run/42"]
        assert main.at("run/42@2").query().entities(Customer).count() == 2
        assert {c.name for c in main.at("run/42@2").query().entities(Customer).collect()} == {
            "Anna",
            "Bo",
        }
        assert main.at("main@1").query().entities(Product).count() == 0
        assert main.at(" run/42@2 ").query().entities(Product).count() == 1
        with pytest.raises(ConfigurationError, match="of another branch than 'main'"):
            main.query().entities(Customer).as_of("run/42@2").count()
        with pytest.raises(UnknownBranchError, match="did you mean run/42"):
            main.at("run/43@2")


@pytest.mark.parametrize("engine", ["sqlite", "v1"])
def test_storages_without_branches_say_so(tmp_path: Path, engine: str) -> None:
    uri = f"sqlite:///{tmp_path / 'onto.db'}" if engine == "sqlite" else str(tmp_path / "onto")
    initialize_storage(uri, "v2" if engine == "sqlite" else "v1")
    with pytest.raises(UnsupportedEngineError, match="has no branches"):
        Session(uri, branch="run/42")
    with Session(uri, branch="main") as session:
        assert session.branch == "main"
        for asked in (
            session.list_branches,
            lambda: session.create_branch("a"),
            lambda: session.delete_branch("a"),
            lambda: session.merge("a"),
            session.update_branch,
            lambda: session.protect_branch("main"),
        ):
            with pytest.raises(UnsupportedEngineError, match="engine v2 on an object store"):
                asked()


def test_a_change_feed_names_its_chain(uri: str) -> None:
    with Session(uri) as main:
        main.create_branch("run")
        own = main.changes().cursor
        with Session(uri, branch="run") as session:
            session.ensure(Customer(id="c", name="Cy"))
            session.commit()
            page = session.changes(1)
            assert [change["key"] for change in page] == ["c"]
            assert session.changes(page.cursor) == []
            session.ensure(Customer(id="d", name="Di"))
            session.commit()
            first = session.changes(0, 1)
            assert [c["key"] for c in session.changes(first.cursor)] == ["b", "c", "d"]
            for cursor in (page.cursor, first.cursor):
                with pytest.raises(ValueError, match="another branch"):
                    main.changes(cursor)
            assert session.changes(own) == session.changes(1)  # a commit id is one on any chain
        main.delete_branch("run")
        main.create_branch("run")
        with Session(uri, branch="run") as again, pytest.raises(ValueError, match="another branch"):
            again.changes(page.cursor)


def test_differences_between_branches(uri: str) -> None:
    with Session(uri) as main:
        main.create_branch("run")
        with Session(uri, branch="run") as session:
            session.ensure([Customer(id="a", name="Anna"), Customer(id="c", name="Cy")])
            session.ensure(Product(sku="p", price=1.0))
            session.commit()
            session.create_branch("run/child")
            own = session.diff("main", "run")
        main.ensure(Customer(id="m", name="Mo"))
        main.commit()
        changes = main.diff("main", "run")
        told = [(c["type_name"], c["key"], c["operation"]) for c in changes]
        assert told == [
            ("Customer", "a", "update"),
            ("Customer", "c", "insert"),
            ("Customer", "m", "delete"),
            ("Product", "p", "insert"),
        ]
        assert (changes[0]["before"], changes[0]["after"]) == ({"name": "Ann"}, {"name": "Anna"})
        assert changes[2]["after"] is None
        assert [c["key"] for c in own] == ["a", "c", "p"]
        assert main.diff("run/child", "run") == []
        assert [c["key"] for c in main.diff("run@1", "run")] == ["a", "c", "p"]
        assert [c["key"] for c in main.diff(1, "main")] == ["m"]
        assert main.diff("main@1", "run@1") == []
        with pytest.raises(ValueError, match="no tag 'nothing'"):
            main.diff("main", "nothing")


def test_differences_of_types_that_were_ended_made_anew_or_migrated(uri: str) -> None:
    """Each side as it was then; of a type that was made anew all rows are others."""

    def told(before: str, after: str) -> list[tuple[str | None, str]]:
        return [(c.get("key"), c["operation"]) for c in main.diff(before, after)]

    with Session(uri) as main, Session(uri) as other:
        main.create_branch("run")
        main.create_branch("moved")
        with Session(uri, branch="run") as session:
            drop(session.repository, "Customer")
            assert told("main", "run") == told("run@1", "run") == [(None, "drop")]
            assert told("run", "main") == [("a", "insert"), ("b", "insert")]
            migrate(session.repository, spec_of(Customer))
            session.ensure(Customer(id="c", name="Cy"))
            session.commit()
        assert told("main", "run") == [("a", "delete"), ("b", "delete"), ("c", "insert")]
        assert told("main", "run@1") == []
        assert told("main", "run@2") == [(None, "drop")]
        with Session(uri, branch="moved") as session:
            session.ensure(Customer(id="c", name="Cy"))
            session.commit()
            spec = spec_of(Customer)
            more = replace(spec.fields[-1], name="more", nullable=True)
            migrate(session.repository, replace(spec, fields=(*spec.fields, more)))
        assert told("main", "moved") == told("moved@2", "moved") == [(None, "schema")]
        assert told("main", "moved@2") == told("moved@1", "moved@2") == [("c", "insert")]
        assert other.diff(" main ", " moved@2 ") == main.diff("main", "moved@2")


def test_merging_by_policy_and_preview(uri: str) -> None:
    with Session(uri) as main:
        main.create_branch("run")
        with Session(uri, branch="run") as session:
            session.ensure([Customer(id="a", name="Anna"), Customer(id="b", name="Bo", age=3)])
            session.commit()
        main.ensure([Customer(id="a", name="Annie"), Customer(id="b", name="Bob")])
        main.commit()
        preview = main.merge("run", dry_run=True)
        assert (preview.commit_id, len(preview.conflicts)) == (None, 2)
        assert preview.as_dict()["conflicts"][0]["identity"] == ["a"]
        with pytest.raises(MergeConflictError, match="2 conflicts"):
            main.merge("run")
        with pytest.raises(ConfigurationError, match="none of fail, ours"):
            main.merge("run", on_conflict="mine")  # type: ignore[arg-type]
        with pytest.raises(MergeConflictError, match="1 conflict"):
            main.merge("run", on_conflict="fields")
        main.ensure(Customer(id="x", name="pending"))
        with pytest.raises(ConfigurationError, match=r"merge\(\): what was stated of Customer"):
            main.merge("run", on_conflict="theirs")
        main.discard()

        def longest(base: object, ours: dict[str, object], theirs: dict[str, object]) -> object:
            return {**theirs, "name": max(str(ours["name"]), str(theirs["name"]), key=len)}

        report = main.merge("run", on_conflict={Customer: longest}, meta={"run": "7"})  # type: ignore[dict-item]
        assert report.commit_id == 3
        assert names(main) == {"a": "Annie", "b": "Bob"}
        commit = main.get_commit(3)
        assert commit is not None
        assert (commit["kind"], commit["metadata"]) == ("merge", {"run": "7", "merge": "run"})
        assert main.last_commit is not None
        assert main.last_commit.commit_id == 3
        with Session(uri, branch="run") as session:
            assert session.update_branch(on_conflict="theirs").commit_id == 3
            assert names(session) == names(main)
        main.delete_branch("run")
        with pytest.raises(UnknownBranchError):
            main.merge("run")


def test_a_protected_main_takes_what_was_merged(uri: str) -> None:
    with Session(uri) as main:
        main.protect_branch("main")
        main.ensure(Customer(id="c", name="Cy"))
        with pytest.raises(ProtectedBranchError, match="takes merges only"):
            main.commit()
        main.discard()
        main.create_branch("run")
        with Session(uri, branch="run") as session:
            session.ensure(Customer(id="c", name="Cy"))
        assert main.merge("run").commit_id == 2
        assert main.protect_branch("main", False).protected is False


# -- events --------------------------------------------------------------------------------------


def handled(session: Session) -> list[str]:
    seen: list[str] = []

    @on_event(Signed, id="note")
    def note(context: HandlerContext[Signed]) -> None:
        seen.append(context.event.customer)

    session.drain([note])
    return seen


@pytest.mark.parametrize("killed", [False, True])
def test_events_go_out_once_with_the_merge(uri: str, killed: bool) -> None:
    """None before, each once after, also when the merge is killed after its swap of head."""
    backend = memory_backend(uri.removeprefix("memory://"))
    with Session(uri) as main:
        main.create_branch("run")
        with Session(uri, branch="run") as session:
            session.emit(Signed(customer="emitted"))
            session.ensure(Customer(id="c", name="Cy"))
            session.commit(event=[Signed(customer="first"), Signed(customer="second")])
            for refused in (session.run, session.drain):
                with pytest.raises(ConfigurationError, match="events are handled on main"):
                    refused([])
            assert [c["kind"] for c in session.list_commits(2)] == ["data", "data"]
        assert not [key for key in backend.objects() if key.startswith("events/")]
        assert handled(main) == []
        if killed:
            with Session(uri) as doomed:
                store = cast(MemoryStore, doomed.repository.objects.store)  # type: ignore[union-attr]
                rule = FaultRule(Fault(FaultKind.CRASH_AFTER), "put_if_match", "meta/head.json")
                plan_of(store).rules.append(rule)
                with pytest.raises(SimulatedCrash):
                    doomed.merge("run")
            backend.clock.sleep(3600)
        else:
            assert main.merge("run").events == 3
        assert sorted(handled(main)) == ["emitted", "first", "second"]
        assert main.merge("run").commit_id is None
        with Session(uri, branch="run") as session:
            session.emit(Signed(customer="later"))
        assert main.merge("run").commit_id == 3
        assert handled(main) == ["later"]
        main.delete_branch("run")
        assert handled(main) == []
