"""`missing: mark` in Dagster: of a type that is cut, rows of the run's partitions alone."""

from __future__ import annotations

import warnings
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from ontologia_dagster.declaration import OntologyAsset, PartitionSpec, SourceSpec
from ontologia_dagster.ingestion.asset import ingestion_asset
from storage_engine import Entity, Field, Session
from storage_engine.errors import ConfigurationError
from storage_engine.spark.jobs.ingest import type_of
from tests.dagster.world import facts, materialisations, resources, storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MARK = {"set": {"active": False, "ended_at": "now"}, "limit": "50%"}


class Member(Entity):
    id: Field[str] = Field(primary_key=True)
    joined: Field[date]
    active: Field[bool] = Field(default=True)
    ended_at: Field[datetime | None] = Field(default=None)


def members(folder: Path, **more: Any) -> OntologyAsset:
    return OntologyAsset(
        type="Member",
        models=__name__,
        source=SourceSpec(format="csv", paths=[str(folder / "members.csv")]),
        columns={"joined": "CAST(joined AS DATE)"},
        **{"missing": MARK, **more},
    )


def wrote(folder: Path, *rows: str) -> None:
    (folder / "members.csv").write_text("\n".join(["id,joined", *rows, ""]))


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_of_the_partitions_of_the_run(spark: SparkSession, tmp_path: Path) -> None:
    ontology = storage(tmp_path)
    cut = PartitionSpec(kind="monthly", field="joined", start="2013-01-01", end="2013-04-01")
    asset = ingestion_asset(members(tmp_path, partitions=cut, backfill="single_run"))
    instance = dg.DagsterInstance.ephemeral()

    def run(keys: tuple[str, str], **config: Any) -> Any:
        first, last = keys
        return dg.materialize(
            [asset],
            resources=resources(ontology),
            instance=instance,
            tags={
                "dagster/asset_partition_range_start": first,
                "dagster/asset_partition_range_end": last,
            },
            run_config={"ops": {"member": {"config": config}}},
        )

    wrote(tmp_path, "a,2013-01-02", "b,2013-01-31", "c,2013-02-01", "d,2013-03-01")
    run(("2013-01-01", "2013-03-01"))
    wrote(tmp_path, "a,2013-01-02")
    ours = (dg.BetaWarning, dg.PreviewWarning, dg.SupersessionWarning)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        january = run(("2013-01-01", "2013-01-01"))
    assert [str(one.message) for one in told if issubclass(one.category, ours)] == []
    log = [entry.user_message for entry in instance.all_logs(january.run_id)]
    rows = "rows: 1 read, 0 new, 0 changed, 1 unchanged, 1 marked as missing"
    assert f"Member, partition 2013-01-01: commit 2; {rows}" in log
    assert any(text.startswith("took ") and "; waited " in text for text in log)
    shown = facts(materialisations(january)[0].metadata)
    assert (shown["rows_marked"], shown["rows_unchanged"], shown["commit"]) == (1, 1, "2")
    preview = run(("2013-01-01", "2013-03-01"), dry_run=True)
    (event,) = preview.get_asset_observation_events()
    seen = facts(event.asset_observation_data.asset_observation.metadata)
    assert seen["preview_rows_marked"] == 2
    assert "2 of 3 rows" in seen["preview_problem"], "b is marked and counts no more"
    with Session(ontology.storage_uri) as session:
        found = session.query().entities(Member).where(Member.active.is_true()).collect()
        assert sorted(member.id for member in found) == ["a", "c", "d"]


def test_mistakes_are_told_before_spark(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.scope is needed beside where"):
        members(tmp_path, where="id <> 'x'")
    wrong = members(tmp_path, missing={"set": {"activ": False}})
    with pytest.raises(ConfigurationError, match="did you mean 'active'"):
        type_of(wrong.ingest_spec("store", ["a.csv"]))
    plain = members(tmp_path, missing="keep")
    assert plain.code_version == members(tmp_path, missing={"action": "keep"}).code_version
    assert plain.code_version != members(tmp_path).code_version
