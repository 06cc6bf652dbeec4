"""pyiceberg: a table of versions that grows by `append`; catalog in SQLite on local disk.

Not `upsert`: it rewrites each file that holds a changed row, which took 5,229 requests for the
first 20 commits (`append`: 405). So a reader takes the last version of each id, by DuckDB.
Manifests are merged while writing (off unless asked for), files are read by 32 workers: readers
gain by both. The catalog costs no request to the object store, which favours it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import duckdb
import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog

from benchmarks.peers.content import SCHEMA, Place
from tests.servers import ACCESS_KEY, REGION, SECRET_KEY

TABLE = "bench.customer"
os.environ.setdefault("PYICEBERG_MAX_WORKERS", "32")
pa.set_io_thread_count(32)


def catalog(place: Place) -> SqlCatalog:
    return SqlCatalog(
        "bench",
        **{
            "uri": f"sqlite:///{place.folder}/iceberg.db",
            "warehouse": place.uri,
            "py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO",
            "s3.endpoint": place.endpoint,
            "s3.access-key-id": ACCESS_KEY,
            "s3.secret-access-key": SECRET_KEY,
            "s3.region": REGION,
        },
    )


def fill(place: Place, batches: Iterable[pa.Table]) -> None:
    known = catalog(place)
    known.create_namespace("bench")
    table = known.create_table(
        TABLE,
        SCHEMA,
        properties={
            "commit.manifest-merge.enabled": "true",
            "write.metadata.delete-after-commit.enabled": "true",
        },
    )
    for batch in batches:
        table.append(batch)


@contextmanager
def open_latest(place: Place) -> Iterator[Callable[[str], pa.Table]]:
    table = catalog(place).load_table(TABLE)
    fresh = True

    def read(tier: str) -> pa.Table:
        nonlocal fresh
        if not fresh:
            table.refresh()
        fresh = False
        versions = table.scan().to_arrow()  # noqa: F841 (read by the query)
        return duckdb.execute(
            "SELECT * FROM (FROM versions QUALIFY"
            " row_number() OVER (PARTITION BY id ORDER BY age DESC) = 1) WHERE tier = ?",
            [tier],
        ).to_arrow_table()

    yield read
