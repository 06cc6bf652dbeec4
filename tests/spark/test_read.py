"""Reading into Spark: the same rows as a Session reads, whatever the files look like."""

from __future__ import annotations

import pickle
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import SecretStr
from pyspark.sql import SparkSession

from storage_engine import (
    ConfigurationError,
    Entity,
    Field,
    OntologiaConfig,
    SchemaOutdatedError,
    Session,
    UninitializedStorageError,
    UnknownTagError,
    initialize_storage,
)
from storage_engine.config import S3Credentials
from storage_engine.model import spec_of
from storage_engine.repository import open_repository
from storage_engine.spark import scans, write_type
from storage_engine.spark.reader import read_entities, read_relations, read_type
from tests.conformance.test_rfc0009_migration import V1, V2, migrate, row, write
from tests.servers import S3Server
from tests.spark import read_world as world
from tests.spark.read_world import Follows, Place, Sample, Stay, commit, expected, rows, sample

pytestmark = pytest.mark.spark


@pytest.fixture(params=["directory", pytest.param("seaweedfs", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Spark opens the files of a directory itself; those of S3 it gets through Arrow."""
    if request.param == "directory":
        made = Place(str(tmp_path / "tier=Gold"), OntologiaConfig())
    else:
        server: S3Server = request.getfixturevalue("seaweedfs_s3")
        made = Place(f"s3://{server.make_bucket()}/onto", server.config())
    initialize_storage(made.uri, config=made.config)
    return made


@pytest.fixture
def directory(tmp_path: Path) -> Place:
    made = Place(str(tmp_path / "onto"), OntologiaConfig())
    initialize_storage(made.uri)
    return made


def test_every_window_of_every_type_before_and_after_compaction(
    spark: SparkSession, place: Place
) -> None:
    with place.open() as session:
        world.first_commits(session)
        for type in (Sample, Follows, Stay):
            read = partial(read_type, spark, type, session)
            world.check_every_window(spark, session, type, read)
        world.compact(session)
        commit(session, *(sample(n, 900 + n) for n in range(5, 8)))
        world.stage(session, range(6, 9), 950)
        world.check_every_window(spark, session, Sample, partial(read_type, spark, Sample, session))


def test_many_bulk_commits(spark: SparkSession, directory: Place) -> None:
    """More than are united one by one: their commit ids are looked up. The names of folders in the
    storage's own path, and of types, can be those that the lookup goes by."""
    with directory.open() as session:
        for n in range(10):
            world.stage(session, range(n, n + 3), 1000 + n)
        world.check_every_window(spark, session, Sample, partial(read_type, spark, Sample, session))


class staged(Entity):
    id: Field[str] = Field(primary_key=True)


def test_names_of_the_layout_can_be_names_of_users(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "_NAMED", 0)
    uri = str(tmp_path / "staged" / "x" / "entities" / "staged" / "v1")
    initialize_storage(uri)
    with Session(uri) as session:
        for key in "ab":
            frame = spark.createDataFrame([(key,)], "id string")
            assert write_type(frame, staged, session).inserted == 1
        found = read_type(spark, staged, session, history=True).collect()
        assert sorted(map(tuple, found)) == [(1, "a"), (2, "b")]


def test_s3a_is_believed_only_where_it_means_the_same_server() -> None:
    same = scans.same_server
    assert same("", "")
    assert same("s3.eu-west-1.amazonaws.com", "")
    assert same("http://127.0.0.1:8333/", "http://127.0.0.1:8333")
    assert not same("", "http://127.0.0.1:8333")
    assert not same("https://minio.example.com", "")
    assert not same("http://127.0.0.1:8334", "http://127.0.0.1:8333")


@pytest.mark.parametrize("name", ["plain", "odd [x]{y} *"])
def test_columns_and_filters(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Also in a folder whose name Hadoop takes for a pattern."""
    initialize_storage(tmp_path / name)
    with Session(tmp_path / name) as session:
        world.first_commits(session)
        all_rows = expected(session, Sample)
        frame = read_entities(spark, Sample, session, columns=["number", "id"])
        assert frame.columns == ["number", "id"]
        assert rows(frame) == world.in_order(
            {"number": row["number"], "id": row["id"]} for row in all_rows
        )
        # 8 was 8 once, then 200: a condition on values must not bring the old version back.
        stale = read_entities(spark, Sample, session, filter="number = 8", columns=["id"])
        assert rows(stale) == []
        filtered = read_entities(
            spark, Sample, session, filter="number >= 300 AND flag", columns=["id", "commit_id"]
        )
        ids = {row["id"] for row in all_rows if row["number"] >= 300 and row["flag"]}
        assert ids
        assert {row["id"] for row in rows(filtered)} == ids
        # One DataFrame, used twice in one query with different filters.
        frame = read_type(spark, "Sample", session)
        low, high = frame.filter("number < 200"), frame.filter("number >= 200")
        assert rows(low.unionByName(high)) == all_rows
        assert rows(low.join(high, "id")) == []
        stays = read_relations(spark, Stay, session, filter="visit = 'v1'")
        assert rows(stays) == [
            {"left_key": "s0001", "right_key": "s0002", "visit": "v1", "nights": 2}
        ]


def test_a_dataframe_shows_one_commit_for_ever(spark: SparkSession, directory: Place) -> None:
    with directory.open() as session:
        world.first_commits(session)
        pinned = {name: expected(session, Sample, **w) for name, w in _WINDOWS.items()}
        frames = {name: read_type(spark, Sample, session, **w) for name, w in _WINDOWS.items()}
        commit(session, sample(0, -1), sample(77))
        world.compact(session)
        commit(session, sample(1, -1))
        for name, frame in frames.items():
            found = [{k: v for k, v in r.items() if k != "commit_id"} for r in rows(frame)]
            assert world.in_order(found) == pinned[name]
            assert world.in_order(found) == pinned[name]  # each time it runs


_WINDOWS: dict[str, dict[str, Any]] = {
    "latest": {},
    "as of": {"as_of": 2},
    "history": {"history": True},
}


def test_unique_identities_need_no_join(spark: SparkSession, directory: Place) -> None:
    """One load, and a compacted type: the plan is the plain scan that it should be."""
    with directory.open() as session:
        world.stage(session, range(50), 1)
        for n in range(3):
            plan = _plan_of(read_type(spark, Sample, session))
            assert ("Join" in plan, "Union" in plan) == (n == 1, False), plan
            if n == 0:
                world.stage(session, range(10, 60), 2)
            elif n == 1:
                world.compact(session)
        assert rows(read_type(spark, Sample, session)) == expected(session, Sample)


def _plan_of(frame: Any) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


def test_points_in_history_by_time_and_tag(spark: SparkSession, directory: Place) -> None:
    with directory.open() as session:
        commit(session, sample(1))
        session.repository.create_tag("before")
        between = datetime.now(UTC)
        commit(session, sample(2))
        first = expected(session, Sample, as_of=1)
        assert rows(read_type(spark, Sample, directory.uri, as_of="before")) == first
        assert rows(read_type(spark, Sample, directory.uri, as_of=between)) == first
        assert rows(read_type(spark, Sample, directory.uri, as_of=0)) == []
        assert rows(read_type(spark, Sample, directory.uri, as_of=99)) == expected(session, Sample)
        with pytest.raises(UnknownTagError, match="no tag 'after'"):
            read_type(spark, Sample, session, as_of="after")


@pytest.mark.parametrize("engine", ["directory v1", "sqlite v2"])
def test_other_engines(spark: SparkSession, tmp_path: Path, engine: str) -> None:
    where = tmp_path / ("onto.db" if engine.startswith("sqlite") else "onto")
    initialize_storage(where, engine_version=engine[-2:])
    with Session(where) as session:
        world.first_commits(session)
        world.check_every_window(spark, session, Sample, partial(read_type, spark, Sample, session))
        found = read_type(spark, Stay, session, columns=["visit"], filter="nights = 2")
        assert rows(found) == [{"visit": "v1"}]


@pytest.mark.parametrize("engine", ["v1", "v2"])
def test_after_a_migration(spark: SparkSession, tmp_path: Path, engine: str) -> None:
    """v2 reads the current version; v1 all of them, in the current one."""
    uri = str(tmp_path / "onto")
    initialize_storage(uri, engine)
    with closing(open_repository(uri)) as repository:
        write(repository, V1, row("a", name="Ann", age=1), row("b", name="Bob", age=2))
        migrate(repository, V2)
        write(repository, V2, row("b", name="Bobby", age=2.5, tier="gold"))
        migrated = cast(type[Entity], V2.python_class)
        now = [("a", "Ann", 1.0, "basic"), ("b", "Bobby", 2.5, "gold")]
        frame = read_entities(spark, migrated, uri)
        assert sorted(tuple(r) for r in frame.collect()) == now
        history = read_entities(spark, migrated, uri, history=True)
        shown = sorted((r["commit_id"], r["name"], r["tier"]) for r in history.collect())
        older = [(1, "Ann", "basic"), (1, "Bob", "basic")] if engine == "v1" else []
        assert shown == [*older, (2, "Ann", "basic"), (2, "Bob", "basic"), (3, "Bobby", "gold")]
        then = read_entities(spark, migrated, uri, as_of=1)
        assert sorted(r["name"] for r in then.collect()) == [name for _, name, _ in older]
        with pytest.raises(SchemaOutdatedError):
            read_entities(spark, cast(type[Entity], V1.python_class), uri)


def test_mistakes(spark: SparkSession, directory: Place) -> None:
    with directory.open() as session:
        assert rows(read_type(spark, Sample, session)) == []  # declared, nothing stored yet
        commit(session, sample(1))

        class Sample2(Entity, name="Sample"):
            id: Field[str] = Field(primary_key=True)

        for error, said, read in (
            (ConfigurationError, "did you mean 'Sample'", partial(read_type, spark, "Smple")),
            (ConfigurationError, "use read_entities", partial(read_relations, spark, Sample)),
            (SchemaOutdatedError, "field 'number' removed", partial(read_type, spark, Sample2)),
        ):
            with pytest.raises(error, match=said):
                read(session)
        with pytest.raises(ConfigurationError, match=r"unknown column 'nmber', did you mean"):
            read_type(spark, Sample, session, columns=["id", "nmber"])
        with pytest.raises(ConfigurationError, match=r"filter 'nmber > 1' on Sample: .*nmber"):
            read_type(spark, Sample, session, filter="nmber > 1")
    with pytest.raises(UninitializedStorageError, match="onto init"):
        read_type(spark, Sample, str(Path(directory.uri) / "elsewhere"))
    with Session(":memory:") as session:
        commit(session, sample(1))
        with pytest.raises(ConfigurationError, match="memory of this process"):
            read_type(spark, Sample, session)


def test_tasks_are_who_the_driver_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that a program gives travel with the tasks: workers may know none, or others."""
    given = S3Credentials(access_key_id="key", secret_access_key=SecretStr("hush"))
    config = OntologiaConfig(s3_credentials=given, s3_endpoint_url="http://127.0.0.1:9")
    sent: list[Any] = []
    monkeypatch.setattr(scans, "in_arrow", lambda _spark, _n, work, _schema: sent.append(work))
    spark: Any = None
    scans.ArrowScan(spark, spec_of(Sample), "s3://bucket/store", config).read(
        [], ["id"], with_commit_id=False
    )

    [work] = pickle.loads(pickle.dumps(sent))

    assert work.args[1] == config
    assert work.args[1].s3_credentials == given
    store = scans.task_store("s3://bucket/store", work.args[1])
    assert store is scans.task_store("s3://bucket/store", config)
