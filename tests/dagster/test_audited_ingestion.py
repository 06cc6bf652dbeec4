"""Ingestion with Spark in audited runs: in process and through Pipes, with partitions, retries and
changes of classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ontologia_dagster import OntologyAsset, PartitionSpec, SourceSpec, build_platform
from ontologia_dagster.declaration import one_process_executor
from ontologia_dagster.resources.ontology import OntologyResource
from ontologia_dagster.resources.spark import SparkResource
from storage_engine import Session
from tests.dagster import driver
from tests.dagster.world import (
    MODELS,
    customers,
    facts,
    materialisations,
    resources,
    rows,
    storage,
    version,
)

pytestmark = pytest.mark.spark

YEAR = "id,day,total\n" + "".join(f"{month},2013-{month:02}-02,{month}\n" for month in range(1, 13))
RANGE = {
    "dagster/asset_partition_range_start": "2013-01-01",
    "dagster/asset_partition_range_end": "2013-12-01",
}


@pytest.fixture(autouse=True)
def _one_jvm(spark: Any) -> None:
    """The resource finds the session of the tests."""


def year(folder: Path, text: str = YEAR) -> OntologyAsset:
    path = folder / "orders.csv"
    path.write_text(text)
    return OntologyAsset(
        type="Order",
        models=MODELS,
        source=SourceSpec(format="csv", paths=[str(path)]),
        columns={"day": "CAST(day AS DATE)", "total": "CAST(total AS BIGINT)"},
        partitions=PartitionSpec(kind="monthly", field="day", start="2013-01-01", end="2014-01-01"),
        backfill="single_run",
    )


def platform(
    declared: list[OntologyAsset], bound: dict[str, Any], **options: Any
) -> dg.Definitions:
    return dg.Definitions.merge(
        build_platform(declared, publish="audited", **options),
        dg.Definitions(resources=bound, executor=one_process_executor),
    )


def by_asset(result: Any) -> dict[str, list[dg.AssetMaterialization]]:
    made: dict[str, list[dg.AssetMaterialization]] = {}
    for each in materialisations(result):
        made.setdefault(each.asset_key.path[-1], []).append(each)
    return made


def test_a_backfill_of_twelve_partitions_is_one_publication(tmp_path: Path) -> None:
    """By the job of the type, which has the publication; with another type in the same storage.
    Only what changed has another version the next time."""
    ontology = storage(tmp_path, publish="audited", explore_url="https://onto.example")
    bound = resources(ontology)
    with dg.DagsterInstance.ephemeral() as instance:
        job = platform([year(tmp_path)], bound).resolve_job_def("ontology_ingest_order")
        result = job.execute_in_process(instance=instance, tags=RANGE)

        made = by_asset(result)
        assert {m.partition: version(m) for m in made["order"]} == {
            f"2013-{month:02}-01": "1" for month in range(1, 13)
        }
        assert {facts(m.metadata)["dagster/partition_row_count"] for m in made["order"]} == {1}
        [published] = made["ontology_publication"]
        said = facts(published.metadata)
        assert said["commit_url"] == "https://onto.example/commits/1"
        assert rows(said["types"]) == [{"type": "Order", "rows": 12, "inserted": 12, "changed": 0}]
        with Session(ontology.storage_uri) as session:
            [commit] = session.list_commits()
            assert commit["kind"] == "merge"
            assert [b.name for b in session.list_branches()] == ["main"]
        assert instance.get_materialized_partitions(dg.AssetKey("order")) == {
            f"2013-{month:02}-01" for month in range(1, 13)
        }

        changed = YEAR.replace("7,2013-07-02,7", "7,2013-07-02,70")
        job = platform([year(tmp_path, changed)], bound).resolve_job_def("ontology_ingest_order")
        again = by_asset(job.execute_in_process(instance=instance, tags=RANGE))
        versions = {m.partition: version(m) for m in again["order"]}
        assert versions["2013-07-01"] == "2"
        assert {v for key, v in versions.items() if key != "2013-07-01"} == {"1"}


def two_types(folder: str) -> dg.JobDefinition:
    """Customers and the orders of a year, for `dg.build_reconstructable_job`."""
    path = Path(folder)
    ontology = OntologyResource(storage_uri=str(path / "store"), publish="audited")
    text = (path / "orders.csv").read_text()
    declared = [customers(path, None), year(path, text)]
    keys = ["customer", "order", "ontology_publication"]
    whole = dg.Definitions.merge(
        platform(declared, resources(ontology)),
        dg.Definitions(
            jobs=[dg.define_asset_job("both", selection=dg.AssetSelection.assets(*keys))]
        ),
    )
    return whole.resolve_job_def("both")


def test_a_failed_run_goes_on_with_its_branch(tmp_path: Path) -> None:
    """The step that failed is tried again in a re-execution; the one before it is not, and both
    are published together."""
    ontology = storage(tmp_path, publish="audited")
    customers(tmp_path)
    (tmp_path / "orders.csv").write_text("id,day,total\n1,2013-01-02,x\n")
    (tmp_path / "home").mkdir()
    job: Any = dg.build_reconstructable_job(
        "tests.dagster.test_audited_ingestion", "two_types", reconstructable_args=(str(tmp_path),)
    )
    with dg.DagsterInstance.local_temp(str(tmp_path / "home")) as instance:
        with dg.execute_job(job, instance, tags=RANGE) as failed:
            assert not failed.success
            root = failed.run_id
        with Session(ontology.storage_uri) as main:
            assert main.repository.head_commit_id() == 0
        with Session(ontology.storage_uri, branch=f"run/{root}") as work:
            assert work.sql("SELECT count(*) AS n FROM Customer").collect()[0]["n"] == 2

        (tmp_path / "orders.csv").write_text(YEAR)
        options = dg.ReexecutionOptions.from_failure(root, instance)
        with dg.execute_job(job, instance, tags=RANGE, reexecution_options=options) as done:
            assert done.success
            steps = {e.step_key for e in done.all_events if e.is_step_success}
            made = [
                e.step_materialization_data.materialization
                for e in done.all_events
                if e.is_step_materialization
            ]
        assert "customer" not in steps
        told = {m.asset_key.path[-1]: version(m) for m in made}
        assert told == {"customer": "1", "order": "1", "ontology_publication": "1"}
        with Session(ontology.storage_uri) as main:
            [commit] = main.list_commits()
            assert commit["rows"] == {"Customer": 2, "Order": 12}
            assert [branch.name for branch in main.list_branches()] == ["main"]


def test_a_pipes_child_is_told_the_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("TEST_DRIVER", "")
    ontology = storage(tmp_path, publish="audited")
    spark = SparkResource(mode="pipes", spark_submit=driver.executable(tmp_path))
    whole = platform([customers(tmp_path)], resources(ontology) | {"spark": spark})
    with dg.DagsterInstance.ephemeral() as instance:
        result = whole.resolve_job_def("ontology_ingest_customer").execute_in_process(
            instance=instance
        )
        assert result.success
    assert f"--branch=run/{result.run_id}" in driver.seen(tmp_path)["command"]
    located = OntologyResource(storage_uri=ontology.storage_uri, branch="pr/7")
    whole = platform([customers(tmp_path)], resources(located) | {"spark": spark}, branch="pr/7")
    with dg.DagsterInstance.ephemeral() as instance:
        assert (
            whole.resolve_job_def("ontology_ingest_customer")
            .execute_in_process(instance=instance)
            .success
        )
    assert "--branch=pr/7" in driver.seen(tmp_path)["command"]


def test_an_additive_change_of_a_class_rides_along(tmp_path: Path) -> None:
    """It is applied on the branch, and main has the old class until all of it is published."""
    from storage_engine import Entity, Field

    class Customer(Entity):
        id: Field[str] = Field(primary_key=True)
        name: Field[str] = Field(sensitive=True)

    ontology = storage(tmp_path, publish="audited")
    with Session(ontology.storage_uri, entity_types=[Customer]) as session:
        session.ensure(Customer(id="c1", name="Ada"))
    declared = customers(tmp_path, schema="additive")
    whole = platform([declared], resources(ontology))
    with dg.DagsterInstance.ephemeral() as instance:
        result = whole.resolve_job_def("ontology_ingest_customer").execute_in_process(
            instance=instance
        )
    [made] = by_asset(result)["customer"]
    assert version(made) == "2"
    assert facts(made.metadata)["schema_version"] == 2
    with Session(ontology.storage_uri) as session:
        assert [c["kind"] for c in session.list_commits()] == ["merge", "data"]
        names = session.at(2).sql("SELECT visits FROM Customer").collect()
        assert [row["visits"] for row in names] == [0, 0]
