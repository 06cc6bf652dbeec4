"""SQL of users: what a statement costs beside the rows that it reads.

- `types`: a warm statement over one small type, in storages with 1, 100 and 1,000 types. Only the
  types that it names are looked up, so that the others cost next to nothing.
- `rows`: a filter and a group over 2,000,000 rows in one file of a directory, beside raw DuckDB
  with the same settings on that very file: filters and projections must reach the scan.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Report, measure, sized
from benchmarks.ingest import Reading, make_data
from storage_engine import Entity, Field, Session, initialize_storage

TYPES = (1, 100, 1_000)
STATEMENTS = sized(30, 3)
ONE = "select count(*) as n, max(value) as top from Type0 where value >= $least"
MANY = "select sensor, count(*) as n, avg(value) as mean from {} where n < 1000 group by sensor"


def run() -> Report:
    report = Report("sql")
    for count in TYPES:
        report.steps.append(measure(f"warm statement, {count:,} types", among_types, count))
    with tempfile.TemporaryDirectory() as folder:
        source, _, _ = make_data(Path(folder))
        for name, step in {"raw DuckDB": raw, "session.sql": through_sql}.items():
            report.steps.append(measure(f"2,000,000 rows, {name}", step, str(source), runs=3))
    few, _, most = (report.seconds(f"warm statement, {count:,} types") for count in TYPES)
    report.verdicts["1,000 types beside 1"] = f"{most / few:.2f}x"
    ratio = report.seconds("2,000,000 rows, session.sql") / report.seconds(
        "2,000,000 rows, raw DuckDB"
    )
    report.verdicts["2,000,000 rows beside raw DuckDB"] = f"{ratio:.2f}x"
    return report


def among_types(count: int) -> dict[str, Any]:
    classes = [
        type(
            f"Type{number}",
            (Entity,),
            {
                "__annotations__": {"id": Field[str], "value": Field[int], "note": Field[str]},
                "id": Field(primary_key=True),
                "__module__": __name__,
            },
        )
        for number in range(count)
    ]
    with tempfile.TemporaryDirectory() as folder:
        uri = f"file://{folder}/store"
        initialize_storage(uri)
        with Session(uri) as session:
            session.ensure([cls(id="a", value=7, note="x") for cls in classes])
            session.commit()
            session.flush()
        with Session(uri) as session:
            statement = session.sql(ONE, {"least": 1})
            assert statement.collect() == [{"n": 1, "top": 7}]
            started = time.process_time()
            seconds = _median(statement.to_arrow)
            cpu_ms = (time.process_time() - started) * 1000 / STATEMENTS
            return {"seconds": seconds, "processor ms": round(cpu_ms, 1)}


def through_sql(source: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        uri = f"file://{folder}/store"
        initialize_storage(uri)
        with Session(uri) as session:
            session.ingest(Reading, source)
            session.commit()
            session.flush()
        with Session(uri) as session:
            statement = session.sql(MANY.format("Reading"))
            return {"seconds": _median(statement.to_arrow, 5), **_groups(statement.to_arrow())}


def raw(source: str) -> dict[str, Any]:
    """The same rows in the same order, as Ontologia would write them."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/rows.parquet"
        pq.write_table(pq.read_table(source), file)
        connection = duckdb.connect(":memory:", config={"memory_limit": "256MB"})
        text = MANY.format(f"read_parquet('{file}')")

        def ask() -> pa.Table:
            return connection.execute(text).to_arrow_table()

        return {"seconds": _median(ask, 5), **_groups(ask())}


def _groups(table: pa.Table) -> dict[str, int]:
    return {"groups": table.num_rows, "rows": sum(table.column("n").to_pylist())}


def _median(ask: Any, times: int = STATEMENTS) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
