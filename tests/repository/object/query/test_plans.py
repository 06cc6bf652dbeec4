"""What reaches the Parquet scan, and what must not decide before the newest version is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_engine import Entity, Field, Relation, Session, initialize_storage, left
from storage_engine.query.builder import EntityQuery
from storage_engine.repository.object.read import plan
from storage_engine.repository.object.read.plan import TypePlan


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    tier: Field[str]
    age: Field[int | None] = Field(default=None)
    profile: Field[dict[str, str]] = Field(default_factory=dict)


class Knows(Relation[Customer, Customer]):
    weight: Field[int] = Field(default=0)


@pytest.fixture(params=["v1", "v2"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    """Two commits: c1 is Gold in the first, Silver in the second; c2 stays Gold."""
    uri = (tmp_path / "onto").as_uri()
    initialize_storage(uri, engine_version=request.param)
    with Session(uri) as session:
        session.ensure(
            [Customer(id="c1", tier="Gold", age=30), Customer(id="c2", tier="Gold", age=40)]
        )
        session.ensure(Knows(left_key="c1", right_key="c2"))
        session.commit()
        session.ensure(Customer(id="c1", tier="Silver", age=31))
        session.commit()
        yield session


def gold(session: Session) -> EntityQuery[Customer]:
    return session.query().entities(Customer).where(Customer.tier == "Gold")


def scans(tree: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each Parquet scan of a DuckDB plan does: its filters and projections among others."""
    found = []
    for node in tree:
        info = node.get("extra_info", {})
        if "READ_PARQUET" in (node["name"], info.get("Function")):
            found.append(info)
        found += scans(node["children"])
    return found


def modes(query: EntityQuery[Customer]) -> dict[str, Any]:
    return {
        "latest": query,
        "as_of": query.as_of(1),
        "history": query.with_history(),
        "since": query.history_since(0),
    }


@pytest.mark.parametrize("mode", ["latest", "as_of", "history", "since"])
def test_a_typed_filter_is_part_of_the_parquet_scan(session: Session, mode: str) -> None:
    plan = modes(gold(session))[mode].explain()
    assert any("tier='Gold'" in s.get("Filters", "") for s in scans(plan.facts["duckdb"])), plan


def test_a_stale_version_is_never_returned_for_a_filter(session: Session) -> None:
    """c1 was Gold: its old version passes the filter, and must not be found by it."""
    assert [c.id for c in gold(session).collect()] == ["c2"]
    assert gold(session).count() == 1
    assert [c.id for c in gold(session).as_of(1).collect()] == ["c1", "c2"]
    assert [(c.id, c.meta().commit_id) for c in gold(session).with_history().collect()] == [
        ("c1", 1),
        ("c2", 1),
    ]


def test_pushing_the_filter_below_the_newest_version_would_be_noticed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect planted: candidates are taken for answers, without a look for newer versions."""
    real = plan.visible

    def careless(scanner: Any, cursor: Any, plan: TypePlan, name: str, **rest: Any) -> list[str]:
        blind = TypePlan(plan.spec, plan.window, plan.rows)
        return real(scanner, cursor, blind, name, **rest)

    monkeypatch.setattr(
        "storage_engine.repository.object.read.executor.visible", careless, raising=True
    )
    assert [c.id for c in gold(session).collect()] == ["c1", "c2"]  # c1 is stale


def test_newer_versions_are_looked_for_in_key_and_commit_columns_alone(session: Session) -> None:
    plan = gold(session).explain()
    assert plan.facts["types"][0]["files_checked_for_newer_versions"] != []
    read = [set(scan["Projections"]) for scan in scans(plan.facts["duckdb"])]
    assert {"commit_id", "entity_key"} in read
    assert len(read) == 2


def test_many_newer_versions_are_looked_up_by_the_candidates(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_CHECK_ALL", 0)
    assert "SEMI JOIN" in gold(session).explain().facts["sql"]
    assert [c.id for c in gold(session).collect()] == ["c2"]
    assert session.query().entities(Customer).where(Customer.id == "c1").first().age == 31  # type: ignore[union-attr]
    assert [c.tier for c in session.query().entities(Customer).collect()] == ["Silver", "Gold"]


def test_one_entry_needs_no_look_at_newer_versions(session: Session) -> None:
    facts = gold(session).as_of(1).explain().facts["types"][0]
    assert facts["files_checked_for_newer_versions"] == []
    assert len(facts["files"]) == 1
    assert facts["pruned"] == {"commit window": 1}


def test_entries_with_disjoint_keys_need_none_either(session: Session) -> None:
    session.ensure([Customer(id=f"d{n}", tier="Gold") for n in range(3)])
    session.commit()
    facts = session.query().entities(Customer).explain().facts["types"][0]
    # The second commit rewrote c1 of the first; nothing rewrote d0..d2.
    assert len(facts["files"]) == 3
    assert len(facts["files_checked_for_newer_versions"]) == 1


def test_files_are_left_out_by_statistics_and_keys(session: Session) -> None:
    by_value = gold(session).explain().facts["types"][0]
    assert by_value["pruned"] == {"column statistics": 1}
    by_key = session.query().entities(Customer).where(Customer.id == "c2").explain()
    assert by_key.facts["types"][0]["pruned"] == {"key range": 1}
    assert "left out by key range: 1" in by_key.text


def test_only_the_columns_that_are_needed_are_read(session: Session) -> None:
    plan = (
        session.query().entities(Customer).as_of(1).group_by(Customer.tier).explain(n=_count())
    ).facts["duckdb"]
    (scan,) = scans(plan)
    assert scan["Projections"] == "tier"


def test_a_filter_inside_json_is_applied_to_the_newest_version(session: Session) -> None:
    session.ensure(Customer(id="c3", tier="Gold", profile={"city": "Rome"}))
    session.commit()
    session.ensure(Customer(id="c3", tier="Gold", profile={"city": "Oslo"}))
    session.commit()
    query = session.query().entities(Customer)
    assert query.where(Customer.profile["city"] == "Rome").collect() == []
    assert len(query.where(Customer.profile["city"] == "Oslo").collect()) == 1


def test_an_endpoint_filter_sees_the_newest_version_of_the_endpoint(session: Session) -> None:
    known = session.query().relations(Knows)
    assert known.where(left(Knows).tier == "Gold").collect() == []
    assert known.where(left(Knows).tier == "Silver").count() == 1
    assert known.where(left(Knows).tier == "Gold").as_of(1).count() == 1
    # History modes see every version of the endpoint.
    assert known.where(left(Knows).tier == "Gold").with_history().count() == 1


def test_a_row_changed_back_is_its_newest_version(session: Session) -> None:
    session.ensure(Customer(id="c1", tier="Gold", age=30))
    session.commit()
    assert [(c.id, c.meta().commit_id) for c in gold(session).collect()] == [("c1", 3), ("c2", 1)]


def _count() -> Any:
    from storage_engine.query import count

    return count()
