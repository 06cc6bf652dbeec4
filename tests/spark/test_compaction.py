"""Compaction by Spark: the same reads, proven, and nothing but orphans after a crash."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from storage_engine import CompactionPolicy, Session
from storage_engine.config import OntologiaConfig
from storage_engine.errors import IntegrityError, LeaseExpiredError
from storage_engine.maintenance.compaction import plan_compaction, run
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.repository import initialize_storage, open_repository
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.spark.jobs import compact
from tests.engines import (
    CUSTOMER,
    EMPLOYMENT,
    PRODUCT,
    commit,
    customer,
    edge,
    product,
    put,
    rows_of,
    stream_of,
)
from tests.maintenance.reads import entries_of, seen
from tests.spark.gates import Gate, await_file, in_thread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

EAGER = CompactionPolicy(min_entries=2)
# The smallest parts there can be: three or so, of rows that do not compress.
SMALL = OntologiaConfig(snapshot_part_bytes=65_536, snapshot_row_group_rows=1_000)
NOISE = random.Random(1)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[ObjectRepository]:
    """Staged parts, small commits, updates, and a keyed relation."""
    uri = str(tmp_path / "store")
    initialize_storage(uri, engine_version="v2")
    with closing(open_repository(uri, SMALL)) as opened:
        assert isinstance(opened, ObjectRepository)
        commit(
            opened,
            stream_of(
                CUSTOMER,
                [customer(f"k{n:04d}", NOISE.randbytes(100).hex(), n) for n in range(2000)],
            ),
        )
        commit(opened, rows_of(PRODUCT, product("b"), product("c")))
        for n in range(3):
            put(opened, customer("k0000", age=-n), customer(f"new{n}", "Zoë", None))
            commit(
                opened,
                rows_of(
                    EMPLOYMENT,
                    edge("k0001", "b", f"{n}", role="x"),
                    edge("k0001", "c", "1", role=f"{n}"),
                ),
            )
        yield opened


def _session(repository: ObjectRepository) -> Session:
    from storage_engine.runtime.core import SessionSettings
    from storage_engine.runtime.session import session_on

    return session_on(repository, SessionSettings.of(SMALL))


def test_reads_stay_the_same_and_parts_do_not_overlap(
    spark: SparkSession, repository: ObjectRepository
) -> None:
    from storage_engine.spark.compaction import compact_with_spark

    before = {spec.name: seen(repository, spec) for spec in (CUSTOMER, EMPLOYMENT)}
    report = compact_with_spark(spark, _session(repository), policy=EAGER, above_bytes=0)
    assert [(run.type_name, run.outcome) for run in report.runs] == [
        ("Customer", "published"),
        ("Employment", "published"),
    ]
    assert {spec.name: seen(repository, spec) for spec in (CUSTOMER, EMPLOYMENT)} == before
    [entry] = entries_of(repository)
    current = [f for f in entry.files if f.role == "current"]
    assert len(current) > 2
    assert sum(f.row_count for f in current) == 2003
    assert sum(f.row_count for f in entry.files) == 2006
    ranges = [f.key_range["entity_key"] for f in current]
    assert all(a[1] < b[0] for a, b in pairwise(ranges))
    assert {f.commit_id_source for f in entry.files} == {"column"}
    found = verify_storage(repository, deep=True)
    assert found.ok, found.findings
    again = compact_with_spark(spark, _session(repository), policy=EAGER, above_bytes=0)
    assert again.runs == ()


def test_a_wrong_merge_is_noticed_and_a_crash_leaves_orphans_only(
    spark: SparkSession, repository: ObjectRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql import functions as F

    from storage_engine.spark.compaction import SparkBuild, compact_with_spark

    before, entries = seen(repository), entries_of(repository)
    right = SparkBuild._merge

    def defect(change: Any) -> Any:
        def merge(self: Any, run: Any, attempt: Any, inputs: Any, schema: Any) -> Any:
            return right(self, run, attempt, change(inputs), schema)

        return merge

    defects = {
        "the rows of the inputs": lambda rows: rows.filter("entity_key <> 'k0100'"),
        "rows of the inputs": lambda rows: rows.withColumn(
            "age", F.when(F.col("entity_key") == "k0100", 0).otherwise(F.col("age"))
        ),
    }

    def mislabelled(*arguments: Any) -> Any:
        """Older rows pass for the newest, and the newest for older ones."""
        other = {"current": "superseded", "superseded": "current"}
        return [replace(one, role=other[one.role]) for one in right(*arguments)]

    planted = {said: defect(change) for said, change in defects.items()}
    for said, merge in {**planted, "the newest rows by identity": mislabelled}.items():
        with monkeypatch.context() as patch:
            patch.setattr(SparkBuild, "_merge", merge)
            with pytest.raises(IntegrityError, match=said):
                compact_with_spark(
                    spark, _session(repository), types=["Customer"], policy=EAGER, above_bytes=0
                )
        assert entries_of(repository) == entries

    def crash(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "publish", crash)
        with pytest.raises(KeyboardInterrupt):
            compact_with_spark(
                spark, _session(repository), types=["Customer"], policy=EAGER, above_bytes=0
            )
    assert entries_of(repository) == entries
    assert seen(repository) == before
    orphans = {info.key for info in repository.store.list("snapshots/")}
    assert orphans
    named = {file.path for entry in entries for file in entry.files}
    assert not orphans & named


def test_work_that_cannot_be_published_is_cancelled(
    spark: SparkSession,
    repository: ObjectRepository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from storage_engine.spark.compaction import SparkBuild, compact_with_spark

    right, gate = SparkBuild._merge, Gate(tmp_path)

    def held(self: Any, run: Any, attempt: Any, inputs: Any, schema: Any) -> Any:
        def through(batches: Iterator[Any]) -> Iterator[Any]:
            gate()
            yield from batches

        return right(self, run, attempt, inputs.mapInArrow(through, inputs.schema), schema)

    monkeypatch.setattr(SparkBuild, "_merge", held)
    before, entries = seen(repository), entries_of(repository)
    quick = SMALL.model_copy(update={"s3_lease_ttl_ms": 900})
    with closing(open_repository(repository.uri, quick)) as opened:
        assert isinstance(opened, ObjectRepository)
        job = in_thread(
            lambda: compact_with_spark(
                spark, _session(opened), types=["Customer"], policy=EAGER, above_bytes=0
            )
        )
        await_file(gate.reached)
        (heartbeat,) = (tmp_path / "store" / "meta" / "attempts").iterdir()
        heartbeat.unlink()  # as a collector does that has given the attempt up
        with pytest.raises(LeaseExpiredError, match="nothing was published"):
            job.result(500)
    assert not gate.opened.exists(), "the job was cancelled, not waited for"
    assert entries_of(repository) == entries
    assert seen(repository) == before


def test_damage_stays_visible(spark: SparkSession, repository: ObjectRepository) -> None:
    from storage_engine.spark.compaction import compact_with_spark

    [entry, *_] = entries_of(repository)
    path = repository.store.local_path(entry.files[0].path)
    assert path is not None
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(IntegrityError, match="has other content than its commit wrote"):
        compact_with_spark(
            spark, _session(repository), types=["Customer"], policy=EAGER, above_bytes=0
        )


def test_the_program_uses_spark_above_a_size(
    spark: SparkSession,
    repository: ObjectRepository,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    def start(name: str, _: Any) -> SparkSession:
        started.append(name)
        return spark

    monkeypatch.setattr(compact, "start_spark", start)
    base = ["--storage-uri", repository.uri, "--min-entries=2", "--json"]
    before = seen(repository)
    assert compact.main([*base, "--spark-above=1"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["applied"], plan["total"]["runs"]) == (False, 2)
    [customers, employments] = plan_compaction(repository, EAGER).runs
    between = (customers.bytes + employments.bytes) // 2
    assert compact.main([*base, f"--spark-above={between}", "--apply"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert [run["outcome"] for run in report["runs"]] == ["published", "published"]
    assert len(started) == 1
    with closing(open_repository(repository.uri)) as fresh:
        assert seen(fresh) == before
    assert compact.main([*base, "--type=Nobody"]) == 2
    assert "no type 'Nobody'" in json.loads(capsys.readouterr().out)["error"]["message"]
