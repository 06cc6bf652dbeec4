"""The corpus of dirty sources through Spark and `Session.ingest`: rows, bad rows, words."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from storage_engine import OntologiaError, Session
from storage_engine.repository import initialize_storage
from storage_engine.spark.jobs.ingest import DriftPolicy, IngestSpec, Source, ingest
from tests.jobs.dirty import CASES, FIELDS, TYPES, Case, Dirty

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LONG = bool(os.environ.get("ONTOLOGIA_LONG"))


def laid_out(case: Case, folder: Path) -> list[Path]:
    """The files of a case, and the path that an order names: the folder, or the file."""
    for name, content in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return [folder / name for name in case.files]


def named(case: Case, folder: Path) -> str:
    first = next(iter(case.files))
    return str(folder / ("in" if first.startswith("in/") else first))


def order(case: Case, folder: Path, uri: str) -> IngestSpec:
    return IngestSpec(
        storage_uri=uri,
        type="Dirty",
        models="tests.jobs.dirty",
        source=Source(
            format=case.format,  # type: ignore[arg-type]
            paths=(named(case, folder),),
            row_schema=case.schema,
            options=case.options,
            null_value=case.null_value,
        ),
        on_bad_rows="quarantine",
        drift=DriftPolicy(retyped="quarantine") if case.schema else DriftPolicy(),
        **case.members,
    )


def new_storage(folder: Path) -> str:
    uri = str(folder / "store")
    initialize_storage(uri, engine_version="v2")
    return uri


def stored(uri: str) -> dict[str, dict[str, Any]]:
    with Session(uri) as session:
        if session.repository.head_commit_id() == 0:
            return {}
        found = session.query().entities(Dirty).collect()
    return {
        each.id: {n: value for n in FIELDS if (value := getattr(each, n)) is not None}
        for each in found
    }


def kept_of(aside: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """What the side table has of each row; checked: valid JSON, and a file that is there."""
    for row in aside:
        json.loads(row["row"], parse_constant=pytest.fail)
        assert row["columns"] == "source"
        origin = Path(row["file"])
        assert origin.is_relative_to(folder)
        assert origin.exists() or ".zip" in row["file"]
    return sorted(row["line"] or row["row"] for row in aside)


def in_one_order(case: Case) -> bool:
    """Whether it can be read together with others: one file, nothing special said."""
    plain = not (case.options or case.members or case.null_value or case.refused)
    return plain and list(case.files) in (["a.csv"], ["a.jsonl"]) and bool(case.columns)


TOGETHER: dict[tuple[str, str], list[Case]] = {}
for each in CASES:
    if in_one_order(each):
        TOGETHER.setdefault((each.format, str(each.columns)), []).append(each)
ALONE = CASES if LONG else [case for case in CASES if not in_one_order(case)]


@pytest.mark.spark
@pytest.mark.parametrize(("format", "columns"), TOGETHER, ids=lambda text: text.replace(" ", "-"))
def test_together_through_spark(
    format: str, columns: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Cases of the same columns in one order: the name of a case's folder is put before its keys,
    and the side table tells its file. One by one they are read with ONTOLOGIA_LONG=1."""
    cases = {str(number): case for number, case in enumerate(TOGETHER[format, columns], start=100)}
    for number, case in cases.items():
        laid_out(case, tmp_path / "in" / f"case={number}")
    uri = new_storage(tmp_path)
    names = columns.split()
    made = IngestSpec(
        storage_uri=uri,
        type="Dirty",
        models="tests.jobs.dirty",
        source=Source(
            format=format,  # type: ignore[arg-type]
            paths=(str(tmp_path / "in"),),
            row_schema=", ".join(f"{name} {TYPES[name]}" for name in names) + ", case INT",
        ),
        columns={"id": "concat(case, '/', id)"},
        on_bad_rows="quarantine",
        drift=DriftPolicy(retyped="quarantine"),
    )
    result = ingest(spark, made)
    found: dict[str, dict[str, Any]] = {number: {} for number in cases}
    for key, values in stored(uri).items():
        number, _, own = key.partition("/")
        found[number][own] = values
    aside: dict[str, list[dict[str, Any]]] = {number: [] for number in cases}
    if result.quarantine is not None:
        for row in pq.read_table(result.quarantine).to_pylist():
            aside[Path(row["file"]).parent.name.removeprefix("case=")].append(row)
    wrong = {}
    for number, case in cases.items():
        reasons = Counter(reason for row in aside[number] for reason in row["reasons"])
        kept = kept_of([_without_case(row) for row in aside[number]], tmp_path)
        expected = sorted(case.kept) if case.kept is not None else kept
        if (found[number], reasons, kept) != (case.rows, case.bad, expected):
            wrong[case.name] = (found[number], dict(reasons), kept)
    assert wrong == {}


def _without_case(row: dict[str, Any]) -> dict[str, Any]:
    record = json.loads(row["row"])
    if "case" not in record:
        return row
    del record["case"]
    return {**row, "row": json.dumps(record, ensure_ascii=False)}


@pytest.mark.spark
@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_through_spark(case: Case, spark: SparkSession, tmp_path: Path) -> None:
    laid_out(case, tmp_path)
    uri = new_storage(tmp_path)
    if case.refused is not None:
        with pytest.raises(OntologiaError) as caught:
            ingest(spark, order(case, tmp_path, uri))
        assert re.search(case.refused, str(caught.value)), str(caught.value)
        assert stored(uri) == {}
        return
    result = ingest(spark, order(case, tmp_path, uri))
    assert stored(uri) == case.rows
    assert result.reasons == case.bad
    assert result.quarantined == sum(case.bad.values())
    if result.quarantine is not None:
        kept = kept_of(pq.read_table(result.quarantine).to_pylist(), tmp_path)
        assert case.kept is None or kept == sorted(case.kept)


HAS_DOOR = [
    case
    for case in CASES
    if all(
        Path(name).suffix in (".csv", ".jsonl", ".parquet") or "in/" in name for name in case.files
    )
]


@pytest.mark.parametrize("case", HAS_DOOR, ids=lambda case: case.name)
def test_through_session(case: Case, tmp_path: Path) -> None:
    files = laid_out(case, tmp_path)
    uri = str(tmp_path / "store.db")
    initialize_storage(uri)
    words, rows = case.session, case.rows
    if case.differs is not None:
        words, rows = case.differs.says or None, case.differs.rows or {}
    elif case.bad or case.refused:
        assert words is not None, "a case that is refused says with which words"
    said = ""
    with Session(uri) as session:
        try:
            session.ingest(Dirty, files)
            session.commit()
        except OntologiaError as error:
            said = str(error)
            session.discard()
    if words is not None:
        assert re.search(words, said, re.S), said
        rows = {}
    else:
        assert said == ""
    assert stored(uri) == rows


def test_there_are_many() -> None:
    assert len(CASES) >= 200
