"""`jobs/ingest.py` through spark-submit on a standalone cluster of two workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.ingest import Source
from tests.jobs.support import new_storage, order_for, rows
from tests.spark_cluster import spark_cluster

pytestmark = pytest.mark.spark


@pytest.mark.timeout(900)
def test_ingest_on_two_workers(tmp_path: Path) -> None:
    uri = new_storage(tmp_path)
    for part in range(4):
        lines = "".join(f"c{part}{n},name {n},{n}\n" for n in range(50))
        (tmp_path / f"in-{part}.csv").write_text(f"id,name,seats\n{lines}")
    source = Source(
        "csv", (str(tmp_path / "in-*.csv"),), schema="id STRING, name STRING, seats BIGINT"
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
    assert rows(uri, "select count(*) as n, sum(seats) as s from Customer") == [(200, 4 * 1225)]
