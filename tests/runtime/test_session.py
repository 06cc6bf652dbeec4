"""Sessions: intents, commits and what they promise, on every engine."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest

from storage_engine import (
    BatchSizeExceededError,
    ClosedError,
    ConcurrentWriteError,
    ConfigurationError,
    Entity,
    ExpectedVersionMismatchError,
    Field,
    OntologiaConfig,
    Relation,
    Session,
    UninitializedStorageError,
    ValidationError,
)
from storage_engine.repository.protocol import ReadWindow
from tests.runtime.support import OrderPlaced, head, names, read, stored_events
from tests.shop import Customer, Employment, Product, Subscription

ANN = Customer(id="c1", name="Ann", age=30)
BEN = Customer(id="c2", name="Ben")


# --- ensure and commit --------------------------------------------------------------------------


def test_an_ensured_object_is_stored_by_commit(session: Session, uri: str) -> None:
    session.ensure(ANN)
    assert head(uri) == 0

    assert session.commit() == 1
    assert read(uri, Customer) == [ANN]
    assert read(uri, Customer)[0].meta().commit_id == 1


def test_what_is_stored_already_makes_no_commit(session: Session, uri: str) -> None:
    session.ensure([ANN, BEN])
    session.commit()
    session.ensure(BEN)

    assert session.commit() is None
    assert session.commit() is None
    assert head(uri) == 1


def test_a_changed_object_becomes_a_new_version(session: Session, uri: str) -> None:
    session.ensure([ANN, BEN])
    session.commit()
    session.ensure([ANN.replace(name="Anna"), BEN])

    assert session.commit() == 2
    assert names(uri) == {"c1": "Anna", "c2": "Ben"}
    assert session.list_commit_changes(2) == [
        {"kind": "entity", "type_name": "Customer", "key": "c1", "operation": "update"}
    ]
    assert read(uri, Customer, ReadWindow(as_of=1)) == [ANN, BEN]


def test_entities_and_relations_go_out_together(session: Session, uri: str) -> None:
    stint = Employment(left_key="c1", right_key="p1", stint="2020", role="dev")
    session.ensure(
        iter(
            [
                ANN,
                Product(sku="p1", price=9.5),
                Subscription(left_key="c1", right_key="p1", seats=3),
                stint,
                stint.replace(stint="2024", role="lead"),
            ]
        )
    )

    assert session.commit() == 1
    assert read(uri, Subscription) == [Subscription(left_key="c1", right_key="p1", seats=3)]
    assert [(e.stint, e.role) for e in read(uri, Employment)] == [("2020", "dev"), ("2024", "lead")]
    assert session.get_commit(1)["types"] == [  # type: ignore[index]
        "Customer",
        "Employment",
        "Product",
        "Subscription",
    ]


def test_the_last_statement_about_an_identity_wins(session: Session, uri: str) -> None:
    session.ensure(ANN)
    session.ensure(ANN.replace(name="Anna"))
    edge = Subscription(left_key="c1", right_key="p1", seats=1)
    session.ensure([edge, edge.replace(seats=2), edge.replace(seats=3)])
    session.commit()

    assert names(uri) == {"c1": "Anna"}
    assert [e.seats for e in read(uri, Subscription)] == [3]


def test_the_last_statement_wins_across_ensure_and_ingest(session: Session, uri: str) -> None:
    session.ensure([ANN.replace(name="first"), BEN.replace(name="first")])
    session.ingest(
        Customer,
        pa.table({"id": ["c1", "c2", "c3", "c3"], "name": ["second", "second", "third", "fourth"]}),
    )
    session.ensure(BEN.replace(name="last"))

    assert session.commit() == 1
    assert names(uri) == {"c1": "second", "c2": "last", "c3": "fourth"}
    result = session.last_commit
    assert result is not None
    assert [(c.type_name, c.inserted, c.updated) for c in result.changes] == [("Customer", 3, 0)]

    session.ingest(Customer, pa.table({"id": ["c1", "c2"], "name": ["x", "y"]}))
    session.ensure([ANN.replace(name="z")])
    session.ingest(Customer, pa.table({"id": ["c2"], "name": ["last"]}))
    assert session.commit() == 2
    assert names(uri) == {"c1": "z", "c2": "last", "c3": "fourth"}


def test_last_commit_counts_rows_and_attempts(session: Session) -> None:
    session.ensure([ANN, BEN])
    session.commit()
    session.ensure([ANN.replace(age=31), Customer(id="c3", name="Cid")])
    session.commit()
    result = session.last_commit

    assert result is not None
    assert (result.commit_id, result.attempts, result.already_applied) == (2, 1, False)
    assert [(c.inserted, c.updated) for c in result.changes] == [(1, 1)]
    session.ensure(BEN)
    assert session.commit() is None
    assert session.last_commit is result


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("c1", "not str 'c1'"),
        (None, "not NoneType None"),
        (Customer, r"not classes; make an object first: Customer\(\.\.\.\)"),
        ({"id": "c1"}, "not dict"),
        ([ANN, "c2"], "not str 'c2'"),
        (OrderPlaced(order_id="o1"), r"an event goes with commit\(event=\.\.\.\)"),
        (pa.table({"id": ["c1"]}), r"a table goes to ingest\(Type, table\)"),
    ],
)
def test_ensure_refuses_what_is_no_object(local: Session, given: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        local.ensure(given)

    assert local.commit() is None, "nothing of a refused list is kept"


def test_an_object_changed_in_place_is_looked_at_again(local: Session) -> None:
    class Tagged(Entity):
        id: Field[str] = Field(primary_key=True)
        tags: Field[list[str]]

    thing = Tagged(id="t1", tags=["a"])
    local.ensure(thing)
    thing.tags.append(5)  # type: ignore[arg-type]

    with pytest.raises(ValidationError, match="Tagged"):
        local.commit()


# --- limits and failures ------------------------------------------------------------------------


def test_over_the_batch_limit_nothing_is_written(uri: str) -> None:
    session = Session(uri, config=OntologiaConfig(max_batch_size=2))
    session.ensure([ANN, ANN.replace(age=1), BEN])
    assert session.commit() == 1, "an identity counts once"
    session.ensure([ANN, BEN, Product(sku="p1", price=1.0)])

    with pytest.raises(BatchSizeExceededError) as caught:
        session.commit()
    assert (caught.value.size, caught.value.limit) == (3, 2)
    assert head(uri) == 1
    with pytest.raises(BatchSizeExceededError):
        session.commit()
    session.discard()
    assert session.commit() is None
    session.close()


def test_ingested_rows_do_not_count_for_the_batch_limit(uri: str) -> None:
    session = Session(uri, config=OntologiaConfig(max_batch_size=1))
    session.ensure(ANN)
    session.ingest(Customer, pa.table({"id": ["c2", "c3"], "name": ["Ben", "Cid"]}))
    session.ensure(ANN.replace(name="Anna"))

    assert session.commit() == 1
    assert names(uri) == {"c1": "Anna", "c2": "Ben", "c3": "Cid"}
    session.close()


def test_after_a_failed_commit_the_intents_are_still_there(session: Session, uri: str) -> None:
    session.ensure(ANN)
    session.add_commit_meta("why", "test")
    with pytest.raises(ExpectedVersionMismatchError):
        session.commit(expect={Customer: 7})

    assert session.commit() == 1
    assert names(uri) == {"c1": "Ann"}
    assert session.get_commit(1)["metadata"] == {"why": "test"}  # type: ignore[index]


# --- options of a commit ------------------------------------------------------------------------


def test_expect_names_the_commit_that_last_changed_a_type(session: Session, uri: str) -> None:
    session.ensure(ANN)
    assert session.commit(expect={Customer: 0, "Customer": 0}) == 1
    session.ensure(Product(sku="p1", price=1.0))
    assert session.commit(expect={Customer: 1}) == 2
    session.ensure(ANN.replace(age=5))

    with pytest.raises(ExpectedVersionMismatchError) as caught:
        session.commit(expect={"Customer": 1, Product: 1})
    assert (caught.value.type, caught.value.expected, caught.value.actual) == ("Product", 1, 2)
    assert head(uri) == 2
    assert session.commit(expect={"Customer": 1, Product: 2}) == 3


@pytest.mark.parametrize(
    ("expect", "said"),
    [
        ({"Nobody": 1}, "'Nobody' is not a type of this session"),
        ({int: 1}, "not an Entity or Relation class"),
        ({Customer: -1}, "Customer needs a commit id"),
        ({Customer: "1"}, "Customer needs a commit id"),
        ([Customer], "expect takes a mapping"),
    ],
)
def test_a_bad_expect_is_refused(local: Session, expect: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        local.commit(expect=expect)


def test_integer_idempotency_versions_only_grow(session: Session, uri: str) -> None:
    session.ensure(ANN)
    assert session.commit(idempotency=("loader", 5)) == 1
    session.ensure(BEN)
    assert session.commit(idempotency=("loader", 5)) == 1
    assert session.last_commit is not None
    assert session.last_commit.already_applied
    session.ensure(BEN)
    assert session.commit(idempotency=("loader", 3)) == 1
    assert names(uri) == {"c1": "Ann"}

    session.ensure(BEN)
    assert session.commit(idempotency=("other", 1)) == 2
    session.ensure(BEN.replace(name="Benn"))
    assert session.commit(idempotency=("loader", 6)) == 3
    assert names(uri) == {"c1": "Ann", "c2": "Benn"}


def test_text_idempotency_versions_are_compared_with_the_last(session: Session, uri: str) -> None:
    session.ensure(ANN)
    assert session.commit(idempotency=("run", "a")) == 1
    session.ensure(BEN)
    assert session.commit(idempotency=("run", "a")) == 1
    session.ensure(BEN)
    assert session.commit(idempotency=("run", "b")) == 2
    assert names(uri) == {"c1": "Ann", "c2": "Ben"}


@pytest.mark.parametrize("unit", [("a" * 1025, 1), ("run", "é" * 513)])
def test_the_name_of_a_unit_of_work_is_bounded(session: Session, unit: tuple[str, int]) -> None:
    """Head carries those of units that changed nothing, hundreds of them."""
    with pytest.raises(ConfigurationError, match="more than 1024 bytes"):
        session.commit(idempotency=unit)
    assert session.commit(idempotency=("a" * 1024, "b" * 1024)) is None


def test_an_applied_unit_of_work_is_recognised_by_another_session(uri: str) -> None:
    for _ in range(2):
        with Session(uri) as session:
            session.ingest(Customer, pa.table({"id": ["c1"], "name": ["Ann"]}))
            assert session.commit(idempotency=("job", 1)) == 1
    assert head(uri) == 1


@pytest.mark.parametrize(
    ("idempotency", "said"),
    [
        ("job", "takes a pair"),
        (("job",), "takes a pair"),
        (("", 1), "non-empty str"),
        ((5, 1), "non-empty str"),
        (("job", True), "int of 64 bits or a str"),
        (("job", 1.5), "int of 64 bits or a str"),
        (("job", 2**63), "int of 64 bits or a str"),
    ],
)
def test_a_bad_idempotency_key_is_refused(local: Session, idempotency: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        local.commit(idempotency=idempotency)


def test_snapshot_isolation_sees_the_other_writer(uri: str) -> None:
    with Session(uri) as first:
        first.ensure([ANN, BEN])
    mine, theirs = Session(uri), Session(uri)
    assert mine.snapshot == 1
    theirs.ensure(ANN.replace(name="theirs"))
    assert theirs.commit(isolation="snapshot") == 2

    mine.ensure(ANN.replace(name="mine"))
    with pytest.raises(ConcurrentWriteError) as caught:
        mine.commit(isolation="snapshot")
    assert (caught.value.type, caught.value.identities) == ("Customer", ["c1"])
    assert caught.value.snapshot == 1
    assert names(uri) == {"c1": "theirs", "c2": "Ben"}

    mine.discard()
    mine.ensure(BEN.replace(name="mine"))
    assert mine.commit(isolation="snapshot") == 3, "other identities do not conflict"
    assert mine.snapshot == 3
    mine.ensure(BEN.replace(name="mine again"))
    assert mine.commit(isolation="snapshot") == 4, "own commits are no conflict"
    mine.close()
    theirs.close()


def test_snapshot_isolation_covers_ingested_rows_and_relations(uri: str) -> None:
    edge = Subscription(left_key="c1", right_key="p1", seats=1)
    mine, theirs = Session(uri), Session(uri)
    mine.ingest(Subscription, pa.table({"left_key": ["c1"], "right_key": ["p1"], "seats": [9]}))
    theirs.ensure([edge])
    theirs.commit()

    with pytest.raises(ConcurrentWriteError) as caught:
        mine.commit(isolation="snapshot")
    assert caught.value.identities == [("c1", "p1", "")]
    assert mine.commit() == 2, "without isolation the last writer wins"
    assert [e.seats for e in read(uri, Subscription)] == [9]
    mine.close()
    theirs.close()


def test_without_isolation_both_commits_land(uri: str) -> None:
    mine, theirs = Session(uri), Session(uri)
    mine.ensure(ANN)
    theirs.ensure(BEN)

    assert (theirs.commit(), mine.commit()) == (1, 2)
    assert names(uri) == {"c1": "Ann", "c2": "Ben"}
    mine.close()
    theirs.close()


def test_an_unknown_isolation_is_refused(local: Session) -> None:
    with pytest.raises(ConfigurationError, match="'serializable' is unknown"):
        local.commit(isolation="serializable")  # type: ignore[arg-type]


def test_commit_metadata_is_kept_with_the_commit(session: Session) -> None:
    session.ensure(ANN)
    session.add_commit_meta("by", "tests")
    session.add_commit_meta("why", "first")
    session.commit(meta={"why": "second"})
    session.ensure(BEN)
    session.commit()

    assert session.get_commit(1)["metadata"] == {"by": "tests", "why": "second"}  # type: ignore[index]
    assert session.get_commit(2)["metadata"] == {}, "it belongs to one commit"  # type: ignore[index]


def test_commit_metadata_is_text(local: Session) -> None:
    with pytest.raises(ConfigurationError, match="value for 'rows' must be a str, not int 5"):
        local.add_commit_meta("rows", 5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the key must be a str"):
        local.commit(meta={1: "x"})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="mapping of str to str"):
        local.commit(meta="x")  # type: ignore[arg-type]


# --- events -------------------------------------------------------------------------------------


def test_events_ride_in_the_commit(uri: str) -> None:
    placed = [OrderPlaced(order_id="o1"), OrderPlaced(order_id="o2", priority=7)]
    with Session(uri, namespace="sales") as session:
        session.ensure(ANN)
        assert session.commit(event=placed) == 1
        assert stored_events(uri, 1) == [event.envelope("sales") for event in placed]
        assert session.commit(event=placed[0]) == 2, "an event alone is a commit"
        assert stored_events(uri, 2) == [placed[0].envelope("sales")]
        assert OrderPlaced.from_envelope(stored_events(uri, 2)[0]) == placed[0]
        assert session.list_commit_changes(2) == []


@pytest.mark.parametrize("event", ["o1", OrderPlaced, ANN, [ANN], {"order_id": "o1"}, 5])
def test_only_events_are_sent(local: Session, event: Any) -> None:
    with pytest.raises(ConfigurationError, match="takes Event objects"):
        local.commit(event=event)


# --- looking ------------------------------------------------------------------------------------


def test_commits_are_listed_newest_first(session: Session) -> None:
    for age in range(4):
        session.ensure(ANN.replace(age=age))
        session.commit()

    assert [c["id"] for c in session.list_commits()] == [4, 3, 2, 1]
    assert [c["id"] for c in session.list_commits(limit=2)] == [4, 3]
    assert [c["id"] for c in session.list_commits(since_commit_id=2)] == [4, 3]
    assert session.list_commits(limit=1) == [session.get_commit(4)]
    assert set(session.list_commits()[0]) == {
        "id",
        "parent_id",
        "created_at",
        "runtime_id",
        "kind",
        "metadata",
        "types",
        "rows",
    }
    assert session.list_commits()[0]["rows"] == {"Customer": 1}
    assert session.get_commit(5) is None
    assert session.list_commit_changes(5) == []
    assert session.storage_info()["head_commit_id"] == 4


# --- types --------------------------------------------------------------------------------------


def test_given_types_are_the_only_ones(uri: str) -> None:
    session = Session(uri, entity_types=[Customer], relation_types=[Subscription])
    session.ensure([ANN, Subscription(left_key="c1", right_key="p1", seats=1)])
    with pytest.raises(ConfigurationError, match=r"Product is not among .* entity_types"):
        session.ensure(Product(sku="p1", price=1.0))
    with pytest.raises(ConfigurationError, match="relation_types"):
        session.ingest(Employment, pa.table({"left_key": ["c1"]}))

    assert session.commit(expect={"Subscription": 0}) == 1
    session.close()


def test_an_entity_and_a_relation_may_share_a_name(session: Session) -> None:
    """They are kept apart by kind, in the storage and in a session; a name alone is ambiguous."""

    class Edge(Relation[Product, Product], name="Customer"):
        weight: Field[int]

    session.ensure([ANN, Edge(left_key="p", right_key="q", weight=1)])
    assert session.commit() == 1
    session.ensure([ANN, Edge(left_key="p", right_key="q", weight=2)])
    assert session.commit(expect={Customer: 1, Edge: 1}) == 2
    with pytest.raises(ConfigurationError, match="an entity type and a relation type"):
        session.commit(expect={"Customer": 1})
    session.discard()
    assert [c.id for c in session.query().entities(Customer).collect()] == [ANN.id]
    assert [e.weight for e in session.query().relations(Edge).collect()] == [2]
    rows = session.sql('select weight, name from "relation:Customer", "entity:Customer"').collect()
    assert rows == [{"weight": 2, "name": ANN.name}]
    assert [(c["kind"], c["type_name"]) for c in session.diff(1, 2)] == [("relation", "Customer")]


def test_two_classes_with_one_name_are_refused(local: Session) -> None:
    class Other(Entity, name="Customer"):
        id: Field[str] = Field(primary_key=True)

    class Lower(Entity, name="customer"):
        id: Field[str] = Field(primary_key=True)

    class LowerEdge(Relation[Product, Product], name="customer"):
        pass

    local.ensure(ANN)
    with pytest.raises(ConfigurationError, match="two classes are stored as Customer"):
        local.ensure(Other(id="o1"))
    with pytest.raises(ConfigurationError, match="differ in case only"):
        local.ensure(Lower(id="o1"))
    with pytest.raises(ConfigurationError, match="differ in case only"):
        local.ensure(LowerEdge(left_key="a", right_key="b"))
    with pytest.raises(ConfigurationError, match="two classes are stored as Customer"):
        Session(":memory:", entity_types=[Customer, Other])
    assert local.commit() == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"entity_types": [Subscription]}, "entity_types takes Entity classes"),
        ({"relation_types": [Customer]}, "relation_types takes Relation classes"),
        ({"entity_types": Customer}, "takes a list of classes"),
        ({"entity_types": ["Customer"]}, "not 'Customer'"),
        ({"namespace": "a/b"}, "namespace 'a/b'"),
        ({"namespace": ""}, "namespace ''"),
        ({"instance_metadata": {"pid": 5}}, "must be a str"),
    ],
)
def test_bad_session_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Session(":memory:", **options)


# --- lifetime -----------------------------------------------------------------------------------


def test_leaving_the_block_commits_and_closes(uri: str) -> None:
    with Session(uri) as session:
        session.ensure(ANN)
        session.commit()
        session.ensure(BEN)

    assert names(uri) == {"c1": "Ann", "c2": "Ben"}
    assert head(uri) == 2
    with pytest.raises(ClosedError):
        session.ensure(ANN)


def test_an_exception_discards_and_closes(uri: str) -> None:
    session = Session(uri)

    def block() -> None:
        with session:
            session.ensure(ANN)
            session.commit()
            session.ensure(BEN)
            raise KeyError("user code")

    with pytest.raises(KeyError, match="user code"):
        block()
    assert names(uri) == {"c1": "Ann"}
    with pytest.raises(ClosedError):
        session.commit()


def test_a_commit_that_fails_at_the_end_of_the_block_is_raised(uri: str) -> None:
    config = OntologiaConfig(max_batch_size=1)
    with pytest.raises(BatchSizeExceededError), Session(uri, config=config) as session:
        session.ensure([ANN, BEN])

    assert head(uri) == 0
    with pytest.raises(ClosedError):
        session.flush()


def test_a_caught_conflict_is_not_overwritten_when_the_block_ends(uri: str) -> None:
    mine, theirs = Session(uri), Session(uri)

    def block() -> None:
        with mine:
            mine.ensure(ANN.replace(name="mine"))
            theirs.ensure(ANN.replace(name="theirs"))
            theirs.commit()
            with pytest.raises(ConcurrentWriteError):
                mine.commit(isolation="snapshot")

    with pytest.raises(ConcurrentWriteError):
        block()
    assert names(uri) == {"c1": "theirs"}
    theirs.close()


def test_a_failed_commit_is_tried_again_as_it_was_when_the_block_ends(uri: str) -> None:
    event = OrderPlaced(order_id="o1")
    with Session(uri) as session, Session(uri) as other:
        session.ensure(ANN)
        with pytest.raises(ExpectedVersionMismatchError):
            session.commit(event, expect={Product: 1}, meta={"why": "test"})
        other.ensure(Product(sku="p1", price=1.0))
        other.commit()

    assert names(uri) == {"c1": "Ann"}
    assert stored_events(uri, 2) == [event.envelope("default")]


def test_a_caught_failure_can_be_dropped(uri: str) -> None:
    with Session(uri) as session:
        session.ensure(ANN)
        with pytest.raises(ExpectedVersionMismatchError):
            session.commit(expect={Product: 1})
        session.discard()
    assert head(uri) == 0


def test_close_drops_what_is_pending(uri: str) -> None:
    session = Session(uri)
    session.ensure(ANN)
    session.close()
    session.close()

    assert head(uri) == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s.ensure(ANN),
        lambda s: s.ingest(Customer, pa.table({"id": ["c1"], "name": ["Ann"]})),
        lambda s: s.commit(),
        lambda s: s.discard(),
        lambda s: s.flush(),
        lambda s: s.add_commit_meta("a", "b"),
        lambda s: s.list_commits(),
        lambda s: s.get_commit(1),
        lambda s: s.list_commit_changes(1),
        lambda s: s.storage_info(),
        lambda s: s.snapshot,
        lambda s: s.__enter__(),
    ],
)
def test_a_closed_session_says_so(local: Session, use: Any) -> None:
    local.close()
    with pytest.raises(ClosedError, match="this session was closed; open a new one"):
        use(local)


def test_an_object_storage_must_be_initialised(tmp_path: Any) -> None:
    with pytest.raises(UninitializedStorageError, match="onto init"):
        Session(f"file://{tmp_path}/nothing")


def test_a_sqlite_storage_is_created_by_its_first_commit(tmp_path: Any) -> None:
    path = tmp_path / "new.db"
    with Session(path) as session:
        assert session.commit() is None
        assert session.list_commits() == []
        assert not path.exists()
        session.ensure(ANN)
    assert names(str(path)) == {"c1": "Ann"}


def test_a_source_cannot_use_the_session_that_reads_it(local: Session) -> None:
    schema = pa.schema([("id", pa.string()), ("name", pa.string())])

    def rows() -> Any:
        local.ensure(ANN)
        yield pa.record_batch([["c2"], ["Ben"]], schema=schema)

    local.ingest(Customer, pa.RecordBatchReader.from_batches(schema, rows()))
    with pytest.raises(ConfigurationError, match="use another session"):
        local.commit()
    local.discard()
    local.ensure(ANN)
    assert local.commit() == 1


def test_threads_that_share_a_session_wait_for_each_other(session: Session, uri: str) -> None:
    def work(number: int) -> None:
        for item in range(5):
            session.ensure(Customer(id=f"{number}-{item}", name="x"))
            session.commit()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(names(uri)) == 20
