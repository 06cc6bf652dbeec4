"""Ingestion assets in process: what they write, what they say, and that nothing is done twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ontologia_dagster.ingestion import ingestion_asset
from tests.dagster.world import (
    customers,
    facts,
    materialisations,
    orders,
    resources,
    storage,
    version,
)

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def _one_jvm(spark: Any) -> None:
    """The resource finds the session of the tests."""


def test_a_run_its_retry_and_a_run_after_a_correction(tmp_path: Path) -> None:
    """The same root run: done once. After the source changed: written. Nothing new: no commit."""
    ontology = storage(tmp_path)
    declared = customers(tmp_path)
    job: Any = dg.build_reconstructable_job(
        "tests.dagster.world", "ingest_job", reconstructable_args=(str(tmp_path),)
    )
    (tmp_path / "home").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "home")) as instance:

        def run(parent: str | None = None) -> tuple[str, dg.AssetMaterialization]:
            again = dg.ReexecutionOptions(parent_run_id=parent) if parent else None
            with dg.execute_job(job, instance, reexecution_options=again) as result:
                [event] = [e for e in result.all_events if e.is_step_materialization]
                return result.run_id, event.step_materialization_data.materialization

        first, one = run()
        _, retried = run(first)
        customers(tmp_path, "id,name\nc1,Ada\nc2,Bob\nc3,Cy\n")
        corrected, two = run(first)
        _, unchanged = run()

    assert [version(each) for each in (one, retried, two, unchanged)] == ["1", "1", "2", "2"]
    said = facts(one.metadata)
    assert (
        said
        | {
            "dagster/row_count": 2,
            "dagster/table_name": "Customer",
            "dagster/uri": ontology.storage_uri,
            "commit": 1,
            "rows_inserted": 2,
            "rows_changed": 0,
            "files": 1,
            "cas_attempts": 1,
        }
        == said
    )
    assert said["requests"] > 0
    assert said["price_estimate_usd"] > 0
    assert [c.name for c in said["dagster/column_schema"].columns] == ["id", "name", "visits"]
    assert facts(retried.metadata)["already_applied"] is True
    assert facts(two.metadata) | {"rows_inserted": 1, "rows_changed": 1} == facts(two.metadata)
    assert facts(unchanged.metadata)["commit"] is None
    assert facts(unchanged.metadata)["rows_unchanged"] == 3
    with ontology.repository() as repository:
        newest, _ = repository.list_commits()
    assert newest.metadata == {
        "dagster/run_id": corrected,
        "dagster/step": "customer",
        "dagster/asset_key": "customer",
        "dagster/code_version": declared.code_version,
    }


def test_partitions_in_one_run_and_in_many(tmp_path: Path) -> None:
    ontology = storage(tmp_path)
    asset = ingestion_asset(orders(tmp_path, backfill="single_run"))

    ranged = dg.materialize(
        [asset],
        resources=resources(ontology),
        tags={
            "dagster/asset_partition_range_start": "2013-01-01",
            "dagster/asset_partition_range_end": "2013-02-01",
        },
    )
    preview = dg.materialize(
        [asset],
        resources=resources(ontology),
        partition_key="2013-03-01",
        run_config={"ops": {"order": {"config": {"dry_run": True}}}},
    )

    def one(key: str) -> dg.AssetMaterialization:
        result = dg.materialize([asset], resources=resources(ontology), partition_key=key)
        [found] = materialisations(result)
        return found

    with ThreadPoolExecutor(2) as pool:  # as two runs of a backfill
        march, april = pool.map(one, ["2013-03-01", "2013-04-01"])
    january = one("2013-01-01")

    found = {m.partition: m for m in materialisations(ranged)}
    counts = {k: facts(m.metadata)["dagster/partition_row_count"] for k, m in found.items()}
    assert counts == {"2013-01-01": 2, "2013-02-01": 1}
    assert {version(m) for m in found.values()} == {"1"}
    [observed] = preview.get_asset_observation_events()
    counted = facts(observed.asset_observation_data.asset_observation.metadata)
    assert counted["preview_rows_inserted"] == 1
    assert materialisations(preview) == []
    assert {version(march), version(april)} == {"2", "3"}
    assert version(january) == "1"  # what last changed a row of it, not of its neighbours
    assert facts(january.metadata)["dagster/row_count"] == 5
    with ontology.repository() as repository:
        said = [commit.metadata["dagster/partitions"] for commit in repository.list_commits()]
    assert {*said[:2]} == {'["2013-03-01"]', '["2013-04-01"]'}
    assert said[2] == '[["2013-01-01", "2013-02-01"]]'


def test_bad_data_is_never_published(tmp_path: Path) -> None:
    ontology = storage(tmp_path)
    declared = customers(tmp_path, "id,name\nc1,Ada\nc2,\n", expectations=[{"not_null": "name"}])

    with pytest.raises(dg.Failure) as caught:
        dg.materialize([ingestion_asset(declared)], resources=resources(ontology))

    assert caught.value.allow_retries is False
    assert "name" in (caught.value.description or "")
    with ontology.repository() as repository:
        assert repository.head_commit_id() == 0
