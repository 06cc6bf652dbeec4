"""Streams: each input row is published once, each change is read once, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from storage_engine import ConfigurationError, OntologiaConfig, Session, initialize_storage
from storage_engine.spark import batch_writer, register
from storage_engine.spark.datasource import OntologiaDataSource
from tests.spark import read_world as world
from tests.spark.read_world import Place, Sample, commit, expected, sample
from tests.spark.streams import PLACES, query, stream

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]  # a second JVM beside others

FILES = 2
ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(spark: SparkSession, tmp_path: Path) -> Place:
    register(spark)
    made = Place(str(tmp_path / "onto"), OntologiaConfig())
    initialize_storage(made.uri)
    with made.open() as session:
        commit(session, sample(999))
    return made


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Files of JSON lines, a batch each. All but the first also change rows of the one before:
    a batch that were published twice, or late, would show."""
    folder = tmp_path / "source"
    folder.mkdir()
    for n in range(FILES):
        lines = [{"id": f"s{k:04}", "number": n} for k in range(n * 4, n * 4 + 8)]
        path = folder / f"{n}.json"
        path.write_text("\n".join(json.dumps(line) for line in lines))
        os.utime(path, (1_700_000_000 + n, 1_700_000_000 + n))  # the order of batches
    return str(folder)


def run(query: Any, checkpoint: Path) -> None:
    started = query.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    try:
        started.awaitTermination()
    finally:
        started.stop()


def check(place: Place) -> None:
    """One commit per batch, in order, with all of its rows."""
    with place.open() as session:
        found = [
            {int(row["id"][1:]): row["number"] for row in expected(session, Sample, as_of=n + 2)}
            for n in range(FILES)
        ]
        numbers: dict[int, int] = {999: 999}
        for n in range(FILES):
            numbers |= dict.fromkeys(range(n * 4, n * 4 + 8), n)
            assert found[n] == numbers
        assert session.repository.head_commit_id() == FILES + 1


class Planted(Exception):
    pass


@pytest.mark.parametrize("point", ["before", "after"])
def test_for_each_batch_fails_around_its_commit(
    spark: SparkSession, place: Place, source: str, tmp_path: Path, point: str
) -> None:
    with place.open() as session:
        write = batch_writer(Sample, session)

        def failing(df: DataFrame, batch_id: int) -> None:
            if batch_id == 1 and point == "before":
                raise Planted
            write(df, batch_id)
            if batch_id == 1:
                raise Planted

        with pytest.raises(StreamingQueryException, match="Planted"):
            run(stream(spark, source).writeStream.foreachBatch(failing), tmp_path / "checkpoint")
        run(stream(spark, source).writeStream.foreachBatch(write), tmp_path / "checkpoint")
    check(place)


def test_queries_killed_by_sigkill_go_on_from_their_checkpoints(
    spark: SparkSession, source: str, tmp_path: Path
) -> None:
    """While a batch is staged, and between its commit and Spark's own note that it is done."""
    register(spark)
    places = {name: tmp_path / name for name in PLACES}
    for place in places.values():
        place.mkdir()
        initialize_storage(str(place / "onto"))
        with Session(str(place / "onto")) as session:
            commit(session, sample(999))
    with (tmp_path / "log").open("wb") as log:
        doomed = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/spark/streams.py"), source, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        while not all((place / "held").exists() for place in places.values()):
            assert doomed.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.1)
    finally:
        os.killpg(doomed.pid, signal.SIGKILL)  # the driver and its JVM
        doomed.wait()

    for name, place in places.items():
        staged = "staged" in name
        with Session(str(place / "onto")) as session:
            assert session.repository.head_commit_id() == (1 if staged else 2), name
            assert len(list((place / "onto" / "staged").rglob("*.parquet"))) == 1, name
            commit(session, sample(2, 4711))  # of the killed batch too
    running = [query(spark, source, place).start() for place in places.values()]
    for one in running:
        one.awaitTermination()
    for name, place in places.items():
        staged = "staged" in name
        with Session(str(place / "onto")) as session:
            found = {int(row["id"][1:]): row["number"] for row in expected(session, Sample)}
            stays = {} if staged else {2: 4711}  # a batch that had been published is not repeated
            numbers = dict.fromkeys(range(4), 0) | dict.fromkeys(range(4, 12), 1)
            assert found == {**numbers, 999: 999, **stays}, name
            assert session.repository.head_commit_id() == 4, name


@contextmanager
def failing_sink(spark: SparkSession, point: str) -> Iterator[str]:
    class Failing(OntologiaDataSource):
        @classmethod
        def name(cls) -> str:
            return f"failing_{point}"

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:
            made: Any = super().streamWriter(schema, overwrite)
            publish = made.commit

            def commit(messages: Any, batch_id: int) -> None:
                if batch_id == 1 and point == "before":
                    raise ConnectionError("planted")
                publish(messages, batch_id)
                if batch_id == 1:
                    raise ConnectionError("planted")

            made.commit = commit
            return made

    spark.dataSource.register(Failing)
    yield Failing.name()


@pytest.mark.parametrize("point", ["before", "after"])
def test_the_sink_fails_around_its_commit(
    spark: SparkSession, place: Place, source: str, tmp_path: Path, point: str
) -> None:
    with failing_sink(spark, point) as format:
        for name, fails in ((format, True), ("ontologia", False)):
            query = stream(spark, source).writeStream.format(name)
            query = query.options(**place.options, type="Sample")
            if fails:
                with pytest.raises(StreamingQueryException, match="planted"):
                    run(query, tmp_path / "checkpoint")
            else:
                run(query, tmp_path / "checkpoint")
    check(place)


def test_each_change_once_over_restarts(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """A commit, a failing batch, compaction and more commits between runs of one query."""
    seen: list[tuple[int, str, str]] = []

    def follow(fail_at: int | None = None) -> None:
        def take(df: DataFrame, batch_id: int) -> None:
            found = [(r["commit_id"], r["id"], r["operation"]) for r in df.collect()]
            if batch_id == fail_at:
                raise Planted
            seen.extend(found)

        feed = spark.readStream.format("ontologia").options(
            **place.options, type="Sample", changes="true", max_commits="2", columns="id"
        )
        run(feed.load().writeStream.foreachBatch(take), tmp_path / "checkpoint")

    with place.open() as session:
        world.first_commits(session)
        with pytest.raises(StreamingQueryException, match="Planted"):
            follow(fail_at=1)
        world.compact(session)
        follow()
        follow()  # nothing new
        commit(session, sample(5, 4711), sample(4711))
        follow()
        changes = [c for c in session.changes(0) if c["type_name"] == "Sample"]
        assert sorted(seen) == sorted((c["commit_id"], c["key"], c["operation"]) for c in changes)


def test_a_storage_that_was_begun_anew_is_noticed(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    """Its commits have the numbers of those that were read before."""
    feed = spark.readStream.format("ontologia").options(
        **place.options, type="Sample", changes="true"
    )
    run(feed.load().writeStream.format("noop"), tmp_path / "checkpoint")
    plan = initialize_storage(place.uri, force=True, dry_run=True)
    initialize_storage(place.uri, force=True, token=plan.token)
    with place.open() as session:
        for n in range(3):
            commit(session, sample(n))
    with pytest.raises(StreamingQueryException, match="was erased and begun anew"):
        run(feed.load().writeStream.format("noop"), tmp_path / "checkpoint")


def test_mistakes(spark: SparkSession, place: Place, source: str, tmp_path: Path) -> None:
    feed = spark.readStream.format("ontologia").options(**place.options, type="Sample")
    with pytest.raises(Exception, match="a stream reads the change feed; add"):
        run(feed.load().writeStream.format("noop"), tmp_path / "a")
    sink = stream(spark, source).writeStream.format("ontologia")
    with pytest.raises(Exception, match="a stream has no version"):
        run(sink.options(**place.options, type="Sample", version="1", app_id="a"), tmp_path / "b")
    with pytest.raises(ConfigurationError, match="leave idempotency out"):
        batch_writer(Sample, place.uri, idempotency=("a", 1))
    with pytest.raises(ConfigurationError, match="foreachBatch of a streaming query"):
        batch_writer(Sample, place.uri)(spark.range(1), 0)
    with Session(place.uri) as session, pytest.raises(ConfigurationError, match="storage's URI"):
        batch_writer(Sample, session).__getstate__()
