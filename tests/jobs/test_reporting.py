"""Started by Dagster, a job reports through Pipes what became of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from dagster_pipes import PipesContext, encode_param

from storage_engine import Session
from storage_engine.spark.jobs import ingest
from storage_engine.spark.jobs.ingest import Source
from tests.jobs.support import new_storage, order_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the job's messages go, as Dagster would tell it."""
    context = {
        "asset_keys": ["customers"],
        "code_version_by_asset_key": {"customers": None},
        "provenance_by_asset_key": {"customers": None},
        "partition_key": None,
        "partition_key_range": None,
        "partition_time_window": None,
        "run_id": "run",
        "job_name": "job",
        "retry_number": 0,
        "extras": {},
    }
    path = tmp_path / "messages"
    monkeypatch.setattr(PipesContext, "_instance", None)  # there is one for each process
    monkeypatch.setenv("DAGSTER_PIPES_CONTEXT", encode_param({"data": context}))
    monkeypatch.setenv("DAGSTER_PIPES_MESSAGES", encode_param({"path": str(path)}))
    return path


def _read(path: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        message = json.loads(line)
        found.setdefault(message["method"], []).append(message["params"])
    return found


def test_a_materialisation_with_its_metadata(
    spark: SparkSession, tmp_path: Path, messages: Path
) -> None:
    (tmp_path / "a.csv").write_text("id,name\n1,a\n2,b\n")
    order = order_for(new_storage(tmp_path), Source(format="csv", paths=(str(tmp_path / "a.csv"),)))
    assert ingest.main(order.to_arguments()) == 0
    said = _read(messages)
    [reported] = said["report_asset_materialization"]
    assert reported["data_version"] == "1"
    assert reported["metadata"]["inserted"]["raw_value"] == 2
    assert reported["metadata"]["dagster/table_name"]["raw_value"] == "Customer"
    [result] = said["report_custom_message"]
    assert result["payload"]["commit_id"] == 1
    assert any("2 inserted" in log["message"] for log in said["log"])


def test_on_a_branch(spark: SparkSession, tmp_path: Path, messages: Path) -> None:
    """Main has none of it until the merge; the version is no commit of main's."""
    (tmp_path / "a.csv").write_text("id,name\n1,a\n2,b\n")
    uri = new_storage(tmp_path)
    with Session(uri) as main:
        main.create_branch("run/1")
        source = Source(format="csv", paths=(str(tmp_path / "a.csv"),))
        assert ingest.main(order_for(uri, source, branch="run/1").to_arguments()) == 0
        [reported] = _read(messages)["report_asset_materialization"]
        assert reported["data_version"] == "run/1@1"
        assert main.repository.head_commit_id() == 0
        main.merge("run/1")
        assert main.sql("SELECT count(*) AS n FROM Customer").collect() == [{"n": 2}]


def test_a_failure_is_reported_too(spark: SparkSession, tmp_path: Path, messages: Path) -> None:
    (tmp_path / "a.csv").write_text("id,name\n,a\n")
    order = order_for(new_storage(tmp_path), Source(format="csv", paths=(str(tmp_path / "a.csv"),)))
    assert ingest.main(order.to_arguments()) == 3
    said = _read(messages)
    assert "report_asset_materialization" not in said
    assert "1 row cannot be written" in said["closed"][0]["exception"]["message"]
