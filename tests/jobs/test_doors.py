"""Every option of IngestSpec, through every door: command line, YAML, Dagster (Python and YAML
component), the writer, the data source. A field that a door lacks fails here. Without Spark."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from ontologia_dagster.components import OntologyTypeComponent
from ontologia_dagster.declaration import OntologyAsset, SourceSpec
from storage_engine.errors import ConfigurationError
from storage_engine.model.expectations import parse_expectations
from storage_engine.spark.datasource import SinkOptions
from storage_engine.spark.ingest_spec import (
    IngestFields,
    IngestSpec,
    SourceFields,
    parse_spec,
    sink_options,
    spec_options,
    writer_fields,
)
from storage_engine.spark.jobs.arguments import ingest_parser, option_table
from storage_engine.spark.jobs.compact import compact_parser
from storage_engine.spark.jobs.ingest import parse
from storage_engine.spark.jobs.merge import merge_parser
from storage_engine.spark.jobs.migrate import migrate_parser
from storage_engine.spark.jobs.stream import stream_parser
from storage_engine.spark.publish import WriteOptions
from storage_engine.spark.spec_members import SpecOption

BASE: dict[str, Any] = {
    "storage_uri": "store",
    "type": "Customer",
    "models": "tests.jobs.shop",
    "source": {"format": "csv", "paths": ["a.csv"], "schema": "id STRING"},
    "on_bad_rows": "quarantine",
}
# What each option is set to, by its path in YAML, and how a command line says it.
SAMPLES: dict[str, tuple[Any, list[str]]] = {
    "storage_uri": ("s3://bucket/shop", ["--storage-uri=s3://bucket/shop"]),
    "branch": ("run/42", ["--branch=run/42"]),
    "type": ("Product", ["--type", "Product"]),
    "models": ("shop.models", ["--models=shop.models"]),
    "source.format": ("json", ["--format=json"]),
    "source.paths": (["b.csv", "c.csv"], ["--source=b.csv", "--source=c.csv"]),
    "source.options": ({"sep": ";", "a": "env:B"}, ["--option=sep=;", "--option=a=env:B"]),
    "source.schema": ("id STRING, n INT", ["--schema=id STRING, n INT"]),
    "source.null_value": ("NA", ["--null-value=NA"]),
    "columns": ({"id": "a = b", "n": "1"}, ["--column=id=a = b", "--column", "n=1"]),
    "where": ("n > 1", ["--where=n > 1"]),
    "outside": ("n > 9", ["--outside=n > 9"]),
    "count_by": ("name", ["--count-by=name"]),
    "transform": ("shop:tidy", ["--transform=shop:tidy"]),
    "distinct": (True, ["--distinct"]),
    "drift": ({"added": "ignore"}, ["--drift=added=ignore"]),
    "order_by": ("n", ["--order-by=n"]),
    "on_bad_rows": ("fail", ["--on-bad-rows=fail"]),
    "quarantine": ("/aside", ["--quarantine=/aside"]),
    "expectations": ([{"not_null": "id"}], ['--expect={"not_null": "id"}']),
    "missing": (
        {"action": "mark", "set": {"active": False, "ended_at": "now"}, "limit": "5%"},
        ["--missing={set: {active: false, ended_at: now}, limit: 5 %}"],
    ),
    "meta": ({"run": "7"}, ["--meta=run=7"]),
    "target_part_bytes": (1 << 20, ["--target-part-bytes=1MiB"]),
    "idempotency.app_id": ("crm", ["--app-id=crm"]),
    "idempotency.version": (8, ["--app-version=8"]),
}
# The resource says where the storage is, and the run which unit of work it is and on which
# partitions.
NOT_DECLARED_IN_DAGSTER = {"storage_uri", "branch", "idempotency", "outside", "count_by"}
UNIT = {"app_id": "app", "version": 1}


def with_sample(option: SpecOption) -> dict[str, Any]:
    """The members of an order in which this option alone differs from the base."""
    *outer, last = option.path
    value = SAMPLES[".".join(option.path)][0]
    if not outer:
        return {**BASE, last: value}
    within = {**(UNIT if outer == ["idempotency"] else BASE["source"]), last: value}
    return {**BASE, outer[0]: within}


OPTIONS = [pytest.param(option, id=".".join(option.path)) for option in spec_options()]


def test_every_field_has_an_option() -> None:
    paths = {".".join(option.path) for option in spec_options()}
    assert paths == set(SAMPLES)
    tops = {option.path[0] for option in spec_options()}
    assert tops == set(IngestSpec.model_fields)
    assert all(option.help and option.flag.name for option in spec_options())


@pytest.mark.parametrize("option", OPTIONS)
def test_from_yaml_and_from_a_command_line(option: SpecOption, tmp_path: Path) -> None:
    wanted = parse_spec(with_sample(option))
    base = {**BASE, "idempotency": UNIT} if option.path[0] == "idempotency" else BASE
    assert wanted != parse_spec(base)

    (tmp_path / "order.yaml").write_text(yaml.safe_dump(with_sample(option)))
    assert parse([f"--order={tmp_path / 'order.yaml'}"]) == wanted

    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    arguments = SAMPLES[".".join(option.path)][1]
    assert parse([f"--order={tmp_path / 'base.yaml'}", *arguments]) == wanted
    assert parse(wanted.to_arguments()) == wanted


@pytest.mark.parametrize("option", OPTIONS)
def test_from_dagster(option: SpecOption) -> None:
    assert set(IngestSpec.model_fields) - set(OntologyAsset.model_fields) == NOT_DECLARED_IN_DAGSTER
    if option.path[0] in NOT_DECLARED_IN_DAGSTER:
        return
    members = with_sample(option)
    wanted = parse_spec(members)
    declared = {name: value for name, value in members.items() if name != "storage_uri"}
    python = OntologyAsset(**{**declared, "source": SourceSpec(**members["source"])})
    from_yaml = OntologyTypeComponent.resolve_from_yaml(yaml.safe_dump(declared))
    for asset in (python, from_yaml):
        assert asset.ingest_spec("store", asset.source.paths) == wanted
    assert set(IngestFields.model_fields) <= set(OntologyAsset.model_fields)
    assert set(SourceFields.model_fields) <= set(SourceSpec.model_fields)


@pytest.mark.parametrize("option", OPTIONS)
def test_what_the_writer_gets(option: SpecOption) -> None:
    names = {each.name for each in fields(WriteOptions)}
    name = option.path[0]
    assert (name in names) == (name in writer_fields())
    if name in names:
        wanted = parse_spec(with_sample(option))
        value = getattr(wanted, name)
        expected = parse_expectations(value) if name == "expectations" else value
        assert getattr(WriteOptions(**wanted.write_options()), name) == expected


@pytest.mark.parametrize("name", sorted(sink_options()))
def test_what_the_data_source_takes(name: str) -> None:
    option = sink_options()[name]
    value = SAMPLES[".".join(option.path)][0]
    given = {"storage_uri": "store", "type": "Customer"}
    given |= {"app_id": "app", "version": "1"} if option.path[0] == "idempotency" else {}
    options = SinkOptions.parse({**given, name: str(value)}, streaming=False)
    place = {"storage_uri": options.place.uri, "type": options.place.type}
    place["branch"] = options.place.branch or ""
    unit = dict(zip(("app_id", "version"), options.idempotency or (), strict=False))
    taken = {**place, "models": options.place.models, **unit, **options.writing}
    assert taken[name] == value


def test_the_tables_of_the_documentation_are_those_of_the_options() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    for table in (
        option_table(ingest_parser()),
        option_table(stream_parser(), "streaming"),
        option_table(compact_parser(), "what"),
        option_table(migrate_parser(), "what"),
        option_table(merge_parser(), "what"),
    ):
        assert f"\n{table}\n" in documented, table


WRONG = """\
storage_uri: store
typ: Customer
models: tests.jobs.shop
source:
  format: xml
  paths: [a.csv]
  optoins: {sep: ";"}
drift:
  added: never
columns:
  id: a
  name: [b]
expectations:
  - not_null: id
  - nul: id
distinct: often
missing: {set: {active: false}, limit: few}
"""


def test_all_that_is_wrong_is_told_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "order.yaml"
    path.write_text(WRONG)
    with pytest.raises(ConfigurationError) as caught:
        parse([f"--order={path}"])
    told = str(caught.value)
    for line, text in (
        (2, "order has no member 'typ'; did you mean type?"),
        (5, "source.format is one of csv, json, parquet, jdbc, not 'xml'"),
        (7, "source has no member 'optoins'; did you mean options?"),
        (9, "drift.added is one of fail, ignore, quarantine, not 'never'"),
        (12, "columns.name is a text, not ['b']"),
        (15, "expectation {'nul': 'id'}: 'nul' is not known"),
        (16, "distinct is true or false, not 'often'"),
        (17, "missing.limit is a share such as 10%, or a number, not 'few'"),
    ):
        assert f"{path}:{line}: {text}" in told
    assert f"{path}: the order does not say type" in told
    assert type(caught.value) is ConfigurationError

    # What an argument says is not in the file.
    with pytest.raises(ConfigurationError) as caught:
        parse([f"--order={path}", "--transform=tidy", "--type=Customer", "--format=csv"])
    assert "; transform is module:function" in str(caught.value)
    assert f"{path}:5" not in str(caught.value)


def test_the_nearest_option_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"--colunm=a=b; did you mean --column\?; see"):
        parse(["--colunm=a=b"])
