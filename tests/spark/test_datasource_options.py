"""Options of `format("ontologia")`, by `spark.read` and by SQL: the rows that a Session reads."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from storage_engine import OntologiaConfig, initialize_storage
from storage_engine.spark import register
from tests.spark import read_world as world
from tests.spark.read_world import Place, Rows, Sample, expected, in_order, rows, sample

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]  # many Python processes


@pytest.fixture
def place(spark: SparkSession, tmp_path: Path) -> Place:
    register(spark)
    made = Place(str(tmp_path / "onto"), OntologiaConfig())
    initialize_storage(made.uri)
    return made


def by_read(spark: SparkSession, place: Place, **options: Any) -> DataFrame:
    given = {**place.options, "type": "Sample", **{k: str(v) for k, v in options.items()}}
    return spark.read.format("ontologia").options(**given).load()


def by_sql(spark: SparkSession, place: Place, **options: Any) -> DataFrame:
    given = {**place.options, "type": "Sample", **options}
    listed = ", ".join(f"{name} '{_quoted(value)}'" for name, value in given.items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW samples USING ontologia OPTIONS ({listed})")
    return spark.sql("SELECT * FROM samples")


def _quoted(value: object) -> str:
    return str(value).replace("'", "\\'")


def test_the_rows_of_a_session(spark: SparkSession, place: Place) -> None:
    with place.open() as session:
        world.commit(session, *(sample(n) for n in range(6)))
        session.repository.create_tag("first")
        world.stage(session, range(4, 9), 200)
        instant = datetime.now(UTC).isoformat()
        world.commit(session, sample(0, 300), sample(20))

        def picked(found: Rows, *names: str) -> Rows:
            return in_order({name: row[name] for name in names} for row in found)

        def kept(found: Rows) -> Rows:
            return [r for r in found if r["number"] >= 200 and r["text"] not in ("it's", None)]

        latest = expected(session, Sample, commit_id=True)
        first = expected(session, Sample, as_of=1)
        history = expected(session, Sample, commit_id=True, history=True)
        asked: list[tuple[dict[str, object], Rows]] = [
            ({"columns": "number, id"}, picked(latest, "number", "id")),
            (
                {"filter": "number >= 200 AND NOT text = 'it''s'", "with_commit_id": True},
                kept(latest),
            ),
            ({"as_of": "first"}, first),
            (
                {"as_of": instant, "columns": "id, commit_id"},
                picked(expected(session, Sample, commit_id=True, as_of=2), "id", "commit_id"),
            ),
            (
                {"history": "TRUE", "filter": "id = 's0004'"},
                [r for r in history if r["id"] == "s0004"],
            ),
            (
                {"since": 1, "as_of": 2, "columns": "id"},
                picked(
                    expected(session, Sample, commit_id=True, history=True, since=1, as_of=2),
                    "commit_id",
                    "id",
                ),
            ),
        ]
        for options, right in asked:
            assert right, options
            for load in (by_read, by_sql):
                found = load(spark, place, **options)
                assert found.columns == list(right[0]), options
                assert rows(found) == in_order(right), (load, options)


def test_a_mistake_is_one_sentence(spark: SparkSession, place: Place) -> None:
    with place.open() as session:
        world.commit(session, sample(1))
    wrong: list[tuple[dict[str, object], str]] = [
        ({"columns": "id, nmber"}, "Sample: unknown column 'nmber', did you mean 'number'?"),
        ({"filter": "number >"}, "filter 'number >' on Sample: Parser Error: syntax error"),
        ({"as_of": "nope"}, "no tag 'nope'"),
        ({"filter": "nmber = 1"}, "filter 'nmber = 1' on Sample: "),
        ({"history": "maybe"}, "history takes true or false, not 'maybe'"),
        ({"since": "-1"}, "since takes a whole number from 0 on, not '-1'"),
        ({"with_commit_id": "1"}, "with_commit_id takes true or false, not '1'"),
    ]
    for number, (options, sentence) in enumerate(wrong):
        for load in (by_read, by_sql)[number > 2 :]:  # those of one kind by SQL alone
            with pytest.raises(Exception, match="PYTHON_DATA_SOURCE_ERROR") as refused:
                load(spark, place, **options)
            # Spark puts Python's traceback before it.
            *_, said, rest = str(refused.value).splitlines()
            assert rest.strip().startswith("SQLSTATE")
            assert said.startswith("storage_engine.errors."), said
            assert sentence in said
