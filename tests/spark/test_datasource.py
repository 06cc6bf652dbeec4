"""`format("ontologia")`: the same rows as a Session reads, and the same rules as `write_type`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from storage_engine import OntologiaConfig, Session, initialize_storage
from storage_engine.objectstore.open import open_store
from storage_engine.spark import register, write_type
from storage_engine.spark.datasource import OntologiaDataSource
from tests.servers import S3Server
from tests.spark import read_world as world
from tests.spark.read_world import Follows, Place, Sample, Stay, commit, expected, rows, sample

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]  # many Python processes


@pytest.fixture(params=["directory", pytest.param("seaweedfs", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Place:
    register(spark)
    if request.param == "directory":
        made = Place(str(tmp_path / "onto"), OntologiaConfig())
    else:
        server: S3Server = request.getfixturevalue("seaweedfs_s3")
        made = Place(f"s3://{server.make_bucket()}/onto", server.config())
    initialize_storage(made.uri, config=made.config)
    return made


@pytest.fixture
def directory(spark: SparkSession, tmp_path: Path) -> Place:
    register(spark)
    made = Place(str(tmp_path / "onto"), OntologiaConfig())
    initialize_storage(made.uri)
    return made


def load(spark: SparkSession, place: Place, type: str, **options: Any) -> DataFrame:
    given = {**place.options, "type": type, **{k: str(v) for k, v in options.items()}}
    return spark.read.format("ontologia").options(**given).load()


def save(df: DataFrame, place: Place, type: str = "Sample", **options: Any) -> None:
    format, mode = options.pop("format", "ontologia"), options.pop("mode", "append")
    given = {**place.options, "type": type, **{k: str(v) for k, v in options.items()}}
    df.write.format(format).options(**given).mode(mode).save()


def numbers(spark: SparkSession, found: dict[int, int]) -> DataFrame:
    """Samples by number, in three partitions."""
    listed = [(f"s{n:04}", value) for n, value in found.items()]
    return spark.createDataFrame(listed, "id string, number bigint").repartition(3)


def stored(session: Session) -> dict[int, int]:
    return {int(row["id"][1:]): row["number"] for row in expected(session, Sample)}


def staged(place: Place) -> list[str]:
    """What lies in the store and is named by no commit."""
    store = open_store(place.uri, place.config)
    try:
        keys = [info.key for prefix in ("staged/", "meta/attempts/") for info in store.list(prefix)]
    finally:
        store.close()
    with place.open() as session:
        named = {
            file.path
            for _, manifest in session.repository.chain.stretch(  # type: ignore[attr-defined]
                session.repository.chain.read_head().head.link,  # type: ignore[attr-defined]
                above=0,
            )
            for file in manifest.files
        }
    return [key for key in keys if key not in named]


# --- reading ------------------------------------------------------------------------------------


def test_the_same_rows_as_a_session(spark: SparkSession, place: Place) -> None:
    with place.open() as session:
        world.first_commits(session)
        for type in (Sample, Follows):
            found = load(spark, place, type.__name__)
            assert rows(found) == expected(session, type)
            assert [f.nullable for f in found.schema][:2] == [False, type is Sample]
        world.compact(session)
        commit(session, *(sample(n, 900 + n) for n in range(5, 8)))
        world.stage(session, range(6, 9), 950)
        windows = {
            "latest": load(spark, place, "Sample", with_commit_id=True),
            "before": load(spark, place, "Sample", with_commit_id=True, as_of=3),
            "history": load(spark, place, "Sample", since=2),
        }
        seen = world.by_window(windows)
        assert seen["latest"] == expected(session, Sample, commit_id=True)
        assert seen["before"] == expected(session, Sample, commit_id=True, as_of=3)
        assert seen["history"] == expected(session, Sample, commit_id=True, history=True, since=2)
        # The feed after compaction: what was an insert is looked up in older files.
        feed = load(spark, place, "Sample", changes=True, since=1, columns="id")
        assert rows(feed) == world.in_order(
            {"commit_id": c["commit_id"], "operation": c["operation"], "id": c["key"]}
            for c in session.changes(1)
            if c["type_name"] == "Sample"
        )


def test_sql_view_filters_and_pinning(spark: SparkSession, directory: Place) -> None:
    with directory.open() as session:
        world.first_commits(session)
        spark.sql(
            "CREATE OR REPLACE TEMPORARY VIEW pinned USING ontologia OPTIONS "
            f"(storage_uri '{directory.uri}', type 'Sample', columns 'id, number')"
        )
        before = stored(session)
        commit(session, sample(0, -1), sample(77))
        world.compact(session)
        # Twice in one query, with different filters; and the view stays at its commit.
        found = spark.sql(
            "SELECT id, number FROM pinned WHERE number < 200 "
            "UNION ALL SELECT id, number FROM pinned WHERE number >= 200"
        )
        assert {int(row["id"][1:]): row["number"] for row in rows(found)} == before
        # 8 was 8 once: a filter on values must not bring an old version back.
        stale = load(spark, directory, "Sample", filter="number = 8")
        assert rows(stale) == []
        by_key = load(spark, directory, "Stay", filter="visit IN ('v1', 'v2') AND nights IS NULL")
        assert [row["visit"] for row in rows(by_key)] == ["v2"]
        assert rows(load(spark, directory, "Sample", as_of=0)) == []
    spark.catalog.dropTempView("pinned")


def test_sqlite(spark: SparkSession, directory: Place, tmp_path: Path) -> None:
    place = Place(str(tmp_path / "onto.db"), OntologiaConfig())
    with place.open() as session:
        world.first_commits(session)
        found = load(spark, place, "Stay", as_of=2, columns="nights,visit")
        assert rows(found) == world.in_order(
            {"nights": row["nights"], "visit": row["visit"]}
            for row in expected(session, Stay, as_of=2)
        )
        with pytest.raises(Exception, match=r"needs an object storage"):
            load(spark, place, "Stay", changes=True)
        with pytest.raises(Exception, match=r"kept by SQLite, .* use\s+session.ingest"):
            save(numbers(spark, {1: 1}), place)


def test_mistakes(spark: SparkSession, directory: Place) -> None:
    with directory.open() as session:
        commit(session, sample(1))
    nowhere = Place(str(Path(directory.uri) / "elsewhere"), OntologiaConfig())
    df = numbers(spark, {1: 1})
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("unknown type 'Smple', did you mean 'Sample'", lambda: load(spark, directory, "Smple")),
        (
            "unknown option 'filtr', did you mean 'filter'",
            lambda: load(spark, directory, "Sample", filtr="x"),
        ),
        ("no tag 'nope'", lambda: load(spark, directory, "Sample", as_of="nope")),
        ("since takes a whole number", lambda: load(spark, directory, "Sample", since="x")),
        (
            "filter 'nmber = 1' on Sample: .*nmber",
            lambda: load(spark, directory, "Sample", filter="nmber = 1"),
        ),
        ("run `onto init", lambda: load(spark, nowhere, "Sample")),
        (
            "the option storage_uri is missing; the option type is missing",
            lambda: spark.read.format("ontologia").load(),
        ),
        ("nothing is ever overwritten", lambda: save(df, directory, mode="overwrite")),
        ("app_id and version go together", lambda: save(df, directory, app_id="x")),
        (
            "column 'number' is string.*; unknown column 'nmber'",
            lambda: save(df.selectExpr("id", "'x' AS number", "1 AS nmber"), directory),
        ),
    ]
    for said, attempt in wrong:
        with pytest.raises(Exception, match=said):
            attempt()


# --- writing ------------------------------------------------------------------------------------


def test_first_load_changes_and_repetitions(spark: SparkSession, place: Place) -> None:
    with place.open() as session:
        commit(session, sample(0))
        save(numbers(spark, dict.fromkeys(range(30), 1)), place, app_id="crm", version=1)
        assert stored(session) == dict.fromkeys(range(30), 1)
        save(numbers(spark, {5: 9}), place, app_id="crm", version=1)  # applied: nothing is done
        save(numbers(spark, dict.fromkeys(range(30), 1)), place)  # nothing differs
        assert session.repository.head_commit_id() == 2
        save(numbers(spark, {**dict.fromkeys(range(10), 1), 3: 8, 40: 8}), place)
        session.flush()
        assert stored(session) == {**dict.fromkeys(range(30), 1), 3: 8, 40: 8}
        kinds = [c["operation"] for c in session.list_commit_changes(3)]
        assert sorted(kinds) == ["insert", "update"]
    assert staged(place) == []


def test_the_rules_of_write_type(spark: SparkSession, directory: Place, tmp_path: Path) -> None:
    """The same input, through both: the same rows, or the same refusal."""
    other = Place(str(tmp_path / "other"), OntologiaConfig())
    initialize_storage(other.uri)
    first = numbers(spark, {1: 10, 2: 20, 3: 30})
    repeated = numbers(spark, {1: 15, 2: 5, 3: 30}).unionAll(numbers(spark, {1: 12, 4: 4, 3: 30}))
    bad = numbers(spark, {7: 7}).unionAll(numbers(spark, {8: 8}).selectExpr("NULL", "number"))
    with directory.open() as one, other.open() as two:
        for session in (one, two):
            commit(session, sample(1))
        for df, options in (
            (first, {}),
            (repeated, {}),  # refused
            (repeated, {"order_by": "number"}),
            (bad, {}),  # refused
            (bad, {"on_bad_rows": "quarantine"}),
        ):
            said = []
            for write in (
                lambda df=df, options=options: save(df, directory, **options),
                lambda df=df, options=options: write_type(df, Sample, two, **options),
            ):
                try:
                    write()
                    said.append("")
                except Exception as error:  # noqa: BLE001 - it crosses a process, as text
                    lines = [line for line in str(error).splitlines() if "Sample: " in line]
                    said.append(lines[-1].partition("Sample: ")[2])
            assert said[0] == said[1]
            assert stored(one) == stored(two)
            assert one.repository.head_commit_id() == two.repository.head_commit_id()
        assert stored(one) == {1: 15, 2: 20, 3: 30, 4: 4, 7: 7}
    assert staged(directory) == []


def test_what_a_session_changes_meanwhile_stays(spark: SparkSession, directory: Place) -> None:
    """Between the plan of a write and its publish, as in `write_type`."""
    uri = directory.uri

    class Overtaken(OntologiaDataSource):
        @classmethod
        def name(cls) -> str:
            return "overtaken"

        def writer(self, schema: Any, overwrite: bool) -> Any:
            from storage_engine import Session
            from tests.spark.read_world import commit, sample

            made: Any = super().writer(schema, overwrite)
            with Session(uri) as session:
                commit(session, sample(1, 111))
            return made

    spark.dataSource.register(Overtaken)
    with directory.open() as session:
        commit(session, sample(0), sample(1))
        save(numbers(spark, {0: 7, 1: 7, 2: 7}), directory, format="overtaken")
        assert stored(session) == {0: 7, 1: 111, 2: 7}


def test_failures(spark: SparkSession, directory: Place, tmp_path: Path) -> None:
    """A task that fails once, one that always fails, and a commit whose answer is lost."""
    marker = str(tmp_path / "failed")

    def fail(again: bool) -> Any:
        def run(batches: Any) -> Any:
            yield from batches
            if again or not Path(marker).exists():
                Path(marker).touch()
                raise RuntimeError("planted")

        return run

    class Answerless(OntologiaDataSource):
        @classmethod
        def name(cls) -> str:
            return "answerless"

        def writer(self, schema: Any, overwrite: bool) -> Any:
            made: Any = super().writer(schema, overwrite)
            publish = made.commit

            def commit(messages: Any) -> None:
                publish(messages)
                raise ConnectionError("the answer got lost")

            made.commit = commit
            return made

    spark.dataSource.register(Answerless)
    df = numbers(spark, dict.fromkeys(range(9), 1))
    with directory.open() as session:
        commit(session, sample(0))
        with pytest.raises(Exception, match="planted"):
            save(df.mapInArrow(fail(True), df.schema), directory, app_id="a", version=1)
        assert (stored(session), staged(directory)) == ({0: 0}, [])
        Path(marker).unlink()
        save(df.mapInArrow(fail(False), df.schema), directory, app_id="a", version=1)
        assert stored(session) == dict.fromkeys(range(9), 1)
        changed = df.withColumn("number", df.number + 1)
        with pytest.raises(Exception, match="the answer got lost"):
            save(changed, directory, format="answerless", app_id="a", version=2)
        assert stored(session) == dict.fromkeys(range(9), 2)  # abort has deleted nothing
        save(changed, directory, app_id="a", version=2)
        assert session.repository.head_commit_id() == 3
