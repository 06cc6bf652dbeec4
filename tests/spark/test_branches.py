"""Spark on branches: reads, writes, streams and jobs, as on main; and branches that go away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from storage_engine import OntologiaConfig, Session, initialize_storage
from storage_engine.commitlog import layout
from storage_engine.errors import (
    ProtectedBranchError,
    UnknownBranchError,
    UnsupportedEngineError,
)
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.objectstore.open import open_store
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.spark import (
    batch_writer,
    read_entities,
    read_type,
    register,
    write_entities,
    write_type,
    writer,
)
from storage_engine.spark.jobs import compact
from tests.servers import S3Server
from tests.spark.gates import Gate, await_file, in_thread
from tests.spark.read_world import Place, Sample, commit, expected, rows
from tests.spark.streams import stream

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]


@pytest.fixture(params=["directory", pytest.param("seaweedfs", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Place:
    if request.param == "directory":
        return _made(spark, Place(str(tmp_path / "onto"), OntologiaConfig()))
    server: S3Server = request.getfixturevalue("seaweedfs_s3")
    return _made(spark, Place(f"s3://{server.make_bucket()}/onto", server.config()))


@pytest.fixture
def directory(spark: SparkSession, tmp_path: Path) -> Place:
    return _made(spark, Place(str(tmp_path / "onto"), OntologiaConfig()))


def _made(spark: SparkSession, place: Place) -> Place:
    """Three samples in one commit, and a branch of it."""
    register(spark)
    initialize_storage(place.uri, config=place.config)
    with place.open() as session:
        commit(session, *(sample(n) for n in range(3)))
        session.create_branch("run/1")
    return place


def sample(n: int, number: int | None = None) -> Sample:
    return Sample(id=f"s{n:04}", number=n if number is None else number)


def on(place: Place, branch: str = "run/1") -> Session:
    return Session(place.uri, config=place.config, branch=branch)


def made_anew(place: Place, branch: str = "run/1") -> None:
    with place.open() as session:
        session.delete_branch(branch)
        session.create_branch(branch)


def numbers(session: Session) -> dict[int, int]:
    return {int(row["id"][1:]): row["number"] for row in expected(session, Sample)}


def shown(frame: DataFrame) -> dict[int, int]:
    return {int(row["id"][1:]): row["number"] for row in rows(frame)}


def frame(spark: SparkSession, values: dict[int, int], partitions: int = 2) -> DataFrame:
    listed = [(f"s{n:04}", value) for n, value in values.items()]
    return spark.createDataFrame(listed, "id string, number bigint").repartition(partitions)


def load(spark: SparkSession, place: Place, **options: Any) -> DataFrame:
    given = {**place.options, "type": "Sample", **{k: str(v) for k, v in options.items()}}
    return spark.read.format("ontologia").options(**given).load()


def save(df: DataFrame, place: Place, **options: Any) -> None:
    given = {**place.options, "type": "Sample", **{k: str(v) for k, v in options.items()}}
    df.write.format("ontologia").options(**given).mode("append").save()


def staged(place: Place) -> set[str]:
    store = open_store(place.uri, place.config)
    try:
        return {info.key for info in store.list(layout.STAGED)}
    finally:
        store.close()


def test_what_is_written_to_a_branch_is_there_and_nowhere_else(
    spark: SparkSession, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LOOSE_BYTES", 0)  # parts are staged by the tasks
    with place.open() as main, on(place) as branch:
        before = branch.list_branches()[1]
        # By the session's own branch, by name from a session of main, and by the data source.
        own = write_entities(frame(spark, {0: 0, 1: 10, 3: 30}), Sample, branch)
        assert (own.commit_id, own.inserted, own.updated, own.unchanged) == (2, 1, 1, 1)
        named = write_type(frame(spark, {1: 11, 4: 40}), Sample, main, branch="run/1")
        assert (named.commit_id, named.inserted, named.updated) == (3, 1, 1)
        save(frame(spark, {2: 22, 4: 40, 5: 50}), place, branch="run/1")
        theirs = {0: 0, 1: 11, 2: 22, 3: 30, 4: 40, 5: 50}
        assert numbers(branch) == theirs
        assert numbers(main) == {0: 0, 1: 1, 2: 2}
        assert {
            layout.attempt_incarnation(layout.staged_attempt(key)) for key in staged(place)
        } == {before.incarnation}
        commit(main, sample(7, 70))  # commit 2 of main, too
        commit(branch, sample(0, 5))  # a small commit on top
        theirs[0] = 5

        # Every way to read it, with the commits of its own chain.
        from_main = read_entities(spark, Sample, main, branch="run/1", with_commit_id=True)
        assert rows(from_main) == expected(branch, Sample, commit_id=True)
        assert shown(read_entities(spark, Sample, branch, branch="main")) == numbers(main)
        assert shown(read_entities(spark, Sample, branch)) == theirs
        third = {0: 0, 1: 11, 2: 2, 3: 30, 4: 40}
        assert shown(read_entities(spark, Sample, main, as_of="run/1@3")) == third
        assert rows(load(spark, place, branch="run/1", with_commit_id="true")) == expected(
            branch, Sample, commit_id=True
        )
        assert rows(load(spark, place, as_of="run/1@2")) == expected(branch, Sample, as_of=2)
        changes = load(spark, place, branch="run/1", since=3, changes="true")
        told = {(r["commit_id"], r["operation"], r["id"]) for r in rows(changes)}
        assert told == {(4, "update", "s0002"), (4, "insert", "s0005"), (5, "update", "s0000")}
        assert shown(load(spark, place)) == numbers(main)

        # Bulk is not copied by the merge, and has main's ids from then on.
        report = main.merge("run/1")
        merged = read_type(spark, Sample, main, with_commit_id=True)
        assert rows(merged) == expected(main, Sample, commit_id=True)
        assert shown(merged) == theirs | {7: 70}
        assert {row["commit_id"] for row in rows(merged)} == {2, report.commit_id}
        found = verify_storage(main.repository, deep=True)
        assert found.ok, found.findings


def test_a_branch_that_is_made_anew_while_a_job_stages(
    spark: SparkSession, directory: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LOOSE_BYTES", 0)
    gate, place = Gate(tmp_path), directory

    def held(batches: Iterator[Any]) -> Iterator[Any]:
        gate()
        yield from batches

    plain = frame(spark, {1: 10, 3: 30}, 1)
    df = plain.mapInArrow(held, plain.schema)

    def by_writer() -> None:
        with place.open() as opened:
            write_type(df, Sample, opened, branch="run/1", idempotency=("app", 1))

    def by_source() -> None:
        save(df, place, branch="run/1", app_id="app", version=2)

    for write in (by_writer, by_source):
        # The write in this thread: others have another active Spark session.
        meanwhile = in_thread(lambda: (await_file(gate.reached), made_anew(place)))
        meanwhile.add_done_callback(lambda _: gate.opened.touch())
        with pytest.raises((UnknownBranchError, PySparkException)) as caught:
            write()
        meanwhile.result()
        assert "branch 'run/1' was deleted since it was opened" in str(caught.value)
        with on(place) as branch, place.open() as main:
            assert numbers(branch) == numbers(main) == {0: 0, 1: 1, 2: 2}
            assert (branch.branch, branch.repository.head_commit_id()) == ("run/1", 1)
            # Nothing of it counts, and it can be done again there.
            again = write_type(frame(spark, {1: 1}), Sample, branch, idempotency=("app", 1))
            assert not again.already_applied
            repository = main.repository
            assert isinstance(repository, ObjectRepository)
            sweep(repository, plan_gc(repository, grace=timedelta()))
            found = verify_storage(repository, deep=True)
            assert found.ok, found.findings
        assert not staged(place)
        for path in (gate.reached, gate.opened):
            path.unlink()


def test_what_was_loaded_of_a_branch_outlives_it_or_fails(
    spark: SparkSession, directory: Place
) -> None:
    with on(directory) as branch:
        commit(branch, sample(3))
        by_files = read_type(spark, Sample, branch)
    pinned = load(spark, directory, branch="run/1")  # its files are named when it is first run
    made_anew(directory)
    with on(directory) as branch:
        commit(branch, sample(4))  # the id of the one that was
    assert shown(by_files) == {0: 0, 1: 1, 2: 2, 3: 3}  # its files are there for a grace
    with pytest.raises(PySparkException, match="'run/1' was deleted since it was opened"):
        shown(pinned)
    with pytest.raises(PySparkException, match="no branch 'run/2'; did you mean run/1"):
        load(spark, directory, branch="run/2")


def test_units_of_work_count_along_a_branch(spark: SparkSession, directory: Place) -> None:
    with directory.open() as main:
        write_type(frame(spark, {5: 5}), Sample, main, idempotency=("app", 1))
        main.create_branch("run/2")
        with on(directory, "run/2") as branch:
            df = frame(spark, {5: 6})
            assert write_type(df, Sample, branch, idempotency=("app", 1)).already_applied
            assert write_type(df, Sample, branch, idempotency=("app", 2)).commit_id == 3
            assert write_type(df, Sample, branch, idempotency=("app", 2)).already_applied
        # The older branch was forked before, and main knows of the second one once it is merged.
        done = write_type(df, Sample, main, branch="run/1", idempotency=("app", 1))
        assert (done.commit_id, done.already_applied) == (2, False)
        assert write_type(df, Sample, main, idempotency=("app", 2), dry_run=True).updated == 1
        main.merge("run/2")
        assert write_type(df, Sample, main, idempotency=("app", 2)).already_applied


def test_who_must_not_write_is_told_before_the_work(
    spark: SparkSession, directory: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    df = frame(spark, {5: 5})
    with directory.open() as main:
        main.protect_branch("run/1")
        with pytest.raises(ProtectedBranchError):
            write_type(df, Sample, main, branch="run/1")
        with pytest.raises(UnknownBranchError, match="did you mean run/1"):
            write_type(df, Sample, main, branch="run/2")
    assert not staged(directory)
    with Session(str(tmp_path / "onto.db")) as sqlite:
        commit(sqlite, sample(1))
        with pytest.raises(UnsupportedEngineError, match="has no branches"):
            read_type(spark, Sample, sqlite, branch="run/1")
    arguments = ["--storage-uri", directory.uri, "--branch", "run/1", "--apply", "--json"]
    assert compact.main(arguments) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert "branch 'run/1' is not compacted" in error["message"]


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "0.json").write_text('{"id": "s0003", "number": 30}')
    return str(tmp_path / "source")


@pytest.mark.parametrize("way", ["each", "sink"])
def test_streams_into_a_branch(
    spark: SparkSession, directory: Place, source: str, tmp_path: Path, way: str
) -> None:
    """A query that goes on while its branch is made anew ends, instead of leaving out there what
    it has published before."""
    write = stream(spark, source).writeStream.option("checkpointLocation", str(tmp_path / "check"))
    if way == "each":
        write = write.foreachBatch(batch_writer(Sample, directory.uri, branch="run/1"))
    else:
        options = {**directory.options, "type": "Sample", "branch": "run/1"}
        write = write.format("ontologia").options(**options)
    query = write.start()
    try:
        query.processAllAvailable()
        with on(directory) as branch, directory.open() as main:
            assert numbers(branch) == {0: 0, 1: 1, 2: 2, 3: 30}
            assert numbers(main) == {0: 0, 1: 1, 2: 2}
        made_anew(directory)
        (tmp_path / "source" / "1.json").write_text('{"id": "s0004", "number": 40}')
        with pytest.raises(StreamingQueryException, match="nothing of the batches before 1 of"):
            query.processAllAvailable()
    finally:
        query.stop()
    with on(directory) as branch:
        assert numbers(branch) == {0: 0, 1: 1, 2: 2}


def test_the_change_feed_of_a_branch(spark: SparkSession, directory: Place, tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []

    def read() -> None:
        options = {**directory.options, "type": "Sample", "branch": "run/1", "changes": "true"}
        feed = spark.readStream.format("ontologia").options(**options, since="1").load()
        started = (
            feed.writeStream.option("checkpointLocation", str(tmp_path / "check"))
            .trigger(availableNow=True)
            .foreachBatch(
                lambda df, _: seen.extend((r["commit_id"], r["id"]) for r in df.collect())
            )
            .start()
        )
        started.awaitTermination()

    with on(directory) as branch, directory.open() as main:
        commit(branch, sample(3))
        commit(main, sample(9))
        read()
        commit(branch, sample(4))
        read()
    assert seen == [(2, "s0003"), (3, "s0004")]
    made_anew(directory)
    with pytest.raises(StreamingQueryException, match="start the query with a new checkpoint"):
        read()
    assert len(seen) == 2
