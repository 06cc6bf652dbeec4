"""Sources that are not the same each time they are read, and columns of unusual types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine import Entity, Field, Session, ValidationError, initialize_storage
from storage_engine.model import spec_of
from storage_engine.model.expectations import parse_expectations
from storage_engine.spark import driver, spark_session, write_entities, write_relations
from tests.engines import Subscription
from tests.spark.gates import Gate, await_file, in_thread

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]  # the JVM may have to wait its turn


class Thing(Entity):
    id: Field[str] = Field(primary_key=True)
    n: Field[int | None] = Field(default=None)
    real: Field[float | None] = Field(default=None)
    text: Field[str | None] = Field(default=None)
    at: Field[datetime | None] = Field(default=None)
    tags: Field[list[int] | None] = Field(default=None)
    anything: Field[Any] = Field(default=None)


THING = spec_of(Thing)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    uri = str(tmp_path / "onto")
    initialize_storage(uri, "v2")
    with Session(uri) as made:
        yield made


def column(session: Session, name: str) -> dict[str, Any]:
    stored = session.repository.read(THING)
    return dict(zip(stored.column("id").to_pylist(), stored.column(name).to_pylist(), strict=True))


# -- not the same each time -----------------------------------------------------------------------


def test_what_a_preview_approves_a_write_does(spark: SparkSession, session: Session) -> None:
    """With an order column: rows of one identity and one order value must be equal."""

    def both(*rows: tuple[Any, ...]) -> tuple[Any, Any]:
        df = spark.createDataFrame(list(rows), "id string, n int, text string")
        preview = write_entities(df, Thing, session, order_by="n", dry_run=True)
        try:
            return preview, write_entities(df, Thing, session, order_by="n")
        except ValidationError as error:
            return preview, str(error)

    preview, written = both(("a", 0, "w"), ("a", 0, "w"), ("a", -1, "v"))
    assert (preview.duplicates, preview.inserted, preview.problem) == (2, 1, None)
    for count in ("inserted", "duplicates", "rows"):
        assert getattr(preview, count) == getattr(written, count), count
    preview, refused = both(("a", 1, "x"), ("a", 1, "y"), ("a", 0, "w"), ("b", 1, "z"))
    assert "more than once" in str(refused)
    assert "1 row with an identity and n that another one has" in preview.problem
    # Without an order column, though one of the two rows is stored.
    df = spark.createDataFrame([("a", 0, "w"), ("a", 1, "x")], "id string, n int, text string")
    preview = write_entities(df, Thing, session, dry_run=True)
    assert "1 row with an identity that another one has" in str(preview.problem)


def test_expressions_that_give_other_values_are_evaluated_once(
    spark: SparkSession, session: Session
) -> None:
    rows = spark.createDataFrame([("a",), ("b",)], "id string").repartition(2)

    def write(*columns: str, **options: Any) -> Any:
        return write_entities(rows.selectExpr(*columns), Thing, session, **options)

    for number in range(3):
        timed = write("id", "current_timestamp() AS at", order_by="at")
        assert timed.inserted + timed.updated == 2, number
        assert len(set(column(session, "at").values())) == 1
    again = write("id", "now() AS at", order_by="at", dry_run=True)
    assert (again.updated, again.problem) == (2, None)
    for order_by in (None, "real"):
        before = len(column(session, "id"))
        keyed = write("uuid() AS id", "rand() AS real", order_by=order_by)
        assert keyed.inserted == 2
        assert len(column(session, "id")) == before + 2

    # A row that refers to itself by a key that is made up as it is read.
    refers = parse_expectations([{"referential": {"column": "text", "type": "Thing"}}])
    for on_bad_rows in ("fail", "quarantine"):
        own = rows.selectExpr("uuid() AS id").selectExpr("id", "id AS text")
        result = write_entities(own, Thing, session, expectations=refers, on_bad_rows=on_bad_rows)
        assert (result.inserted, result.quarantined) == (2, 0)
    context: Any = spark.sparkContext
    assert not list(context._jsc.getPersistentRDDs())


def test_a_source_that_changes_while_it_is_read(
    spark: SparkSession, session: Session, tmp_path: Path
) -> None:
    """Fewer or more rows the second time: nothing is published, and what to do is said."""

    def unsteady(counts: str, first: int, then: int) -> DataFrame:
        mark = str(tmp_path / counts)

        def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import os

            list(batches)
            count = then if os.path.exists(mark) else first
            open(mark, "w").close()
            yield pa.RecordBatch.from_pydict({"id": [f"{counts}{n}" for n in range(count)]})

        return spark.range(1).coalesce(1).mapInArrow(read, "id string")

    with_event = spark.createDataFrame([("stored",)], "id string")
    assert write_entities(with_event, Thing, session).commit_id == 1
    for first, then in ((3, 2), (3, 4), (2, 0)):
        df = unsteady(f"{first}-{then}-", first, then)
        with pytest.raises(ValidationError, match=f"{then} rows instead of {first}") as caught:
            write_entities(df, Thing, session)
        assert "nothing was published" in str(caught.value)
        assert "run it again" in str(caught.value)
    assert session.repository.head_commit_id() == 1


def test_two_writers_of_one_unit_of_work_at_once(
    spark: SparkSession, session: Session, tmp_path: Path
) -> None:
    """Both have begun before either publishes: one commit, and the other learns of it."""
    gates = [Gate(tmp_path / str(number)) for number in range(2)]
    df = spark.createDataFrame([("a", 1), ("b", 2)], "id string, n int").coalesce(1)

    def write(gate: Gate) -> Any:
        def through(batches: Iterator[Any]) -> Iterator[Any]:
            gate()
            yield from batches

        with Session(session.repository.uri) as own:
            waiting = df.mapInArrow(through, df.schema)
            return write_entities(waiting, Thing, own, idempotency=("crm", 1))

    jobs = []
    for gate in gates:
        gate.reached.parent.mkdir()
        jobs.append(in_thread(partial(write, gate)))
    for gate in gates:
        await_file(gate.reached)
    for gate in gates:
        gate.opened.touch()
    results = [job.result(500) for job in jobs]
    assert sorted(result.already_applied for result in results) == [False, True]
    assert {result.commit_id for result in results} == {1}
    assert session.repository.head_commit_id() == 1
    assert column(session, "n") == {"a": 1, "b": 2}
    staged = Path(session.repository.uri.removeprefix("file://")) / "staged"
    assert len(list(staged.rglob("*.parquet"))) == 1


# -- columns of unusual types ---------------------------------------------------------------------


def test_numbers_that_are_whole_and_columns_of_nulls(
    spark: SparkSession, session: Session, tmp_path: Path
) -> None:
    """Parquet's uint64 (a decimal in Spark), whole doubles, and columns without a type."""
    place = str(tmp_path / "source.parquet")
    numbers = pa.array([2**63 - 1, 2**63, None], pa.uint64())
    nothing = {name: pa.nulls(3) for name in ("text", "at", "tags", "anything", "real")}
    pq.write_table(pa.table({"id": ["a", "b", "c"], "n": numbers, **nothing}), place)
    expectations = parse_expectations(
        [
            {"range": {"column": "real", "max": 3}},
            {"pattern": {"column": "text", "pattern": "a"}},
            {"referential": {"column": "text", "type": "Thing"}},
            {"unique": "at"},
        ]
    )
    for inserted in (2, 0):
        written = write_entities(
            spark.read.parquet(place),
            Thing,
            session,
            on_bad_rows="quarantine",
            expectations=expectations,
        )
        assert (written.inserted, written.updated, written.quarantined) == (inserted, 0, 1)
        assert written.reasons == {"column 'n' is beyond 64 bits": 1}
    assert column(session, "n") == {"a": 2**63 - 1, "c": None}
    assert set(column(session, "text").values()) == {None}

    doubles = [("d", 2.0**60), ("e", -(2.0**63)), ("f", 2.0**63), ("g", 0.5), ("h", float("inf"))]
    whole = write_entities(
        spark.createDataFrame(doubles, "id string, n double"),
        Thing,
        session,
        on_bad_rows="quarantine",
    )
    assert (whole.inserted, whole.reasons) == (
        2,
        {"column 'n' is beyond 64 bits": 1, "column 'n' is not a whole number": 2},
    )
    assert {k: v for k, v in column(session, "n").items() if k in "de"} == {
        "d": 2**60, "e": -(2**63),
    }  # fmt: skip
    money = spark.createDataFrame(
        [("i", Decimal("7.00"), None), ("j", Decimal("7.50"), None)],
        "id string, n decimal(10,2), text int",
    )
    assert write_entities(money, Thing, session, dry_run=True, order_by="n").quarantined == 1
    void = spark.sql("SELECT 'k' AS id, NULL AS n, NULL AS text, NULL AS at, NULL AS anything")
    for order_by in ("n", "text", "at"):
        assert write_entities(void, Thing, session, order_by=order_by, dry_run=True).inserted == 1
    assert write_entities(void, Thing, session).inserted == 1
    with pytest.raises(ValidationError, match="column 'text' is int32, which cannot become str"):
        write_entities(money.selectExpr("id", "1 AS text"), Thing, session)
    with pytest.raises(ValidationError, match=r"cannot become float .* without loss: cast it"):
        write_entities(money.selectExpr("id", "n AS real"), Thing, session)


# -- what the result says -------------------------------------------------------------------------


def test_notes_of_the_commit_are_in_the_result(spark: SparkSession, session: Session) -> None:
    edge = spark.sql("SELECT 'c' AS left_key, 'p' AS right_key, 1 AS seats")
    noted = write_relations(edge, Subscription, session)
    assert list(noted.notes) == [
        "Subscription: its relations point to Customer, of which nothing is stored yet",
        "Subscription: its relations point to Product, of which nothing is stored yet",
    ]
    assert noted.as_dict()["notes"] == list(noted.notes)
    assert write_relations(edge, Subscription, session).notes == ()
    local = spark.sql("SELECT 'a' AS id, TIMESTAMP_NTZ '2026-03-29 02:30:00' AS at")
    for dry_run in (True, False):
        zoneless = write_entities(local, Thing, session, dry_run=dry_run)
        assert list(zoneless.notes) == ["Thing.at: times without a zone were read as UTC"]
    assert column(session, "at")["a"] == datetime(2026, 3, 29, 2, 30, tzinfo=UTC)
    zoned = spark.sql("SELECT 'b' AS id, TIMESTAMP '2026-03-29 02:30:00' AS at")
    assert write_entities(zoned, Thing, session).notes == ()


# -- the session's settings -----------------------------------------------------------------------


def tasks_of(spark: SparkSession, work: Callable[[], Any]) -> int:
    """How many tasks the jobs of some work have, all stages together."""
    context: Any = spark.sparkContext
    tracker = context._jsc.sc().statusTracker()
    before = set(tracker.getJobIdsForGroup(None))
    work()
    jobs = [context.statusTracker().getJobInfo(n) for n in tracker.getJobIdsForGroup(None)
            if n not in before]  # fmt: skip
    stages = [context.statusTracker().getStageInfo(n) for job in jobs for n in job.stageIds]
    return sum(stage.numCompletedTasks for stage in stages if stage is not None)


def test_a_small_write_is_made_of_few_tasks(spark: SparkSession, session: Session) -> None:
    many = "spark.sql.shuffle.partitions"
    before = spark.conf.get(many)
    spark.conf.set(many, "50")
    try:
        for number in range(2):
            df = spark.createDataFrame([("a", number)], "id string, n int").coalesce(1)
            tasks = tasks_of(spark, partial(write_entities, df, Thing, session, order_by="n"))
            assert 0 < tasks < 50
    finally:
        spark.conf.set(many, str(before))


@pytest.mark.parametrize(
    ("master", "cores", "made", "partitions"),
    [
        ("local[*]", 4, {}, "32"),
        ("local[2,3]", 2, {}, "16"),
        ("local", 64, {}, "200"),
        ("local[2]", 2, {"spark.sql.shuffle.partitions": "7"}, None),
        ("yarn", 100, {}, None),
    ],
)
def test_a_new_session_has_partitions_that_fit(
    master: str, cores: int, made: dict[str, str], partitions: str | None
) -> None:
    given: dict[str, str] = {}
    conf = SimpleNamespace(contains=made.__contains__)
    context = SimpleNamespace(getConf=lambda: conf, master=master, defaultParallelism=cores)
    fake: Any = SimpleNamespace(sparkContext=context, conf=SimpleNamespace(set=given.__setitem__))
    driver._fit(fake)
    assert given.pop("spark.sql.shuffle.partitions", None) == partitions
    assert set(given.values()) == {"true"}


def test_settings_of_a_running_session_stand(spark: SparkSession) -> None:
    name = "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning"
    assert spark.conf.get(name) == "true"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "4", "as it was started"
    spark.conf.set(name, "false")
    try:
        assert spark_session("another") is spark
        assert spark.conf.get(name) == "false"
    finally:
        spark.conf.set(name, "true")
