"""How SQLite answers: by its indexes, never with replaced versions, and what it refuses."""

from __future__ import annotations

import json
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage_engine.errors import SchemaOutdatedError
from storage_engine.model import Entity, Field, Relation, TypeSpec
from storage_engine.model.declarations import spec_of
from storage_engine.model.expressions import Or
from storage_engine.query import count, left, sum
from storage_engine.query.builder import Query
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository.sqlite.engine import SqliteRepository
from tests.query.worlds import NASTY
from tests.repository.sqlite.query_world import rows
from tests.repository.sqlite.support import (
    CUSTOMER,
    KNOWS,
    SUBSCRIPTION,
    commit,
    customer,
    edge,
    open_at,
    put,
)
from tests.shop import Customer, Employment, Knows, Product, Subscription


def people(repository: SqliteRepository, pinned: int | None = None) -> Any:
    return Query(repository.executor(pinned)).entities(Customer)


def steps(query: Any) -> list[str]:
    """SQLite's plan of the only statement."""
    (statement,) = query.explain().facts["statements"]
    return [line.strip() for line in statement["plan"]]


# --- newest version, then values --------------------------------------------------------------


def test_a_replaced_version_is_never_returned(repository: SqliteRepository) -> None:
    put(repository, customer("a", tier="Gold", age=1), customer("b", tier="Gold", age=1))
    put(repository, customer("a", tier="Silver", age=2))
    gold, silver = Customer.tier == "Gold", Customer.tier == "Silver"
    for condition in (gold, Customer.age == 1, gold & (Customer.age == 1), ~silver):
        assert [c.id for c in people(repository).where(condition).collect()] == ["b"]
        assert people(repository).where(condition).count() == 1
        assert [c.id for c in people(repository).as_of(1).where(condition).collect()] == ["a", "b"]
    first = people(repository).where(gold).order_by(Customer.age).limit(1).collect()
    assert [c.id for c in first] == ["b"]
    commit(repository, KNOWS, edge("a", "b"), edge("b", "a"))
    known = Query(repository.executor()).relations(Knows)
    assert [k.left_key for k in known.where(left(Knows).tier == "Gold").collect()] == ["b"]
    assert [k.left_key for k in known.where(left(Knows).tier == "Silver").collect()] == ["a"]
    paths = people(repository).where(gold).via(Knows).collect()
    assert [p.source.id for p in paths] == ["b"]


def test_a_value_filter_uses_its_index_and_still_asks_for_newer_versions(
    path: Path,
) -> None:
    repository = open_at(path, "v2")
    put(repository, customer("a", tier="Gold"))
    plan = steps(people(repository).where(Customer.tier == "Gold"))
    assert plan[0] == "SEARCH h USING INDEX entity_Customer_v1:tier (tier=?)"
    assert plan[-1] == "SEARCH m USING PRIMARY KEY (entity_key=? AND commit_id>?)"
    assert not any("TEMP B-TREE" in line for line in plan)
    repository.close()


def test_keys_are_looked_up_in_the_primary_key(repository: SqliteRepository, engine: str) -> None:
    put(repository, customer("a"))
    put(repository, customer("a", name="Bob"))
    key = "entity_type=? AND entity_key" if engine == "v1" else "entity_key"
    for condition, found in (
        (Customer.id == "a", f"({key}=?)"),
        (Customer.id.in_(["a", "b"]), f"({key}=?)"),
        (Customer.id.startswith("a"), f"({key}>? AND entity_key<?)"),
        ((Customer.id == "a") & (Customer.age > 1), f"({key}=?)"),
    ):
        for query in (people(repository), people(repository).as_of(1)):
            plan = steps(query.where(condition))
            assert plan[0] == f"SEARCH h USING PRIMARY KEY {found}"
            assert not any("TEMP B-TREE" in line or line.startswith("SCAN") for line in plan)


def test_rows_stream_in_the_clustered_order_without_sorting(
    repository: SqliteRepository, engine: str
) -> None:
    put(repository, customer("a"))
    put(repository, customer("a", name="Bob"))
    for query in (people(repository), people(repository).as_of(1)):
        plan = steps(query)
        assert plan[0].startswith("SCAN h" if engine == "v2" else "SEARCH h USING PRIMARY KEY")
        assert not any("TEMP B-TREE" in line for line in plan)
    plan = steps(people(repository).history_since(1))
    index = "entity_Customer_v1:commit_id" if engine == "v2" else "entity_history_by_commit"
    assert plan[0].startswith(f"SEARCH h USING INDEX {index}")
    assert not any("TEMP B-TREE" in line for line in plan)


def test_endpoints_are_looked_up_by_key(repository: SqliteRepository) -> None:
    put(repository, customer("a"), customer("b"))
    commit(repository, KNOWS, edge("a", "b"))
    query = Query(repository.executor()).relations(Knows)
    plan = steps(query.where((left(Knows).tier == "Gold") & (left(Knows).age > 0)))
    assert sum_of(plan, "SCAN h") <= 1  # the relations; entities never
    assert sum_of(plan, "MATERIALIZE") == 0


def sum_of(plan: list[str], start: str) -> int:
    return len([line for line in plan if line.startswith(start)])


def test_steps_of_a_traversal_are_joins(repository: SqliteRepository, engine: str) -> None:
    put(repository, customer("a"), customer("b"))
    commit(repository, KNOWS, edge("a", "b"))
    plan = people(repository).via(Knows).via(Knows).explain()
    inserts = [s for s in plan.facts["statements"] if s["sql"].startswith("INSERT")]
    assert len(inserts) == 4  # sources, two steps, paths: however many entities there are
    key = "relation_type=? AND left_key" if engine == "v1" else "left_key"
    for step in inserts[1:3]:
        assert f"SEARCH h USING PRIMARY KEY ({key}=?)" in [line.strip() for line in step["plan"]]
    assert people(repository).via(Knows).via(Knows).collect() == []


def back(repository: SqliteRepository) -> Any:
    return people(repository).where(Customer.id == "b").via(Knows, backwards=True)


def step_of(query: Any) -> list[str]:
    """SQLite's plan of the only step."""
    inserts = [s for s in query.explain().facts["statements"] if s["sql"].startswith("INSERT")]
    return [line.strip() for line in inserts[1]["plan"]]


def test_a_step_from_the_right_goes_by_the_index_of_right_keys(
    repository: SqliteRepository, engine: str
) -> None:
    put(repository, customer("a"), customer("b"))
    commit(repository, KNOWS, edge("a", "b"), edge("b", "a"))
    key = "relation_type=? AND right_key" if engine == "v1" else "right_key"
    assert any(
        line.startswith("SEARCH h USING") and f"({key}=?)" in line
        for line in step_of(back(repository))
    )
    assert [p.relations[0].left_key for p in back(repository).collect()] == ["a"]


def test_relations_of_an_older_program_get_the_index_with_their_next_commit(
    repository: SqliteRepository, path: Path
) -> None:
    put(repository, customer("a"), customer("b"))
    commit(repository, KNOWS, edge("a", "b"))
    with sqlite3.connect(path) as connection:
        (index,) = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'index' AND sql LIKE '%right_key%'"
        ).fetchone()
        connection.execute(f'DROP INDEX "{index}"')
    assert sum_of(step_of(back(repository)), "SEARCH r") == 1  # for each relation there is
    assert [p.relations[0].left_key for p in back(repository).collect()] == ["a"]
    commit(repository, KNOWS, edge("b", "b"))
    assert sum_of(step_of(back(repository)), "SEARCH r") == 0
    assert [p.relations[0].left_key for p in back(repository).collect()] == ["a", "b"]


# --- explain ----------------------------------------------------------------------------------


def test_a_plan_is_text_and_facts(repository: SqliteRepository, engine: str) -> None:
    put(repository, customer("a"))
    put(repository, customer("a", name="Bob"))
    query = people(repository).as_of(1).where(Customer.name.startswith("A")).limit(3)
    plan = query.explain()
    facts = json.loads(json.dumps(plan.facts))
    assert facts["engine"] == f"sqlite {engine}"
    assert facts["head"] == 2
    assert facts["window"] == {"upto": 1, "since": 0, "history": False}
    assert facts["query"]["type"] == "Customer"
    assert facts["sql"] == facts["statements"][0]["sql"]
    assert facts["sql"] in plan.text
    assert "the newest version of each identity as of commit 1" in str(plan)
    assert "PRIMARY KEY" in plan.text
    history = people(repository).history_since(1).group_by(Customer.tier)
    assert "all versions after commit 1 up to commit 2" in history.explain(n=count()).text


def test_explaining_does_nothing_else(repository: SqliteRepository) -> None:
    put(repository, customer("a"))
    commit(repository, KNOWS, edge("a", "a"))
    people(repository).via(Knows).explain()
    (lent,) = repository._connections._idle
    assert lent.connection.execute("SELECT count(*) FROM temp.sqlite_master").fetchone() == (0,)


# --- values are values ------------------------------------------------------------------------


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_texts_are_never_sql(repository: SqliteRepository, text: str) -> None:
    put(repository, customer("k" + text, name=text), customer("other", name="other"))
    commit(repository, KNOWS, edge("k" + text, "other"))
    query = people(repository)
    for condition in (Customer.name == text, Customer.id == "k" + text):
        assert [c.id for c in query.where(condition).collect()] == ["k" + text]
        assert query.where(condition).count() == 1
        assert [p.source.id for p in query.where(condition).via(Knows).collect()] == ["k" + text]
    known = Query(repository.executor()).relations(Knows)
    assert len(known.where(left(Knows).name == text).collect()) == 1
    found = repository.executor().endpoints(QuerySpec(KNOWS), "left", pa.array(["k" + text]))
    assert found.num_rows == 1
    with pytest.raises(ValueError, match="no tag "):
        repository.commit_at(text)
    with pytest.raises(ValueError, match="no tag "):
        repository.executor().rows(QuerySpec(CUSTOMER, when=When(as_of=text)))
    assert repository.head_commit_id() == 2


def test_types_and_fields_with_the_names_of_our_own_tables(path: Path, engine: str) -> None:
    class visible(Entity):
        id: Field[str] = Field(primary_key=True)
        rowid: Field[int]
        n: Field[int]
        select: Field[str] = Field(default="x")

    class visible_left(Relation[visible, visible]):
        h: Field[int]

    repository = open_at(path, engine)
    entity, relation = spec_of(visible), spec_of(visible_left)
    commit(repository, entity, *(
        {"entity_key": k, "id": k, "rowid": n, "n": -n, "select": k} for n, k in enumerate("ab")
    ))  # fmt: skip
    commit(repository, relation, edge("b", "a", h=1))
    query = Query(repository.executor())
    made = query.relations(visible_left).where(left(visible_left).rowid == 1)
    assert [(r.h, r.right.select) for r in made.collect()] == [(1, "a")]
    paths = query.entities(visible).order_by(visible.n).via(visible_left).collect()
    assert [p.source.rowid for p in paths] == [1]
    assert query.entities(visible).group_by(visible.select).agg(n=sum(visible.n)).to_pylist() == [
        {"select": "a", "n": 0},
        {"select": "b", "n": -1},
    ]
    repository.close()


# --- limits -----------------------------------------------------------------------------------


def test_a_sum_beyond_64_bits_is_an_overflow(repository: SqliteRepository) -> None:
    biggest = 2**63 - 1
    put(repository, customer("a", age=biggest), customer("b", age=1))
    with pytest.raises(OverflowError, match="does not fit into 64 bits"):
        people(repository).sum(Customer.age)
    with pytest.raises(OverflowError):
        people(repository).group_by(Customer.tier).agg(n=sum(Customer.age))
    assert people(repository).where(Customer.id == "a").sum(Customer.age) == biggest
    put(repository, customer("c", age=-1))
    assert people(repository).sum(Customer.age) == biggest  # whatever the order of adding
    put(repository, customer("c", age=-biggest - 1), customer("d", age=-biggest - 1))
    assert people(repository).sum(Customer.age) == -biggest - 1
    put(repository, customer("e", age=-1))
    with pytest.raises(OverflowError):
        people(repository).sum(Customer.age)
    assert people(repository).where(Customer.age > 5).sum(Customer.age) == biggest
    assert people(repository).where(Customer.id == "nobody").sum(Customer.age) is None


def test_a_filter_that_is_too_large_is_refused_in_words(repository: SqliteRepository) -> None:
    put(repository, customer("a"))
    condition = Or(tuple(Customer.name.contains(str(n)) for n in range(2000)))
    with pytest.raises(ValueError, match="more conditions or values than SQLite takes"):
        people(repository).where(condition).count()
    assert people(repository).where(Customer.id.in_([str(n) for n in range(9999)])).count() == 0


# --- references -------------------------------------------------------------------------------


def test_references_mean_commits(
    repository: SqliteRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        put(repository, customer("a", name=name))
    moments = [c.created_at for n in (1, 2, 3) if (c := repository.get_commit(n))]
    assert [repository.commit_at(n) for n in (-(2**70), -1, 0, 2, 3, 4, 2**70)] == [
        0, 0, 0, 2, 3, 3, 3,
    ]  # fmt: skip
    for n, moment in enumerate(moments, start=1):
        last = max(m for m, other in enumerate(moments, start=1) if other == moment)
        assert repository.commit_at(moment) == last
        assert repository.commit_at(moment.astimezone(tz=None)) == last
        assert repository.commit_at(moment.replace(tzinfo=None)) == last
        assert last >= n
    before, tick = moments[0] - timedelta(microseconds=1), timedelta(days=1)
    assert repository.commit_at(before) == 0
    assert repository.commit_at(datetime.now(UTC) + tick) == 3
    assert people(repository).as_of(before).collect() == []
    assert [c.name for c in people(repository).as_of(moments[2]).collect()] == ["three"]
    with pytest.raises(ValueError, match="no tag 'relaese'"):
        repository.commit_at("relaese")
    monkeypatch.setattr(repository, "_tags", lambda _: {"release": 2, "other": 1})
    assert repository.commit_at("release") == 2
    assert [c.name for c in people(repository).as_of("release").collect()] == ["two"]
    with pytest.raises(ValueError, match="did you mean release"):
        people(repository).as_of("relaese").collect()


# --- what is stored ---------------------------------------------------------------------------


def test_before_activation_an_answer_is_empty_and_says_so(
    repository: SqliteRepository, engine: str
) -> None:
    commit(repository, spec_of(Product), {"entity_key": "p", "sku": "p", "price": 1.0})
    put(repository, customer("a"))
    commit(repository, SUBSCRIPTION, edge("a", "p", seats=1))
    remark = ({"reason": "commit_before_activation", "activation_commit_id": 2},)
    expected = remark if engine == "v2" else ()
    for query in (people(repository).as_of(1), people(repository).as_of(0)):
        found = query.collect()
        assert found == []
        assert found.diagnostics == expected
        assert query.count() == 0
        assert query.explain().facts["diagnostics"] == [dict(r) for r in expected]
    assert people(repository, pinned=1).collect().diagnostics == expected
    assert people(repository).as_of(2).collect().diagnostics == ()
    assert people(repository).with_history().collect().diagnostics == ()
    path = people(repository).as_of(2).via(Subscription).collect()
    assert path == []
    step = ({"reason": "commit_before_activation", "activation_commit_id": 3},)
    assert path.diagnostics == (step if engine == "v2" else ())
    assert people(repository).as_of(1).via(Subscription).collect().diagnostics == expected
    assert len(people(repository).via(Subscription).collect()) == 1


def test_a_type_that_was_never_written_has_no_rows(repository: SqliteRepository) -> None:
    put(repository, customer("a"))
    query = Query(repository.executor())
    assert query.entities(Product).collect() == []
    assert query.entities(Product).count() == 0
    assert query.entities(Product).sum(Product.price) is None
    assert query.entities(Product).group_by(Product.sku).agg(n=count()).num_rows == 0
    assert query.entities(Customer).via(Employment).collect() == []
    assert "nothing to read" in query.entities(Customer).via(Employment).explain().text
    assert query.relations(Subscription).collect().diagnostics == ()


def test_relations_whose_entities_were_never_written_meet_no_condition_on_them(
    repository: SqliteRepository,
) -> None:
    commit(repository, KNOWS, edge("a", "b"))
    query = Query(repository.executor()).relations(Knows)
    assert len(query.collect()) == 1
    for condition in (left(Knows).age.is_null(), ~(left(Knows).tier == "Gold")):
        assert query.where(condition).collect() == []
        assert query.with_history().where(condition).count() == 0


def _other_customer() -> type[Any]:
    class Customer(Entity):
        id: Field[str] = Field(primary_key=True)
        surname: Field[str]

    return Customer


def test_a_class_that_differs_from_the_stored_schema_is_refused(
    repository: SqliteRepository,
) -> None:
    put(repository, customer("a"))
    other = _other_customer()
    spec: TypeSpec = spec_of(other)
    executor = repository.executor()
    asked = QuerySpec(spec)
    for ask in (executor.rows, executor.explain, lambda s: people_of(executor, other).count()):
        with pytest.raises(SchemaOutdatedError, match="surname"):
            ask(asked)
    idle = len(repository._connections._idle)
    assert rows(executor, QuerySpec(CUSTOMER)).num_rows == 1
    assert len(repository._connections._idle) <= idle + 1


def people_of(executor: Any, cls: type[Any]) -> Any:
    return Query(executor).entities(cls)


def test_stored_types_are_queried_without_classes(repository: SqliteRepository) -> None:
    put(repository, customer("a", tier="Gold"), customer("b", tier="Silver"))
    commit(repository, KNOWS, edge("a", "b"))
    known = {spec.name: spec for spec in repository.known_types()}
    assert all(spec.python_class is None for spec in known.values())
    executor = repository.executor()
    assert rows(executor, QuerySpec(known["Customer"], Customer.tier == "Gold")).num_rows == 1
    filtered = QuerySpec(known["Knows"], left(Knows).tier == "Gold")
    assert rows(executor, filtered).num_rows == 1
    found = executor.endpoints(QuerySpec(known["Knows"]), "right", pa.array(["b"]))
    assert found.column("tier").to_pylist() == ["Silver"]
