"""Queries, SQL, pinned views, differences and the change feed, as a session offers them."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from storage_engine import (
    ClosedError,
    ConfigurationError,
    Entity,
    Field,
    OntologiaConfig,
    Ontology,
    SchemaOutdatedError,
    Session,
)
from storage_engine.repository import duck
from tests.runtime.support import Everything, make_storage
from tests.shop import Customer, Product, Subscription


@pytest.fixture
def shop(session: Session) -> Session:
    """Commit 1: three customers, two products, two subscriptions. 2: Ann turns Gold. 3: Cy."""
    session.ensure([Customer(id=k, name=n) for k, n in [("a", "Ann"), ("b", "Bob"), ("c", "Cy")]])
    session.ensure([Product(sku="p", price=1.5), Product(sku="q", price=2.5)])
    session.ensure([Subscription(left_key="a", right_key="p", seats=3)])
    session.ensure([Subscription(left_key="b", right_key="q", seats=5)])
    assert session.commit() == 1
    session.ensure(Customer(id="a", name="Ann", tier="Gold"))
    assert session.commit() == 2
    session.ensure(Customer(id="c", name="Cyrus"))
    assert session.commit() == 3
    return session


def names(found: list[Customer]) -> list[str]:
    return [customer.name for customer in found]


# --- queries ------------------------------------------------------------------------------------


def test_queries_see_what_is_committed(shop: Session) -> None:
    shop.ensure(Customer(id="d", name="Dee"))
    customers = shop.query().entities(Customer)
    assert names(customers.collect()) == ["Ann", "Bob", "Cyrus"]
    shop.commit()
    assert names(customers.collect()) == ["Ann", "Bob", "Cyrus", "Dee"]


def test_a_type_that_was_never_written_is_empty(shop: Session) -> None:
    assert shop.query().entities(Everything).collect() == []
    assert shop.query().entities(Everything).count() == 0
    assert shop.query().entities(Everything).sum(Everything.number) is None


def test_rfc0004_history_since_clamps(shop: Session) -> None:
    people = shop.query().entities(Customer)
    everything = [c.meta().commit_id for c in people.with_history().collect()]
    for below in (-1, -(2**70), 0):
        assert [c.meta().commit_id for c in people.history_since(below).collect()] == everything
    for above in (3, 4, 2**62, 2**70):
        assert people.history_since(above).collect() == []


def test_only_the_types_of_the_session_can_be_asked_for(uri: str) -> None:
    with Session(uri, entity_types=[Customer]) as session:
        assert session.query().entities(Customer).collect() == []
        with pytest.raises(ConfigurationError, match="Product is not among this session's types"):
            session.query().entities(Product)


def test_a_class_that_differs_from_the_stored_one_is_refused(shop: Session) -> None:
    class Other(Entity, name="Customer"):
        id: Field[str] = Field(primary_key=True)
        age: Field[str]

    query = Session(shop.repository.uri).query()
    with pytest.raises(SchemaOutdatedError, match="differs from schema version 1"):
        query.entities(Other).collect()


def test_a_query_ends_with_its_session(uri: str) -> None:
    session = Session(uri)
    session.ensure(Customer(id="a", name="Ann"))
    session.commit()
    query, view = session.query().entities(Customer), session.at(1)
    begun = query.batches()
    session.close()
    for ask in (query.collect, query.count, view.query().entities(Customer).first):
        with pytest.raises(ClosedError, match="session"):
            ask()
    with pytest.raises(ClosedError):
        list(begun)
    with pytest.raises(ClosedError):
        session.query()


def test_an_ontology_answers_without_a_session(uri: str) -> None:
    with Ontology(storage_uri=uri, entity_types=[Customer]) as ontology:
        with ontology.session() as session:
            session.ensure(Customer(id="a", name="Ann"))
        assert names(ontology.query().entities(Customer).collect()) == ["Ann"]
    with pytest.raises(ClosedError):
        ontology.query()


def test_commits_go_on_while_rows_are_read(session: Session) -> None:
    session.ensure([Customer(id=f"{n:05}", name="x") for n in range(5_000)])
    session.commit()
    rows = session.query().entities(Customer).batches()
    first = next(rows)
    session.ensure(Customer(id="new", name="y"))
    session.commit()
    seen = first.num_rows + sum(batch.num_rows for batch in rows)
    assert seen == 5_000
    assert session.query().entities(Customer).count() == 5_001


def test_a_reader_that_stops_early_leaves_the_storage_usable(session: Session) -> None:
    session.ensure([Customer(id=f"{n:05}", name="x") for n in range(5_000)])
    session.commit()
    for _ in range(20):
        next(session.query().entities(Customer).batches())
    stopped = session.query().entities(Customer).objects()
    assert next(stopped).id == "00000"
    stopped.close()  # type: ignore[attr-defined]
    session.ensure(Customer(id="new", name="y"))
    assert session.commit() == 2


def test_threads_ask_at_the_same_time(shop: Session) -> None:
    found: list[int] = []

    def ask() -> None:
        for _ in range(5):
            found.append(shop.query().entities(Customer).where(Customer.name != "Bob").count())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [2] * 20


# --- points in time -----------------------------------------------------------------------------


def test_a_view_stays_the_same(shop: Session) -> None:
    view = shop.at(2)
    assert view.commit_id == 2
    customers = view.query().entities(Customer)
    before = customers.collect()
    shop.ensure(Customer(id="a", name="Anna"))
    shop.commit()
    assert customers.collect() == before
    assert names(before) == ["Ann", "Bob", "Cy"]
    assert [c.meta().commit_id for c in customers.with_history().collect()] == [1, 1, 1, 2]
    assert names(customers.as_of(1).collect()) == ["Ann", "Bob", "Cy"]
    with pytest.raises(ValueError, match="after commit 2, at which this view is pinned"):
        customers.as_of(3).collect()
    assert view.sql("select count(*) as n from Customer where tier = 'Gold'").collect() == [
        {"n": 1}
    ]


def test_instants_mean_the_last_commit_at_or_before(shop: Session) -> None:
    times = {c["id"]: datetime.fromisoformat(c["created_at"]) for c in shop.list_commits()}
    moment = timedelta(microseconds=1)
    assert shop.at(times[2]).commit_id == 2
    assert shop.at(times[1] - moment).commit_id == 0
    assert shop.at(datetime.now(UTC) + timedelta(days=1)).commit_id == 3
    assert shop.at(times[3]).commit_id == 3
    customers = shop.query().entities(Customer)
    assert names(customers.as_of(times[1]).collect()) == ["Ann", "Bob", "Cy"]
    assert customers.as_of(times[1] - moment).collect() == []


def test_references_are_clamped_and_checked(shop: Session) -> None:
    assert [shop.at(n).commit_id for n in (-5, 0, 2, 99)] == [0, 0, 2, 3]
    assert shop.at(0).query().entities(Customer).collect() == []
    with pytest.raises(TypeError, match="at takes a commit id, a datetime or the name of a tag"):
        shop.at(None)  # type: ignore[arg-type]
    for ask in (shop.at, lambda name: shop.query().entities(Customer).as_of(name).collect()):
        with pytest.raises(ValueError, match="no tag "):
            ask("x'; drop table")


def test_reads_before_activation_say_so(shop: Session) -> None:
    shop.ensure(Everything.model_validate(_everything()))
    shop.commit()
    found = shop.query().entities(Everything).as_of(2).collect()
    assert found == []
    v2 = shop.repository.engine_version == "v2"
    expected = {"reason": "commit_before_activation", "activation_commit_id": 4}
    assert [dict(d) for d in found.diagnostics] == ([expected] if v2 else [])
    assert shop.query().entities(Everything).as_of(4).collect().diagnostics == ()


def _everything() -> dict[str, object]:
    return {
        "id": "e",
        "text": "t",
        "number": 1,
        "real": 1.0,
        "flag": True,
        "moment": datetime(2026, 1, 1, tzinfo=UTC),
        "day": "2026-01-01",
        "raw": b"",
    }


# --- SQL ----------------------------------------------------------------------------------------


def test_sql_over_the_latest_rows_of_every_type(shop: Session) -> None:
    joined = shop.sql(
        "select c.name, p.price * s.seats as due from Customer c "
        "join Subscription s on s.left_key = c.id join Product p on p.sku = s.right_key "
        "where c.tier in ($tier, 'Standard') order by c.name",
        {"tier": "Gold"},
    )
    assert joined.collect() == [{"name": "Ann", "due": 4.5}, {"name": "Bob", "due": 12.5}]
    assert joined.to_arrow().column_names == ["name", "due"]
    assert sum(batch.num_rows for batch in joined.batches()) == 2
    assert "JOIN" in joined.explain()
    positional = shop.sql("select count(*) from customer where tier = ?", ["Gold"])
    assert positional.to_arrow().column(0).to_pylist() == [1]


def test_sql_shows_what_there_is(shop: Session) -> None:
    tables = shop.sql("show tables").to_arrow().column(0).to_pylist()
    assert sorted(tables) == ["Customer", "Product", "Subscription"]
    columns = shop.sql("describe Customer").to_arrow().column(0).to_pylist()
    assert columns[:2] == ["commit_id", "entity_key"]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("select * from Custmer", "unknown table 'Custmer', did you mean 'Customer'"),
        ("select nme from Customer", "nme"),
        ("selec 1", "syntax error"),
        ("select 1; drop table Customer", "one statement, not 2"),
        ("", "one statement, not 0"),
        ("drop view Customer", "sql reads only"),
        ("create table Customer (a int)", "sql reads only"),
        ("insert into Customer values (1)", "sql reads only"),
        ("update Customer set name = 'x'", "sql reads only"),
        ("copy Customer to 'x.csv'", "sql reads only"),
        ("attach 'x.db'", "sql reads only"),
        ("set memory_limit = '1GB'", "sql reads only"),
        ("explain analyze copy (select 1) to 'written.csv'", "sql reads only"),
        ("explain /**/ analyze copy (select 1) to 'written.csv'", "sql"),
        ("explain (analyze) copy (select 1) to 'written.csv'", "sql"),
        ("explain analyze create table x as select 1", "sql reads only"),
        ("select cast('x' as int)", "Could not convert"),
        ("select cast(name as int) from Customer", "Could not convert"),
        ("select $a", "a"),
    ],
)
def test_mistakes_in_sql_are_explained(shop: Session, statement: str, message: str) -> None:
    before = shop.query().entities(Customer).to_arrow()
    with pytest.raises(ValueError, match=message):
        shop.sql(statement).collect()
    assert not Path("written.csv").exists()
    assert shop.query().entities(Customer).to_arrow() == before


_LATE_MISTAKE = (
    "select cast(case when i < 500000 then '1' else 'x' end as int) as n from range(600000) t(i)"
)


def test_a_mistake_that_shows_late_is_explained_too(shop: Session) -> None:
    """Rows are under way when the one that cannot be converted comes."""
    rows = shop.sql(_LATE_MISTAKE).batches()
    with pytest.raises(ValueError, match="Could not convert string 'x'"):
        list(rows)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_mistake_is_explained_though_another_thread_was_broken_off_first(
    shop: Session, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """DuckDB then says "Interrupted" one time in twenty, at the first rows or later."""
    read_next, calls = duck._next, 0

    def interrupted(reader: pa.RecordBatchReader) -> pa.RecordBatch | None:
        nonlocal calls
        calls += 1
        if calls == batch:
            raise duckdb.InterruptException("INTERRUPT Error: Interrupted!")
        return read_next(reader)

    monkeypatch.setattr(duck, "_next", interrupted)
    with pytest.raises(ValueError, match="Could not convert string 'x'"):
        list(shop.sql(_LATE_MISTAKE).batches())
    assert calls > batch


def test_plans_of_sql_are_shown(shop: Session) -> None:
    assert shop.sql("explain select * from Customer").collect()
    assert shop.sql("explain analyze select * from Customer").collect()


def test_sql_does_not_see_python_variables(shop: Session) -> None:
    variable = pa.table({"secret": [1]})
    with pytest.raises(ValueError, match="unknown table 'variable'"):
        shop.sql("select * from variable").collect()
    assert variable.num_rows == 1


# --- differences --------------------------------------------------------------------------------


def test_a_diff_names_what_differs(shop: Session) -> None:
    assert shop.diff(1, 3) == [
        {
            "commit_id": 2,
            "kind": "entity",
            "type_name": "Customer",
            "key": "a",
            "operation": "update",
            "before": {"tier": "Standard"},
            "after": {"tier": "Gold"},
        },
        {
            "commit_id": 3,
            "kind": "entity",
            "type_name": "Customer",
            "key": "c",
            "operation": "update",
            "before": {"name": "Cy"},
            "after": {"name": "Cyrus"},
        },
    ]
    inserts = shop.diff(0, 1)
    assert [(d["type_name"], d["operation"], d["before"]) for d in inserts] == (
        [("Customer", "insert", None)] * 3
        + [("Product", "insert", None)] * 2
        + [("Subscription", "insert", None)] * 2
    )
    assert inserts[-1]["left_key"] == "b"
    assert inserts[-1]["after"] == {"seats": 5}
    assert shop.diff(2, 2) == []


def test_what_was_changed_back_does_not_differ(shop: Session) -> None:
    shop.ensure(Customer(id="a", name="Ann"))
    assert shop.commit() == 4
    assert [d["key"] for d in shop.diff(1, 4)] == ["c"]


def test_a_diff_goes_forward(shop: Session) -> None:
    with pytest.raises(ValueError, match=r"diff\(1, 3\)"):
        shop.diff(3, 1)


# --- the change feed ----------------------------------------------------------------------------


def feed(session: Session, since: int | str, limit: int) -> list[tuple[int, str, str, str]]:
    """The whole feed, page by page, each asked for by the cursor of the one before."""
    found = []
    while page := session.changes(since, limit):
        assert len(page) <= limit
        for c in page:
            key = c["key"] if c["kind"] == "entity" else f"{c['left_key']}-{c['right_key']}"
            found.append((c["commit_id"], c["type_name"], key, c["operation"]))
        since = page.cursor
    return found


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 9, 100])
def test_every_change_comes_once_in_order_whatever_the_page(shop: Session, limit: int) -> None:
    assert feed(shop, 0, limit) == [
        (1, "Customer", "a", "insert"),
        (1, "Customer", "b", "insert"),
        (1, "Customer", "c", "insert"),
        (1, "Product", "p", "insert"),
        (1, "Product", "q", "insert"),
        (1, "Subscription", "a-p", "insert"),
        (1, "Subscription", "b-q", "insert"),
        (2, "Customer", "a", "update"),
        (3, "Customer", "c", "update"),
    ]
    assert feed(shop, 1, limit) == [(2, "Customer", "a", "update"), (3, "Customer", "c", "update")]


def test_a_feed_goes_on_where_it_was(shop: Session) -> None:
    page = shop.changes(0)
    assert page.cursor == "3"
    assert shop.changes(page.cursor) == []
    shop.ensure(Product(sku="r", price=9.0))
    shop.commit()
    later = shop.changes(page.cursor)
    assert [(c["commit_id"], c["key"], c["fields"]) for c in later] == [
        (4, "r", {"sku": "r", "price": 9.0})
    ]
    with Session(shop.repository.uri) as other:
        assert other.changes(page.cursor) == later


def test_bad_cursors_and_limits_are_refused(shop: Session) -> None:
    for cursor in ("x", "1/entity", "1/entity/Customer/x"):
        with pytest.raises(ValueError, match="is not a cursor"):
            shop.changes(cursor)
    with pytest.raises(ValueError, match="limit takes a number from 1 on"):
        shop.changes(0, 0)
    assert shop.changes(99) == []
    assert shop.changes(99).cursor == "99"


# --- bounded memory -----------------------------------------------------------------------------


def test_a_storage_larger_than_the_memory_limit_is_read_and_sorted(tmp_path: Path) -> None:
    import pyarrow as pa

    uri = make_storage(tmp_path, "object-v2")
    rows = 200_000
    table = pa.table(
        {
            "id": [f"{(n * 7919) % rows:08}" for n in range(rows)],
            "name": [f"{n:0800}" for n in range(rows)],
            "tier": ["x"] * rows,
            "age": list(range(rows)),
        }
    )
    config = OntologiaConfig(s3_duckdb_memory_limit="128MB")
    with Session(uri, config=config) as session:
        session.ingest(Customer, table)
        session.commit()
        last = -1
        for batch in session.query().entities(Customer).order_by(Customer.age).batches():
            ages = batch.column("age").to_pylist()
            assert ages[0] == last + 1
            last = ages[-1]
        assert last == rows - 1


def test_versions_of_many_rows_that_do_not_fit_into_memory_are_read_and_sorted(
    tmp_path: Path,
) -> None:
    """Which of them is the latest takes a join, and then they are sorted."""
    import pyarrow as pa

    uri = make_storage(tmp_path, "object-v2")
    rows, keys = 60_000, 120_000
    expected: dict[str, int] = {}
    with Session(uri, config=OntologiaConfig(s3_duckdb_memory_limit="40MB")) as session:
        for load in range(4):
            numbers = [(n * 7919 + load * 31) % keys for n in range(rows)]  # in no order
            ids = [f"customer-number-{n:020}" for n in numbers]
            table = pa.table(
                {
                    "id": ids,
                    "name": [f"a name of some length {n % 5000}" for n in numbers],
                    "tier": ["x"] * rows,
                    "age": [load] * rows,
                }
            )
            session.ingest(Customer, table)
            session.commit()
            expected |= dict.fromkeys(ids, load)
        stored = session.query().entities(Customer).to_arrow()
        assert stored.column("id").to_pylist() == sorted(expected)
        assert dict(zip(*(stored.column(c).to_pylist() for c in ("id", "age")), strict=True)) == (
            expected
        )
