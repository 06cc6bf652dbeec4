"""The YAML component: what `dg scaffold` writes passes `dg check`, and means what Python means."""

from __future__ import annotations

import os
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner
from dagster_dg_cli.cli import cli

from ontologia_dagster.components import OntologyTypeComponent
from ontologia_dagster.declaration import OntologyAsset, PartitionSpec, SourceSpec
from ontologia_dagster.downstream.queries import query_asset
from ontologia_dagster.ingestion.asset import build_type
from ontologia_dagster.storage.storage_defs import location_resources

COMPONENT = "ontologia_dagster.components.OntologyTypeComponent"
YAML = """
    type: Order
    models: tests.dagster.shop
    source:
      format: csv
      paths: ["orders/{partition_key}.csv"]
      null_value: NA
    columns:
      total: CAST(total AS BIGINT)
    partitions: {kind: monthly, field: day, start: "2013-01-01", end: "2013-04-01"}
    backfill: single_run
    expectations:
      - not_null: day
      - range: {column: total, min: 1}
    schedule: "0 6 2 * *"
    watch_source: true
    freshness: {fail_after: 33d, warn_after: 32d}
    automation: on_new_data
    retry: {max_retries: 5, delay_s: 1.5}
    pool: heavy
    blocking_checks: true
    deps: [landing/orders]
    owners: [team:data]
    schema: additive
"""


def run(folder: Path, *arguments: str) -> str:
    """`dg` in this process: starting one costs seconds."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    finally:
        os.chdir(before)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    (tmp_path / "scaffolded" / "defs").mkdir(parents=True)
    (tmp_path / "scaffolded" / "__init__.py").touch()
    (tmp_path / "scaffolded" / "defs" / "__init__.py").touch()
    (tmp_path / "scaffolded" / "definitions.py").write_text(
        textwrap.dedent(
            """
            from pathlib import Path

            import dagster as dg

            from ontologia_dagster.storage.storage_defs import location_resources

            @dg.definitions
            def defs():
                return dg.Definitions.merge(
                    dg.load_from_defs_folder(path_within_project=Path(__file__).parent),
                    dg.Definitions(resources=location_resources()),
                )
            """
        )
    )
    (tmp_path / "pyproject.toml").write_text(
        textwrap.dedent(
            """
            [project]
            name = "scaffolded"
            version = "0.1"
            [tool.dg]
            directory_type = "project"
            [tool.dg.project]
            root_module = "scaffolded"
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_what_is_scaffolded_is_valid(project: Path) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run(
            project,
            *("scaffold", "defs", COMPONENT, "customers"),
            *("--type", "Customer", "--models", "no.such.models"),
        )
        said = run(project, "check", "yaml")
        from scaffolded.definitions import defs  # type: ignore[import-not-found]

        loaded = defs()
        graph = loaded.resolve_asset_graph()
        dg.Definitions.validate_loadable(loaded)

    assert "validated successfully" in said
    assert dg.AssetKey("customer") in graph.materializable_asset_keys
    ours = [str(one.message) for one in heard if "ontologia_dagster" in one.filename]
    assert ours == []
    assert "no.such" not in sys.modules


def test_yaml_means_what_python_means() -> None:
    from_yaml = OntologyTypeComponent.resolve_from_yaml(YAML)
    python = OntologyAsset(
        type="Order",
        models="tests.dagster.shop",
        source=SourceSpec(format="csv", paths=["orders/{partition_key}.csv"], null_value="NA"),
        columns={"total": "CAST(total AS BIGINT)"},
        partitions=PartitionSpec(kind="monthly", field="day", start="2013-01-01", end="2013-04-01"),
        expectations=[{"not_null": "day"}, {"range": {"column": "total", "min": 1}}],
    )
    assert from_yaml.code_version == python.code_version
    assert (from_yaml.schema_changes, python.schema_changes) == ("additive", "strict")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = build_type(from_yaml)
    graph = dg.Definitions.merge(
        made, dg.Definitions(resources=location_resources())
    ).resolve_asset_graph()
    node: Any = graph.get(dg.AssetKey("order"))
    assert node.partitions_def.get_partition_keys() == ["2013-01-01", "2013-02-01", "2013-03-01"]
    assert node.backfill_policy.policy_type.name == "SINGLE_RUN"
    assert node.automation_condition.get_label() == "on_new_data"
    assert node.pools == {"heavy"}
    assert node.owners == ["team:data"]
    assert node.freshness_policy is not None
    assert {key.to_user_string() for key in node.parent_keys} == {"landing/orders"}
    assert {check.name for check in graph.asset_check_keys} == {"index_verify", "schema_matches"}
    [schedule], [sensor] = list(made.schedules or []), list(made.sensors or [])
    assert (schedule.name, sensor.name) == ("ingest_order_schedule", "order_source")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"partitions": {"kind": "daily", "field": "day"}}, "need `start`"),
        ({"partitions": {"kind": "static", "field": "day"}}, "need `keys`"),
        ({"tipe": "Order"}, "tipe"),
        ({"schema": "anything"}, "'strict' or 'additive'"),
    ],
)
def test_mistakes_are_named(wrong: dict[str, Any], said: str) -> None:
    right = {"type": "Order", "models": "m", "source": {"paths": ["x.csv"]}}
    with pytest.raises(ValueError, match=said):
        OntologyAsset.model_validate({**right, **wrong})


def test_a_condition_by_its_name_in_python_is_that_condition() -> None:
    shop: dict[str, Any] = {
        "type": "Order",
        "models": "tests.dagster.shop",
        "source": SourceSpec(paths=["a.csv"]),
    }
    named = OntologyAsset(**shop, automation="on_cron(0 6 * * *)")
    given = OntologyAsset(**shop, automation=dg.AutomationCondition.on_cron("0 6 * * *"))
    assert named.automation == given.automation
    [asset] = build_type(OntologyAsset(**shop, automation="eager")).assets or ()
    assert isinstance(asset, dg.AssetsDefinition)
    assert list(asset.automation_conditions_by_key.values()) == [dg.AutomationCondition.eager()]
    asked = query_asset("late", "select 1", automation="on_missing")
    assert [*asked.automation_conditions_by_key.values()] == [dg.AutomationCondition.on_missing()]
    for wrong in ("daily", "on_cron()"):
        with pytest.raises(ValueError, match="none of on_new_data, eager, on_missing, on_cron"):
            OntologyAsset(**shop, automation=wrong)
        with pytest.raises(ValueError, match="none of on_new_data, eager, on_missing, on_cron"):
            query_asset("late", "select 1", automation=wrong)


@pytest.mark.parametrize(
    ("members", "version"),
    [
        ({}, "87913e879d94"),
        ({"drift": {"added": "fail"}}, "de79354635cb"),
        ({"drift": {"added": "ignore", "missing": "fail", "retyped": "fail"}}, "561a3934f6f2"),
        ({"expectations": [{"unique": ["a"]}]}, "fed241f9e7b0"),
        ({"expectations": [{"range": {"column": "a", "min": 1, "max": None}}]}, "eacb1b8a1f1e"),
        ({"meta": {"team": "sales"}, "quarantine": "/bad"}, "87913e879d94"),
    ],
)
def test_code_versions_stay_what_they_were_in_0_1_0(members: dict[str, Any], version: str) -> None:
    """Another one makes an asset look changed, and its last unit of work not applied."""
    source = SourceSpec(format="csv", paths=["a.csv"], row_schema="id STRING")
    declared = OntologyAsset(type="Customer", models="shop.models", source=source, **members)
    assert declared.code_version == version


def test_dg_knows_the_members_of_a_source_by_their_yaml_names() -> None:
    known = SourceSpec.model_json_schema()["properties"]
    assert {"format", "paths", "options", "row_schema", "null_value", "fingerprint"} == set(known)
