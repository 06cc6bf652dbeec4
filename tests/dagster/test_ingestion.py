"""Ingestion assets in process: what they write, what they say, and that nothing is done twice."""

from __future__ import annotations

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


def test_a_materialisation_tells_what_was_written(tmp_path: Path) -> None:
    ontology = storage(tmp_path)
    declared = customers(tmp_path)
    instance = dg.DagsterInstance.ephemeral()
    asset = ingestion_asset(declared)

    first = dg.materialize([asset], resources=resources(ontology), instance=instance)
    again = dg.materialize([asset], resources=resources(ontology), instance=instance)
    customers(tmp_path, "id,name\nc1,Ada\nc2,Bob\nc3,Cy\n")
    changed = dg.materialize([asset], resources=resources(ontology), instance=instance)

    [one], [two], [three] = (materialisations(result) for result in (first, again, changed))
    assert [version(each) for each in (one, two, three)] == ["1", "1", "2"]
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
    assert facts(two.metadata) | {"commit": None, "rows_unchanged": 2} == facts(two.metadata)
    assert facts(three.metadata) | {"rows_inserted": 1, "rows_changed": 1} == facts(three.metadata)
    with ontology.repository() as repository:
        newest, _ = repository.list_commits()
    assert newest.metadata == {
        "dagster/run_id": changed.run_id,
        "dagster/step": "customer",
        "dagster/asset_key": "customer",
        "dagster/code_version": declared.code_version,
    }


def test_partitions_in_one_run_and_in_many(tmp_path: Path) -> None:
    ontology = storage(tmp_path)
    asset = ingestion_asset(orders(tmp_path, backfill="single_run"))
    instance = dg.DagsterInstance.ephemeral()

    ranged = dg.materialize(
        [asset],
        resources=resources(ontology),
        instance=instance,
        tags={
            "dagster/asset_partition_range_start": "2013-01-01",
            "dagster/asset_partition_range_end": "2013-02-01",
        },
    )
    single = dg.materialize(
        [asset], resources=resources(ontology), instance=instance, partition_key="2013-03-01"
    )
    unchanged = dg.materialize(
        [asset], resources=resources(ontology), instance=instance, partition_key="2013-01-01"
    )

    found = {m.partition: m for m in materialisations(ranged)}
    counts = {k: facts(m.metadata)["dagster/partition_row_count"] for k, m in found.items()}
    assert counts == {"2013-01-01": 2, "2013-02-01": 1}
    assert {version(m) for m in found.values()} == {"1"}
    [march], [january] = materialisations(single), materialisations(unchanged)
    assert (version(march), version(january)) == ("2", "1")
    assert facts(march.metadata)["dagster/row_count"] == 4
    with ontology.repository() as repository:
        said = [commit.metadata["dagster/partitions"] for commit in repository.list_commits()]
    assert said == ["2013-03-01", "2013-01-01,2013-02-01"]


def test_bad_data_is_never_published(tmp_path: Path) -> None:
    ontology = storage(tmp_path)
    declared = customers(tmp_path, "id,name\nc1,Ada\nc2,\n", expectations=[{"not_null": "name"}])

    with pytest.raises(dg.Failure) as caught:
        dg.materialize([ingestion_asset(declared)], resources=resources(ontology))

    assert caught.value.allow_retries is False
    assert "name" in (caught.value.description or "")
    with ontology.repository() as repository:
        assert repository.head_commit_id() == 0
