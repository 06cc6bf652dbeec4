"""A migration of 5,000,000 rows in a directory: one field added and one widened by itself, then the
same through a batch upgrader. Beside it DuckDB's own COPY of the stored rows.

`BENCH_MIGRATION_ROWS` makes it shorter.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.harness import Report, measure, sized, timed
from storage_engine import Entity, Field, Session, initialize_storage
from storage_engine.model import TypeSpec, spec_of
from storage_engine.repository import Repository, open_repository

ROWS = sized(5_000_000, 50_000, "BENCH_MIGRATION_ROWS")
RUNS = sized(3, 1)
BATCH = 250_000
MEMORY_MIB = 1024


class Reading(Entity):
    id: Field[str] = Field(primary_key=True)
    sensor: Field[str]
    value: Field[float]
    n: Field[int]
    ok: Field[bool]


def changed() -> TypeSpec:
    """The same type as its class is later: `n` is widened, `unit` is new."""

    class Reading(Entity):
        id: Field[str] = Field(primary_key=True)
        sensor: Field[str]
        value: Field[float]
        n: Field[float]
        ok: Field[bool]
        unit: Field[str] = Field(default="C")

    return spec_of(Reading)


def run() -> Report:
    report = Report("migration")
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{folder}/{step}{n}" for step in ("additive", "batch") for n in range(RUNS)]
        for uri in names:
            initialize_storage(uri)
            measure("load", load, uri)
        copied = [measure("duckdb copy", copy, names[0], f"{folder}/copy") for _ in range(RUNS)]
        additive = [measure("additive", migrate, uri, False) for uri in names[:RUNS]]
        batch = [measure("batch upgrader", migrate, uri, True) for uri in names[RUNS:]]
    for steps in (copied, additive, batch):
        report.steps.append(sorted(steps, key=lambda step: step.seconds)[RUNS // 2])
    theirs = report.seconds("duckdb copy")
    peak = max(step.peak_mib for step in [*additive, *batch])
    report.verdicts = {
        "one field added, one widened, within 2x of COPY": _times(
            report.seconds("additive") / theirs, 2
        ),
        "with a batch upgrader within 3x of COPY": _times(
            report.seconds("batch upgrader") / theirs, 3
        ),
        f"in under {MEMORY_MIB} MiB": f"{peak} MiB{'' if peak < MEMORY_MIB else ': MISSED'}",
    }
    return report


def _times(ratio: float, bound: int) -> str:
    return f"{ratio:.2f}x{'' if ratio <= bound else ': MISSED'}"


def load(uri: str) -> dict[str, Any]:
    random = np.random.default_rng(20_261_117)

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, ROWS, BATCH):
            count = min(BATCH, ROWS - start)
            yield pa.record_batch(
                {
                    "id": pa.array([f"r{i:09d}" for i in range(start, start + count)]),
                    "sensor": pa.array([f"s{i}" for i in random.integers(0, 1000, count)]),
                    "value": random.normal(size=count),
                    "n": random.integers(0, 10**9, count),
                    "ok": random.integers(0, 2, count).astype(bool),
                }
            )

    outcome: dict[str, Any] = {}
    first = next(batches())
    with Session(uri, entity_types=[Reading]) as session, timed(outcome):
        session.ingest(Reading, pa.RecordBatchReader.from_batches(first.schema, batches()))
        session.commit()
    return outcome


def copy(uri: str, target: str) -> dict[str, Any]:
    import duckdb

    repository = open_repository(uri)
    assert repository.objects is not None
    files = [
        str(repository.objects.store.local_path(item.file.path))
        for item in repository.objects.executor().plan(spec_of(Reading)).rows
    ]
    repository.close()
    connection = duckdb.connect()
    connection.execute("SET enable_progress_bar = false")
    outcome: dict[str, Any] = {}
    with timed(outcome):
        connection.execute(f"COPY (FROM read_parquet({files})) TO '{target}' (FORMAT parquet)")
    return outcome


def _upgraded(rows: pa.Table) -> pa.Table:
    n = rows.schema.get_field_index("n")
    rows = rows.set_column(n, "n", pc.multiply(rows.column("n").cast(pa.float64()), 0.5))
    warm = pc.greater(rows.column("value"), 0.0)
    return rows.append_column("unit", pc.if_else(warm, "C", "K"))


def migrate(uri: str, batch: bool) -> dict[str, Any]:
    from storage_engine.schema.migration import MigrationRequest, plan_migration
    from storage_engine.schema.upgraders import Upgrader

    steps = {}
    if batch:
        steps = {("Reading", 1): Upgrader("Reading", 1, _upgraded, batch=True)}
    repository = open_repository(uri)
    outcome: dict[str, Any] = {}
    with timed(outcome):
        plan = plan_migration([changed()], repository.type_histories(), steps)
        done = repository.migrate(MigrationRequest(plan.migrations))
        repository.flush()
    check(repository, batch)
    repository.close()
    return outcome | {"rows": sum(done.rows.values())}


def check(repository: Repository, batch: bool) -> None:
    """A run that leaves other rows than these is void."""
    rows = repository.executor().sql(
        "SELECT count(*) AS rows, count(DISTINCT unit) AS units FROM Reading"
    )
    (stored,) = pa.Table.from_batches(list(rows.batches), schema=rows.schema).to_pylist()
    assert stored == {"rows": ROWS, "units": 2 if batch else 1}, stored
