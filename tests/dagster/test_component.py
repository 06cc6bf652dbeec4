"""The YAML component: what `dg scaffold` writes passes `dg check`, and means what Python means."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner, Result
from dagster_dg_cli.cli import cli

from ontologia_dagster.components import OntologyTypeComponent
from ontologia_dagster.declaration import OntologyAsset, PartitionSpec, SourceSpec
from ontologia_dagster.downstream.queries import query_asset
from ontologia_dagster.ingestion.asset import build_type
from ontologia_dagster.storage.storage_defs import location_resources
from storage_engine.errors import ConfigurationError

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


MODELS = """
from storage_engine import Entity, Field, Relation


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    tier: Field[str] = Field(default="Standard")


class Product(Entity):
    sku: Field[str] = Field(primary_key=True)
    title: Field[str]
    price: Field[float]


class Purchase(Relation[Customer, Product]):
    quantity: Field[int]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    (tmp_path / "scaffolded" / "defs").mkdir(parents=True)
    (tmp_path / "scaffolded" / "__init__.py").touch()
    (tmp_path / "scaffolded" / "models.py").write_text(MODELS)
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
    yield tmp_path
    for name in [each for each in sys.modules if each.partition(".")[0] == "scaffolded"]:
        del sys.modules[name]


def load() -> dg.Definitions:
    definitions: Any = importlib.import_module("scaffolded.definitions")
    loaded: dg.Definitions = definitions.defs()
    return loaded


def scaffold(folder: Path, name: str, *options: str) -> Result:
    arguments = ["scaffold", "defs", COMPONENT, name, *options]
    with contextlib.chdir(folder):
        return CliRunner().invoke(cli, arguments, catch_exceptions=False)


@pytest.mark.parametrize("form", ["yaml", "python"])
def test_what_is_scaffolded_is_valid(form: str, project: Path) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run(
            project,
            *("scaffold", "defs", COMPONENT, "customers", "--format", form),
            *("--type", "Customer", "--models", "scaffolded.models"),
            *("--source-path", "data/*.csv"),
        )
        said = run(project, "check", "yaml")
        loaded = load()
        graph = loaded.resolve_asset_graph()
        dg.Definitions.validate_loadable(loaded)

    assert "validated successfully" in said
    assert dg.AssetKey("customer") in graph.materializable_asset_keys
    ours = [str(one.message) for one in heard if "ontologia_dagster" in one.filename]
    assert ours == []


def test_scaffolding_says_what_it_needs_and_writes_nothing_that_cannot_load(project: Path) -> None:
    told = scaffold(project, "customers")
    assert told.exit_code == 1
    for option in ("--type", "--models", "--source-path"):
        assert f"{option} (" in told.output
    given = ("--type", "Custmer", "--models", "scaffolded.models", "--source-path", "x.csv")
    told = scaffold(project, "customers", *given)
    assert told.exit_code == 1
    assert "nothing was written" in told.output
    assert "did you mean Customer?" in told.output
    assert not (project / "scaffolded" / "defs" / "customers").exists()
    shown = scaffold(project, "--help").output
    assert "--source-format: csv, json (lines), parquet or jdbc" in shown


# -- mistakes -------------------------------------------------------------------------------------

CUSTOMERS = """\
type: ontologia_dagster.components.OntologyTypeComponent

attributes:
  type: Customer
  models: scaffolded.models
  source: {format: csv, paths: ["{folder}/customers.csv"]}
  columns:
    id: "no"
    name: fullname
    teir: initcap(level)
  expectations:
    - not_null: nmae
    - rnge: {column: name, min: 1}
    - referential: {column: id, type: Custmer}
  schedule: "0 6 * *"
  colums: {}
"""
PRODUCTS = """\
type: ontologia_dagster.components.OntologyTypeComponent

attributes:
  type: Product
  models: scaffolded.model
  source: {format: cvs, paths: ["x.csv"], pths: x}
  freshness: {fail_after: 7 days}
  partitions: {kind: monthly, field: day, start: "2013-01-01", timezone: Europe/Belrin}
  transform: scaffolded.modls:tidy
---
type: ontologia_dagster.components.OntologyTypeComponent

attributes:
  type: Product
  models: scaffolded.models
  name: products_again
  source: {format: json, paths: ["{folder}/products.json"]}
  order_by: pric
  missing: {set: {actve: false}}
  partitions: {kind: monthly, field: title, start: "2013-01-01"}
"""
PURCHASES = """\
type: ontologia_dagster.components.OntologyTypeComponent

attributes:
  type: Purchase
  models: scaffolded.models
  source: {format: csv, paths: ["{folder}/not-there.csv"]}
"""
OTHER = """\
type: dagster.DefsFolderComponent
"""


@pytest.fixture
def mistaken(project: Path) -> Path:
    (project / "customers.csv").write_text("no,full_name,level\nc1,Ada,gold\n")
    (project / "products.json").write_text('{"sku": "p1"}\n{"sku": "p2", "titel": "x"}\n')
    for name, text in (
        ("customers", CUSTOMERS),
        ("products", PRODUCTS),
        ("purchases", PURCHASES),
        ("other", OTHER),
    ):
        folder = project / "scaffolded" / "defs" / name
        folder.mkdir()
        (folder / "defs.yaml").write_text(text.replace("{folder}", str(project)))
    return project


def told_by_loading() -> list[str]:
    """What is wrong, a line each, without the folder."""
    with pytest.raises(Exception, match="Error while") as caught:
        load()
    cause = caught.value.__cause__
    assert isinstance(cause, ConfigurationError)
    first, *lines = str(cause).splitlines()
    assert first == f"{len(lines)} mistakes in declared types:"
    return [line.strip().partition("scaffolded/defs/")[2] for line in lines]


def test_every_mistake_is_told_with_file_line_and_the_nearest_name(
    mistaken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_load = told_by_loading()
    monkeypatch.setenv("DAGSTER_IS_DEFS_VALIDATION_CLI", "1")  # as `dg check defs` does
    checked = told_by_loading()

    csv, json = mistaken / "customers.csv", mistaken / "products.json"
    assert at_load == [
        "customers/defs.yaml:10: columns.teir: Customer has no field 'teir'; did you mean tier?",
        "customers/defs.yaml:12: expectations.0: Customer has no field 'nmae'; did you mean name?",
        "customers/defs.yaml:13: expectation {'rnge': {'column': 'name', 'min': 1}}: 'rnge' is not "
        "known; known are not_null, unique, range, pattern, referential",
        "customers/defs.yaml:14: expectations.2: scaffolded.models has no type 'Custmer'; "
        "did you mean Customer?",
        "customers/defs.yaml:15: schedule is cron, such as '0 6 * * *', not '0 6 * *'",
        "customers/defs.yaml:16: attributes has no member 'colums'; did you mean columns?",
        "products/defs.yaml:5: models scaffolded.model: cannot be imported: ModuleNotFoundError: "
        "No module named 'scaffolded.model'; did you mean scaffolded.models?",
        "products/defs.yaml:6: source.format is one of csv, json, parquet, jdbc, not 'cvs'; "
        "did you mean csv?",
        "products/defs.yaml:6: source has no member 'pths'; did you mean paths?",
        "products/defs.yaml:7: freshness.fail_after: '7 days' is no duration: write 90s, 30m, 12h, "
        "7d, 2w or 1d12h",
        "products/defs.yaml:8: partitions.timezone: 'Europe/Belrin' is unknown; "
        "did you mean Europe/Berlin?",
        "products/defs.yaml:9: transform: there is no module scaffolded.modls; "
        "did you mean scaffolded.models?",
        "products/defs.yaml:18: order_by: Product has no field 'pric'; did you mean price?",
        "products/defs.yaml:19: missing.set of Product: unknown field 'actve' (there are title, "
        "price)",
    ]
    # What files hold is looked at when somebody asks for a check, and no deployment fails of it.
    assert [line for line in checked if line not in at_load] == [
        f"customers/defs.yaml:9: columns.name: {csv} has no column 'fullname'; "
        "did you mean full_name?",
        f"products/defs.yaml:13: columns: nothing gives Product.title: {json} has no such column; "
        "did you mean titel?",
        f"products/defs.yaml:13: columns: nothing gives Product.price: {json} has no such column; "
        "there are sku, titel",
        f"products/defs.yaml:13: columns: {json} has a column 'titel', and Product has no such "
        "field; did you mean title? With `columns` others are left out",
    ]
    assert set(at_load) <= set(checked)


@pytest.mark.parametrize("validating", ["", "1"])
def test_a_file_that_is_not_there_is_no_mistake(
    validating: str, mistaken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("customers", "products"):
        shutil.rmtree(mistaken / "scaffolded" / "defs" / name)
    monkeypatch.setenv("DAGSTER_IS_DEFS_VALIDATION_CLI", validating)
    assert dg.AssetKey("purchase") in load().resolve_asset_graph().materializable_asset_keys


def test_a_declaration_that_lacks_much_is_told_with_the_others(mistaken: Path) -> None:
    text = f"type: {COMPONENT}\nattributes: {{type: Customer}}\n"
    (mistaken / "scaffolded" / "defs" / "products" / "defs.yaml").write_text(text)
    told = told_by_loading()
    assert "products/defs.yaml:2: models is needed" in told
    assert "products/defs.yaml:2: source is needed" in told
    assert len(told) == 8


def test_templates_are_rendered_before_they_are_looked_at(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_MODELS", "scaffolded.models")
    folder = project / "scaffolded" / "defs" / "customers"
    folder.mkdir()
    (folder / "defs.yaml").write_text(
        f"type: {COMPONENT}\nattributes:\n  type: Customer\n"
        '  models: "{{ env.SHOP_MODELS }}"\n'
        '  source: {paths: ["{{ context.project_root }}/x.csv"]}\n'
    )
    assert dg.AssetKey("customer") in load().resolve_asset_graph().materializable_asset_keys


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
    assert {check.name for check in graph.asset_check_keys} == {
        "index_verify",
        "schema_matches",
        "expect_rows_fit",
        "expect_range_total",
        "expect_not_null_day",
    }
    [schedule], [sensor] = list(made.schedules or []), list(made.sensors or [])
    assert (schedule.name, sensor.name) == (
        "ontology_ingest_order_schedule",
        "ontology_order_source",
    )


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
