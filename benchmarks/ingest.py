"""Bulk ingest on SeaweedFS: 2,000,000 rows of 5 columns, again, and a 10 % upsert.

Beside it DuckDB's own COPY of the same file to the same server, and delta-rs' merge of the same
rows into the same table.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.harness import Report, measure, seaweedfs, sized, timed
from storage_engine import Entity, Field, OntologiaConfig, Session, initialize_storage
from tests.servers import ACCESS_KEY, REGION, SECRET_KEY

ROWS = sized(2_000_000, 50_000)
UPSERT = ROWS // 10
RUNS = sized(3, 1)


class Reading(Entity):
    id: Field[str] = Field(primary_key=True)
    sensor: Field[str]
    value: Field[float]
    n: Field[int]
    ok: Field[bool]


def run() -> Report:
    report = Report("ingest")
    with tempfile.TemporaryDirectory() as folder, seaweedfs() as (server, bucket):
        source, unsorted, changes = make_data(Path(folder))
        for number in range(RUNS):
            onto = (server.endpoint, f"s3://{bucket}/onto{number}")
            mixed = (server.endpoint, f"s3://{bucket}/mixed{number}")
            delta = (server.endpoint, f"s3://{bucket}/delta{number}")
            steps = [
                measure("duckdb copy", duckdb_copy, server.endpoint, bucket, source, number),
                measure("ontologia ingest", onto_ingest, *onto, source, True),
                measure("ontologia ingest, unsorted", onto_ingest, *mixed, unsorted, True),
                measure("ontologia ingest again", onto_ingest, *onto, source, False),
                measure("ontologia upsert 10 %", onto_ingest, *onto, changes, False),
                measure("delta-rs write", delta_write, *delta, source),
                measure("delta-rs merge 10 %", delta_merge, *delta, changes),
            ]
            report.steps += steps
        check_rows(server.endpoint, f"s3://{bucket}/onto{RUNS - 1}", source)
    report.steps = [_median(report, name) for name in dict.fromkeys(s.name for s in report.steps)]
    copy, first = report.seconds("duckdb copy"), report.seconds("ontologia ingest")
    mixed_rows = report.seconds("ontologia ingest, unsorted")
    report.verdicts["ingest within 2x of DuckDB's COPY"] = (
        f"{first / copy:.2f}x; {mixed_rows / copy:.2f}x when keys come in no order"
    )
    peak = max(s.peak_mib for s in report.steps if s.name.startswith("ontologia"))
    report.verdicts["in under 1 GB of memory"] = f"{peak} MiB"
    ours, theirs = report.seconds("ontologia upsert 10 %"), report.seconds("delta-rs merge 10 %")
    report.verdicts["upsert no slower than delta-rs' merge"] = f"{ours / theirs:.2f}x of its time"
    again = next(s for s in report.steps if s.name == "ontologia ingest again")
    report.verdicts["the same table again"] = f"commit {again.facts['commit']}"
    return report


def _median(report: Report, name: str) -> Any:
    same = sorted((s for s in report.steps if s.name == name), key=lambda s: s.seconds)
    middle = same[len(same) // 2]
    return type(middle)(
        name,
        middle.seconds,
        [round(s.seconds, 4) for s in same],
        max(s.peak_mib for s in same),
        middle.facts,
    )


def make_data(folder: Path) -> tuple[Path, Path, Path]:
    random = np.random.default_rng(20_261_116)
    table = pa.table(
        {
            "id": pa.array([f"r{i:09d}" for i in range(ROWS)]),
            "sensor": pa.array([f"s{i}" for i in random.integers(0, 1000, ROWS)]),
            "value": random.normal(size=ROWS),
            "n": random.integers(0, 10**9, ROWS),
            "ok": random.integers(0, 2, ROWS).astype(bool),
        }
    )
    chosen = table.take(pa.array(np.sort(random.choice(ROWS, UPSERT, replace=False))))
    value = chosen.schema.get_field_index("value")
    changed = chosen.set_column(value, "value", pc.add(chosen.column("value"), 1.0))
    tables = {
        "source": table,
        "unsorted": table.take(pa.array(random.permutation(ROWS))),
        "changes": changed,
    }
    for name, rows in tables.items():
        pq.write_table(rows, folder / f"{name}.parquet")
    source, unsorted, changes = (folder / f"{name}.parquet" for name in tables)
    return source, unsorted, changes


def duckdb_copy(endpoint: str, bucket: str, source: Path, number: int) -> dict[str, Any]:
    import duckdb

    from storage_engine.repository.duck_s3 import create_secret, load_httpfs

    connection = duckdb.connect()
    connection.execute("SET enable_progress_bar = false")
    load_httpfs(connection)
    create_secret(
        connection,
        {
            "KEY_ID": ACCESS_KEY,
            "SECRET": SECRET_KEY,
            "REGION": REGION,
            "ENDPOINT": endpoint.removeprefix("http://"),
            "URL_STYLE": "path",
            "USE_SSL": False,
        },
    )
    outcome: dict[str, Any] = {}
    with timed(outcome):
        connection.execute(
            f"COPY (FROM '{source}') TO 's3://{bucket}/copy{number}.parquet' (FORMAT parquet)"
        )
    return outcome


def onto_ingest(endpoint: str, uri: str, source: Path, init: bool) -> dict[str, Any]:
    config = OntologiaConfig(s3_endpoint_url=endpoint, s3_region=REGION)
    if init:
        initialize_storage(uri, config=config)
    outcome: dict[str, Any] = {}
    with Session(uri, entity_types=[Reading], config=config) as session:
        with timed(outcome):
            session.ingest(Reading, source)
            commit = session.commit()
            session.flush()
        requests = session.storage_info()["requests"]
    return outcome | {"commit": commit, "requests": requests["total"]}


def delta_options(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": REGION,
        "aws_conditional_put": "etag",
    }


def delta_write(endpoint: str, uri: str, source: Path) -> dict[str, Any]:
    from deltalake import write_deltalake

    outcome: dict[str, Any] = {}
    with timed(outcome):
        write_deltalake(uri, pq.read_table(source), storage_options=delta_options(endpoint))
    return outcome


def delta_merge(endpoint: str, uri: str, changes: Path) -> dict[str, Any]:
    from deltalake import DeltaTable

    outcome: dict[str, Any] = {}
    with timed(outcome):
        merged = (
            DeltaTable(uri, storage_options=delta_options(endpoint))
            .merge(pq.read_table(changes), "t.id = s.id", source_alias="s", target_alias="t")
            .when_matched_update_all()
            .when_not_matched_insert_all()
            .execute()
        )
    return outcome | {"updated": merged["num_target_rows_updated"]}


def check_rows(endpoint: str, uri: str, source: Path) -> None:
    """A run that leaves other rows than these is void."""
    from storage_engine.model import spec_of
    from storage_engine.repository import open_repository

    config = OntologiaConfig(
        s3_endpoint_url=endpoint, s3_region=REGION, s3_duckdb_memory_limit="2GB"
    )
    repository = open_repository(uri, config)
    stored = repository.read(spec_of(Reading))
    repository.close()
    expected = pq.read_table(source, columns=["n", "value"])
    assert stored.num_rows == ROWS, stored.num_rows
    assert pc.sum(stored.column("n")) == pc.sum(expected.column("n"))
    difference = pc.sum(stored.column("value")).as_py() - pc.sum(expected.column("value")).as_py()
    assert abs(difference - UPSERT) < 1.0, difference
    assert pc.sum(pc.equal(stored.column("commit_id"), 2)).as_py() == UPSERT
