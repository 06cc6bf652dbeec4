"""Writing DataFrames: what arrives is what was given, and only what differs is published."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from storage_engine import (
    ConfigurationError,
    Entity,
    Event,
    Field,
    LockContentionError,
    OntologiaConfig,
    Session,
    StorageBackendError,
    UnsupportedEngineError,
    ValidationError,
    initialize_storage,
)
from storage_engine.events.protocol import open_event_store
from storage_engine.model import TypeSpec, spec_of
from storage_engine.model.expectations import parse_expectation
from storage_engine.repository import open_repository
from storage_engine.runtime.core import internals
from storage_engine.spark import (
    WriteProgress,
    publish,
    write_entities,
    write_relations,
    write_type,
    writer,
)
from tests.engines import (
    CUSTOMER,
    EMPLOYMENT,
    EVERYTHING,
    SUBSCRIPTION,
    Customer,
    Employment,
    Everything,
    Knows,
    Storage,
    Subscription,
    new_storage,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]  # the JVM may have to wait its turn

CUSTOMERS = "id string, name string, age int"


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    uri = str(tmp_path / "onto")
    initialize_storage(uri, "v2")
    with Session(uri) as made:
        yield made


@pytest.fixture(params=["directory-v2", pytest.param("seaweedfs-v2", marks=pytest.mark.s3)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    made = new_storage(request.param, request, tmp_path)
    initialize_storage(made.uri, made.engine_version, made.config())
    return made


def rows(session: Session, spec: TypeSpec, *names: str) -> list[tuple[Any, ...]]:
    stored = session.repository.read(spec)
    return sorted(zip(*(stored.column(name).to_pylist() for name in names), strict=True))


def customers(session: Session) -> list[tuple[Any, ...]]:
    return rows(session, CUSTOMER, "id", "name", "age")


# -- round trips ----------------------------------------------------------------------------------

EVERY_COLUMN = (
    "id string, text string, number bigint, real double, flag boolean, moment timestamp, day date,"
    " raw binary, maybe string, maybe_number bigint, tags array<string>, counts map<string,int>,"
    " mixed string, anything string"
)
MOMENT = datetime(2026, 11, 16, 1, 2, 3, 456789, tzinfo=UTC)
EVERY_ROW: list[tuple[Any, ...]] = [
    ("a", "ä€😀", 2**62, 0.1, True, MOMENT, date(1, 1, 1), b"\x00\xff", None, None, ["x", "y"],
     {"k": 1}, "text", '{"b": [1, null]}'),
    ("b", "", -1, -0.0, False, datetime(1969, 12, 31, tzinfo=UTC), date(9999, 12, 31), b"", "",
     7, [], {}, "", None),
]  # fmt: skip


def test_round_trips(spark: SparkSession, storage: Storage) -> None:
    """All field types, keyed and unkeyed relations, equal to what a session writes of the same."""
    every = spark.createDataFrame(EVERY_ROW, EVERY_COLUMN)
    edges = [("c1", "p1", "s1", "cook"), ("c1", "p1", "s2", "chef"), ("c2", "p1", "s1", "cook")]
    keyed = spark.createDataFrame(
        edges, "left_key string, right_key string, stint string, role string"
    )
    unkeyed = spark.createDataFrame(
        [("c1", "p1", 3), ("c2", "p9", 4)], "left_key string, right_key string, seats int"
    )
    bare = unkeyed.select("left_key", "right_key")
    with Session(storage.uri, config=storage.config()) as session:
        written = write_entities(every, Everything, session)
        assert (written.commit_id, written.inserted, written.files) == (1, 2, 1)
        assert write_relations(keyed, Employment, session).inserted == 3
        assert write_relations(unkeyed, Subscription, session).inserted == 2
        assert write_type(bare, Knows, session).inserted == 2
        same = [
            write_type(every.repartition(3), Everything, session),
            write_type(keyed, spec_of(Employment), session),
            write_type(unkeyed, Subscription, session),
            write_type(bare, Knows, session),
        ]
        assert [(w.commit_id, w.unchanged, w.type_commit_id) for w in same] == [
            (None, 2, 1), (None, 3, 2), (None, 2, 3), (None, 2, 4),
        ]  # fmt: skip

        # The session finds nothing to change in it, and gives back equal objects.
        values = ["id", "text", "number", "real", "flag", "moment", "day", "raw", "maybe"]
        objects = [
            Everything(
                **dict(zip(values, row, strict=False)),
                maybe_number=row[9], tags=row[10], counts=row[11], mixed=row[12],
                anything={"b": [1, None]} if row[13] else None,
            )
            for row in EVERY_ROW
        ]  # fmt: skip
        session.ensure(objects)
        session.ensure(Employment(left_key=a, right_key=b, stint=s, role=r) for a, b, s, r in edges)
        assert session.commit() is None
        assert (
            sorted(session.query().entities(Everything).collect(), key=lambda o: str(o.id))
            == objects
        )

        one = spark.createDataFrame([("c1", "p1", "s1", "head cook")], keyed.schema)
        assert write_relations(one, Employment, session).updated == 1
        assert rows(session, EMPLOYMENT, "left_key", "instance_key", "role") == [
            ("c1", "s1", "head cook"), ("c1", "s2", "chef"), ("c2", "s1", "cook"),
        ]  # fmt: skip
        assert rows(session, SUBSCRIPTION, "left_key", "instance_key", "seats") == [
            ("c1", "", 3), ("c2", "", 4),
        ]  # fmt: skip
        tagged = spark.createDataFrame([("b", ["new"])], "id string, tags array<string>")
        wide = every.drop("tags").join(tagged, "id").select(*every.columns)
        assert write_entities(wide, Everything, session).updated == 1
        assert rows(session, EVERYTHING, "id", "tags") == [("a", '["x","y"]'), ("b", '["new"]')]


@pytest.mark.parametrize("storage", ["directory-v2"], indirect=True)
def test_any_number_of_partitions(
    spark: SparkSession, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small tasks make one file; large ones make files of the target size. None makes none."""
    wide = spark.range(0, 3000).selectExpr(
        "format_string('c%05d', id) id", "repeat(uuid(), 3) name"
    )
    with Session(storage.uri, config=storage.config()) as session:
        empty = spark.createDataFrame([], CUSTOMERS)
        assert write_entities(empty, Customer, session).commit_id is None
        for partitions, commit_id in ((200, 1), (1, 2), (2, 3)):
            df = spark.range(0, 300, 1, partitions).selectExpr(
                "format_string('c%05d', id) id", f"'in {partitions}' name", "cast(null as int) age"
            )
            written = write_entities(df, Customer, session)
            assert (written.commit_id, written.rows, written.files) == (commit_id, 300, 1)
            assert written.inserted + written.updated == 300
            assert customers(session)[299] == ("c00299", f"in {partitions}", None)
        assert write_entities(empty, Customer, session).commit_id is None

        monkeypatch.setattr(writer, "LOOSE_BYTES", 0)
        batch = "spark.sql.execution.arrow.maxRecordsPerBatch"
        before = spark.conf.get(batch)
        spark.conf.set(batch, "200")  # a part ends with a batch
        try:
            many = write_entities(
                wide.repartition(2), Customer, session, target_part_bytes=64 * 1024
            )
        finally:
            spark.conf.set(batch, str(before))
        assert (many.updated, many.inserted) == (300, 2700)
        assert many.files > 4
        assert len(customers(session)) == 3000
        again = write_entities(
            spark.createDataFrame(customers(session), CUSTOMERS), Customer, session
        )
        assert (again.commit_id, again.unchanged) == (None, 3000)


# -- what differs ---------------------------------------------------------------------------------


def test_only_what_differs_and_only_once(spark: SparkSession, session: Session) -> None:
    stated = [(f"c{n:03d}", f"name {n}", n if n % 2 else None) for n in range(100)]
    df = spark.createDataFrame(stated, CUSTOMERS).repartition(3)
    seen: list[WriteProgress] = []
    first = write_entities(
        df, Customer, session, idempotency=("crm", 1), meta={"run": "7"}, progress=seen.append
    )
    assert (first.commit_id, first.rows, first.inserted) == (1, 100, 100)
    assert customers(session) == stated
    assert seen[0].stage == "reconcile"
    assert seen[-1] == WriteProgress("publish", 1, 1)
    commit = session.get_commit(1)
    assert commit is not None
    assert commit["metadata"] == {"run": "7"}

    again = write_entities(df.limit(1), Customer, session, idempotency=("crm", 1))
    assert (again.already_applied, again.commit_id, again.type_commit_id) == (True, 1, 1)

    stated[5] = ("c005", "changed", None)
    stated.append(("c100", "new", 7))
    changed = write_entities(spark.createDataFrame(stated, CUSTOMERS), Customer, session)
    assert (changed.inserted, changed.updated, changed.unchanged) == (1, 1, 99)
    assert changed.commit_id == changed.type_commit_id == 2
    assert customers(session) == stated
    third = write_entities(df.filter("id = 'c005'"), Customer, session)
    assert (third.updated, third.commit_id) == (1, 3)
    latest = write_entities(df, Customer, session)
    assert (latest.commit_id, latest.unchanged) == (None, 100)


class Pair(Entity):
    id: Field[str] = Field(primary_key=True)
    one: Field[str | None] = Field(default=None)
    other: Field[str | None] = Field(default=None)


def test_a_null_that_moves_is_a_change(spark: SparkSession, session: Session) -> None:
    columns = "id string, one string, other string"
    write_entities(spark.createDataFrame([("a", "v", None), ("b", "", "")], columns), Pair, session)
    moved = spark.createDataFrame([("a", None, "v"), ("b", "", None)], columns)
    assert write_entities(moved, Pair, session).updated == 2


@pytest.mark.parametrize("looks", ["driver", "spark"])
def test_repeated_identities_and_the_order_column(
    spark: SparkSession, session: Session, monkeypatch: pytest.MonkeyPatch, looks: str
) -> None:
    """`looks`: who looks for them among staged parts, which depends on how much there is."""
    if looks == "spark":
        monkeypatch.setattr(publish, "DRIVER_ROWS", 0)
    twice = spark.createDataFrame(
        [("a", "x", 1), ("a", "y", 2), ("a", "y", 2), ("b", "old", None), ("b", "new", 1)],
        CUSTOMERS,
    )
    with pytest.raises(ValidationError, match="more than once in the input, for example 'a', 'b'"):
        write_entities(twice, Customer, session)
    assert session.repository.head_commit_id() == 0
    newest = write_entities(twice, Customer, session, order_by="age")
    assert (newest.rows, newest.inserted, newest.duplicates) == (5, 2, 3)
    assert customers(session) == [("a", "y", 2), ("b", "new", 1)]

    late = [("a", "late", 1), ("a", "null", None), ("b", "newer", 2), ("c", "first", None)]
    replayed = write_entities(
        spark.createDataFrame(late, CUSTOMERS), Customer, session, order_by="age"
    )
    assert (replayed.updated, replayed.inserted, replayed.stale, replayed.duplicates) == (
        1,
        1,
        1,
        1,
    )
    assert customers(session) == [("a", "y", 2), ("b", "newer", 2), ("c", "first", None)]
    torn = spark.createDataFrame([("d", "one", 5), ("d", "other", 5)], CUSTOMERS)
    with pytest.raises(ValidationError, match="more than once"):
        write_entities(torn, Customer, session, order_by="age")
    with pytest.raises(ConfigurationError, match="'seats' is no field of Customer"):
        write_entities(torn, Customer, session, order_by="seats")
    edges = [("c1", "p1", "s1", "a"), ("c1", "p1", "s2", "b"), ("c1", "p1", "s1", "c")]
    keyed = spark.createDataFrame(
        edges, "left_key string, right_key string, stint string, role string"
    )
    with pytest.raises(ValidationError, match=r"example \('c1', 'p1', 's1'\); nothing"):
        write_relations(keyed, Employment, session)
    assert write_relations(keyed.limit(2), Employment, session).inserted == 2


def test_a_dry_run_tells_what_would_happen(spark: SparkSession, session: Session) -> None:
    def preview(*rows: tuple[Any, ...], **options: Any) -> Any:
        df = spark.createDataFrame(list(rows), CUSTOMERS)
        return write_entities(df, Customer, session, dry_run=True, **options)

    fine = preview(("a", "x", 1), ("b", "y", None))
    assert (fine.inserted, fine.commit_id, fine.problem) == (2, None, None)
    twice = preview(("a", "x", 1), ("a", "y", 2), ("b", "y", None))
    assert twice.problem is not None
    assert "1 row with an identity that another one has" in twice.problem
    newest = preview(("a", "x", 1), ("a", "y", 2), order_by="age")
    assert (newest.inserted, newest.duplicates, newest.problem) == (1, 1, None)
    bad = ("c", None, 1)
    stopped = preview(("a", "x", 1), bad)
    assert stopped.problem is not None
    assert "1 row cannot be written" in stopped.problem
    aside = preview(("a", "x", 1), bad, on_bad_rows="quarantine")
    assert (aside.inserted, aside.quarantined, aside.problem) == (1, 1, None)
    assert session.repository.head_commit_id() == 0


# -- what does not fit ----------------------------------------------------------------------------


def test_columns_that_do_not_fit_are_listed_at_once(spark: SparkSession, session: Session) -> None:
    df = spark.createDataFrame([("a", 1, "x", 2)], "id string, name int, age string, extra int")
    with pytest.raises(ValidationError) as caught:
        write_entities(df, Customer, session)
    for said in ("'name' is int32", "'age' is string", "'extra'"):
        assert said in str(caught.value)
    with pytest.raises(ConfigurationError, match="use write_relations"):
        write_entities(df, Subscription, session)
    with pytest.raises(ConfigurationError, match="unexpected keyword"):
        write_entities(df, Customer, session, orderby="age")


BAD = [
    ("a", "fine", 1.0),
    (None, "no key", 1.0),
    ("", "empty key", 1.0),
    ("d", None, 1.0),
    ("e", "not whole", 1.5),
    ("f", "fine", None),
    ("g", "too old", 200.0),
]


def test_bad_rows_stop_or_are_set_aside(spark: SparkSession, session: Session) -> None:
    df = spark.createDataFrame(BAD, "id string, name string, age double").repartition(2)
    expected = [parse_expectation({"range": {"column": "age", "max": 150}})]
    with pytest.raises(ValidationError) as caught:
        write_entities(df, Customer, session, expectations=expected)
    for said in ("5 rows cannot be written", "column 'id' is null in 1 row", "'id' is empty"):
        assert said in str(caught.value)
    for said in ("'name' is null", "'age' is not a whole number", "Nothing was published"):
        assert said in str(caught.value)
    assert session.repository.head_commit_id() == 0

    def aside(**options: Any) -> Any:
        return write_entities(
            df, Customer, session, expectations=expected, on_bad_rows="quarantine", **options
        )

    written = aside(meta={"run": "7"})
    assert (written.inserted, written.quarantined, written.rows) == (2, 5, 7)
    assert customers(session) == [("a", "fine", 1), ("f", "fine", None)]
    assert sum(written.reasons.values()) == 5
    assert written.quarantine is not None
    side = pq.read_table(written.quarantine.removeprefix("file://")).to_pylist()
    found = {row["row"]: row["reasons"] for row in side}
    assert found['{"id": "e", "name": "not whole", "age": 1.5}'] == [
        "column 'age' is not a whole number"
    ]
    assert found['{"id": "g", "name": "too old", "age": 200.0}'] == [expected[0].describe()]
    assert {row["type_name"] for row in side} == {"Customer"}
    assert dict(side[0]["job"]) == {"run": "7"}

    again = aside()  # bad rows are no less bad when the others are stored already
    assert (again.commit_id, again.unchanged, again.quarantined) == (None, 2, 5)


def test_a_side_table_of_ones_own_and_native_rows(
    spark: SparkSession, session: Session, tmp_path: Path
) -> None:
    """Here columns have the declared types, so that Catalyst compares them by itself."""
    stated = [("a", "x", 1), (None, "y", 2), ("c", None, 3), ("d", "z", 4)]
    df = spark.createDataFrame(stated, CUSTOMERS)
    place = str(tmp_path / "aside")
    for stored in (0, 2):
        written = write_entities(df, Customer, session, on_bad_rows="quarantine", quarantine=place)
        assert (written.inserted, written.unchanged) == (2 - stored, stored)
        assert (written.quarantined, written.quarantine) == (2, place)
    assert len(pq.read_table(place)) == 4
    twice = spark.createDataFrame([("e", "x", 1), ("e", "y", 1), (None, "", 1)], CUSTOMERS)
    with pytest.raises(ValidationError, match="more than once"):
        write_entities(twice, Customer, session, on_bad_rows="quarantine", quarantine=place)
    assert len(pq.read_table(place)) == 4, "a write that failed has set nothing aside"


def test_bad_rows_do_not_speak_for_good_ones_beside_them(
    spark: SparkSession, session: Session
) -> None:
    """Whatever identity a bad row claims, the others of that identity are judged without it."""
    expected = [parse_expectation({"pattern": {"column": "name", "pattern": "[a-z ]*"}})]

    def write(*rows: tuple[Any, ...], **options: Any) -> Any:
        df = spark.createDataFrame(list(rows), CUSTOMERS)
        return write_entities(
            df, Customer, session, on_bad_rows="quarantine", expectations=expected, **options
        )

    assert write(("a", "stored", 5), ("b", "stored", 5)).inserted == 2
    # Older than what is stored, with a bad row of the same age.
    stale = write(("a", "older", 1), ("a", "BAD", 1), order_by="age")
    assert (stale.commit_id, stale.stale, stale.quarantined) == (None, 1, 1)
    # The bad row is the newest; keys that are null have nothing to do with one another.
    newest = write(
        ("b", "good", 6), ("b", None, 7), (None, "x", 1), (None, "y", 2), ("", "z", 3),
        order_by="age",
    )  # fmt: skip
    assert (newest.updated, newest.duplicates, newest.quarantined) == (1, 0, 4)
    assert customers(session) == [("a", "stored", 5), ("b", "good", 6)]
    # Unchanged, beside a bad one: no commit.
    for bad in ("BAD", None):
        same = write(("a", "stored", 5), ("a", bad, 5))
        assert (same.commit_id, same.unchanged, same.quarantined) == (None, 1, 1)


class Limits(Entity):
    id: Field[str] = Field(primary_key=True)
    seq: Field[int]
    real: Field[float | None] = Field(default=None)
    at: Field[datetime] = Field(default=datetime.max.replace(tzinfo=UTC))


def test_values_beyond_limits_are_bad_before_rows_are_compared(
    spark: SparkSession, session: Session
) -> None:
    def write(*values: tuple[Any, ...], at: str = "") -> Any:
        df = spark.createDataFrame(list(values), "id string, seq bigint, real double")
        df = df.selectExpr("*", f"{at} AS at") if at else df
        return write_entities(
            df, Limits, session, order_by="seq", on_bad_rows="quarantine", quarantine=None
        )

    first = write(("a", 1, 0.5), ("a", 2, float("nan")), ("a", 3, float("-inf")))
    assert (first.inserted, first.quarantined, first.duplicates) == (1, 2, 0)
    again = write(("a", 1, 0.5))
    assert (again.commit_id, again.unchanged) == (None, 1), "a default is no change"
    beyond = write(("a", 4, 0.5), at="timestamp_seconds(253402300800)")
    assert (beyond.commit_id, beyond.quarantined) == (None, 1)


def test_a_commit_that_stands_is_not_taken_back(
    spark: SparkSession, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the publish neither the caller's own code nor the store can spoil it."""
    df = spark.createDataFrame([("a", "x", 1), (None, "y", 2)], CUSTOMERS)

    def nobody_listens(_: WriteProgress) -> None:
        raise RuntimeError("the terminal is gone")

    def unreachable(_: TypeSpec) -> int:
        raise StorageBackendError("no answer", operation="get")

    monkeypatch.setattr(session.repository, "type_head", unreachable)
    written = write_entities(
        df, Customer, session, on_bad_rows="quarantine", progress=nobody_listens
    )
    assert (written.commit_id, written.type_commit_id) == (1, 1)
    assert written.quarantine is not None
    assert len(pq.read_table(written.quarantine.removeprefix("file://"))) == 1


class Loaded(Event):
    what: Field[str]


def test_events_outlive_a_publish_that_is_tried_again(
    spark: SparkSession, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, tries = internals(session).commit_staged, []

    def contended(*arguments: Any, **options: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise LockContentionError(waited_ms=1)
        return right(*arguments, **options)

    monkeypatch.setattr(internals(session), "commit_staged", contended)
    df = spark.createDataFrame([("a", "x", 1)], CUSTOMERS)
    events = (Loaded(what=name) for name in ("customers", "all"))
    assert write_entities(df, Customer, session, event=events).commit_id == 1
    assert len(tries) == 2
    session.flush()
    with closing(open_repository(session.repository.uri)) as repository:
        found = open_event_store(repository, OntologiaConfig()).list_events("default", 10)
    assert [one.envelope["type"] for one in found] == ["Loaded", "Loaded"]


def test_engines_that_cannot(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.createDataFrame([("a", "x", 1)], CUSTOMERS)
    uri = str(tmp_path / "v1")
    initialize_storage(uri, "v1")
    for place in (uri, f"sqlite:///{tmp_path / 'o.db'}"):
        with Session(place) as session, pytest.raises(UnsupportedEngineError, match="v2"):
            write_entities(df, Customer, session)
