"""Programs through spark-submit on a standalone cluster of two workers: `jobs/ingest.py`, and a
write with speculation on."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from storage_engine import Session, initialize_storage
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.model import spec_of
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.spark.jobs.ingest import Source
from tests.jobs.support import new_storage, order_for, rows
from tests.maintenance.reads import entries_of
from tests.spark.speculating import FOLDER, SLOW, Row
from tests.spark_cluster import Cluster, spark_cluster

pytestmark = pytest.mark.spark


@pytest.mark.timeout(900)
def test_ingest_on_two_workers_and_a_write_with_speculation(tmp_path: Path) -> None:
    """One test, because a cluster takes its time to come up."""
    uri = new_storage(tmp_path)
    for part in range(4):
        lines = "".join(f"c{part}{n},name {n},{n}\n" for n in range(50))
        (tmp_path / f"in-{part}.csv").write_text(f"id,name,seats\n{lines}")
    source = Source(
        format="csv",
        paths=(str(tmp_path / "in-*.csv"),),
        row_schema="id STRING, name STRING, seats BIGINT",
    )
    order = order_for(uri, source, idempotency=("crm", 1))
    with spark_cluster(tmp_path / "cluster") as cluster:
        # A task a file, so that both workers have something to do.
        conf = {"spark.sql.files.maxPartitionBytes": "1000"}
        done = cluster.submit("jobs/ingest.py", *order.to_arguments(), "--json", conf=conf)
        assert done.returncode == 0, done.stderr[-3000:]
        result = json.loads(done.stdout.splitlines()[-1])
        assert (result["commit_id"], result["inserted"]) == (1, 200)
        executors = (tmp_path / "cluster" / "work").glob("app-*/*/stderr")
        assert {log.parent.name for log in executors} == {"0", "1"}
        _speculates(cluster, tmp_path / "speculation")
    assert rows(uri, "select count(*) as n, sum(seats) as s from Customer") == [(200, 4 * 1225)]


def _speculates(cluster: Cluster, folder: Path) -> None:
    """Both copies of a task stage a part, one of them after the publish: the rows are there once,
    and garbage collection takes the other part."""
    uri = str(folder / "store")
    initialize_storage(uri, engine_version="v2")
    conf = {f"spark.executorEnv.{FOLDER}": str(folder)}
    done = cluster.submit("tests/spark/speculating.py", uri, str(folder), conf=conf)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["1", "6", "3"]  # commit, rows, parts
    copies = {path.name for path in folder.glob("task-*")}
    assert copies == {"task-0-0", "task-1-0", "task-1-1", "task-2-0"}

    with Session(uri) as session:
        repository = session.repository
        assert isinstance(repository, ObjectRepository)

        def state() -> tuple[list[str], set[str]]:
            [entry] = entries_of(repository, spec_of(Row))
            staged = {info.key for info in repository.store.list("staged/")}
            ids = [str(row.id) for row in session.query().entities(Row).collect()]
            return sorted(ids), staged - {file.path for file in entry.files}

        every = [f"r{n}" for n in range(6)]
        ids, orphans = state()
        assert ids == every
        assert [Path(key).name[:10] for key in orphans] == [f"part-{SLOW:05d}"]
        assert sweep(repository, plan_gc(repository, grace=timedelta(0))).objects >= 1
        assert state() == (every, set())
        assert verify_storage(repository, deep=True).ok
