"""Compaction in process: Spark is started for what is large enough, and for nothing else."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ontologia_dagster.resources.spark import SparkResource
from ontologia_dagster.storage.maintenance import compaction_job
from tests.dagster.shop import Customer, Order
from tests.dagster.world import facts, resources, rows, storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_spark_merges_what_is_above_a_size(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    ontology = storage(tmp_path)
    started: list[SparkResource] = []

    def start(self: SparkResource) -> SparkSession:
        started.append(self)
        return spark

    monkeypatch.setattr(SparkResource, "session", start)

    def write(day: date) -> None:
        with ontology.session() as session:
            session.ensure(Order(id="1", day=day, total=day.day))
            session.ensure(Customer(id=f"c{n}", name=f"{day} {n}") for n in range(500))

    def compact(**config: Any) -> dict[str, Any]:
        result = compaction_job("ontology", []).execute_in_process(
            resources=resources(ontology),
            run_config={
                "ops": {"ontology_compact_types": {"config": {"min_entries": 2, **config}}}
            },
        )
        [event] = [e for e in result.all_events if e.is_successful_output]
        return facts(event.step_output_data.metadata)

    write(date(2013, 1, 1))
    write(date(2013, 1, 2))
    small = compact(dry_run=True)
    sizes = {row["type"]: row["bytes"] for row in rows(small["plan"])}
    assert sizes["Customer"] > sizes["Order"]
    assert [row["by_spark"] for row in rows(small["plan"])] == [0, 0]

    done = compact(spark_above_bytes=(sizes["Customer"] + sizes["Order"]) // 2)

    assert {row["type"]: row["by_spark"] for row in rows(done["plan"])} == {
        "Customer": 1,
        "Order": 0,
    }
    assert [row["outcome"] for row in rows(done["done"])] == ["published", "published"]
    assert done["rows_rewritten"] == 1002
    assert len(started) == 1
    with ontology.session() as session:
        [found] = session.sql("select count(*) as n, min(name) as name from Customer").collect()
    assert found == {"n": 500, "name": "2013-01-02 0"}
