"""Expectations are checks of the type's asset: counted, with examples, recorded when they stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ontologia_dagster.ingestion.asset import build_type, ingestion_asset
from ontologia_dagster.ingestion.expectation_checks import (
    Broken,
    expectation_checks,
    expectation_results,
    expected_conditions,
)
from ontologia_dagster.resources.spark import _bad_rows
from storage_engine.errors import BadRowsError
from tests.dagster.world import customers, facts, orders, resources, rows, storage

EXPECTED: list[Any] = [
    {"not_null": "channel"},
    {"range": {"column": "total", "min": 1, "max": 60}},
    {"range": {"column": "total", "max": 99}},
    {"unique": ["id", "day"]},
]
BAD = """id,day,total
1,2013-01-02,10
2,2013-01-30,0
3,2013-02-01,-3
,2013-04-01,50
"""


def test_names_are_of_what_is_expected_of_which_columns(tmp_path: Path) -> None:
    declared = customers(tmp_path, expectations=EXPECTED)
    assert expected_conditions(declared) == {
        "expect_not_null_channel": "channel is not null",
        "expect_range_total": "total is between 1 and 60",
        "expect_range_total_and_2": "total is at most 99",
        "expect_unique_id_day": "id + day is unique",
    }
    moved = customers(tmp_path, expectations=[{"range": {"column": "total", "min": 7}}])
    assert list(expected_conditions(moved)) == ["expect_range_total"]


@pytest.mark.parametrize(("on_bad_rows", "blocking"), [("fail", True), ("quarantine", False)])
def test_they_block_where_they_stop_the_write(
    tmp_path: Path, on_bad_rows: str, blocking: bool
) -> None:
    declared = customers(tmp_path, expectations=EXPECTED, on_bad_rows=on_bad_rows)
    specs = expectation_checks(declared)
    assert [spec.name for spec in specs][-1] == "expect_rows_fit"
    assert {spec.blocking for spec in specs} == {blocking}
    built = build_type(declared)
    job = dg.Definitions.merge(
        built, dg.Definitions(resources=resources(storage(tmp_path)))
    ).resolve_job_def("ontology_ingest_customer")
    names = {key.name for key in job.asset_layer.asset_graph.asset_check_keys}
    assert names == {"index_verify", "schema_matches", *(spec.name for spec in specs)}


def test_what_another_process_raised_is_told_the_same(tmp_path: Path) -> None:
    raised = BadRowsError(
        "no", type="Order", rows=3, reasons={"a": 2, "b": 1}, examples={"a": ["1", "2"]}
    )
    again = _bad_rows({"type": "BadRowsError", "message": "no", "facts": raised.facts()})
    assert (again.reasons, again.examples, again.rows) == (raised.reasons, raised.examples, 3)
    results = list(expectation_results(customers(tmp_path), Broken.of_error(again)))
    assert [result.passed for result in results] == [False]
    assert (results[0].description or "").startswith("3 rows of Customer: a; b (1, 2 and 1 more).")


def checked(result: Any) -> dict[str, dg.AssetCheckEvaluation]:
    return {each.check_name: each for each in result.get_asset_check_evaluations()}


@pytest.mark.spark
def test_a_broken_expectation_is_recorded_though_the_step_fails(tmp_path: Path, spark: Any) -> None:
    ontology = storage(tmp_path)
    options: dict[str, Any] = {
        "expectations": EXPECTED[1:],
        "backfill": "single_run",
    }
    asset = ingestion_asset(orders(tmp_path, BAD, **options))
    tags = {
        "dagster/asset_partition_range_start": "2013-01-01",
        "dagster/asset_partition_range_end": "2013-04-01",
    }

    def run(text: str) -> Any:
        orders(tmp_path, text)
        return dg.materialize(
            [asset], resources=resources(ontology), tags=tags, raise_on_error=False
        )

    failed = run(BAD)
    assert not failed.success
    with ontology.repository() as repository:
        assert repository.head_commit_id() == 0
    found = checked(failed)
    assert {name: each.passed for name, each in found.items()} == {
        "expect_range_total": False,
        "expect_range_total_and_2": True,
        "expect_unique_id_day": True,
        "expect_rows_fit": False,
    }
    broken = found["expect_range_total"]
    assert broken.severity == dg.AssetCheckSeverity.ERROR
    assert broken.description == (
        "2 rows of Order: not so that total is between 1 and 60 (2, 3). Nothing was published: "
        "put the source right, or declare `on_bad_rows: quarantine`"
    )
    assert facts(broken.metadata)["rows_broken"] == 2
    assert rows(facts(broken.metadata)["examples"]) == [
        {"row": key, "why": "total is between 1 and 60"} for key in ("2", "3")
    ]
    assert facts(found["expect_rows_fit"].metadata)["rows_broken"] == 1

    corrected = run("id,day,total\n1,2013-01-02,10\n")
    assert corrected.success
    assert all(each.passed for each in checked(corrected).values())
    assert len(checked(corrected)) == 4


@pytest.mark.spark
def test_rows_that_were_set_aside_are_a_warning_that_says_where(tmp_path: Path, spark: Any) -> None:
    ontology = storage(tmp_path)
    text = "id,name,visits\nc1,Ada,1\nc2,Bo,-1\nc3,Cy,-2\n,Di,1\n"
    declared = customers(
        tmp_path,
        text,
        columns={"visits": "CAST(visits AS BIGINT)"},
        expectations=[{"range": {"column": "visits", "min": 0}}],
        on_bad_rows="quarantine",
    )
    asset = ingestion_asset(declared)
    for _ in range(2):  # the second run has stored rows to compare with
        result = dg.materialize([asset], resources=resources(ontology))
        found = checked(result)
        broken = found["expect_range_visits"]
        assert (broken.passed, broken.severity) == (False, dg.AssetCheckSeverity.WARN)
        shown = facts(broken.metadata)
        assert (shown["rows_broken"], shown["rows_read"]) == (2, 4)
        assert "examples" not in shown  # names of customers are sensitive, and so are their rows
        assert shown["quarantine"] in (broken.description or "")
        assert "--replay-quarantine" in (broken.description or "")
        assert facts(found["expect_rows_fit"].metadata)["rows_broken"] == 1
    with ontology.session() as session:
        assert session.sql('select count(*) as n from "Customer"').collect() == [{"n": 1}]
