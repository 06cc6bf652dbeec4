"""DuckLake: MERGE INTO on the key, catalog in Postgres, or in a DuckDB file where there is none.

Rows are not inlined into the catalog (its default limit is 10 a commit, these have 100): the data
is on the object store, as everybody's. The catalog is on this machine and costs no request to it,
which favours it, and every query reads it, so there is nothing to refresh. Threads are many, as
DuckDB's documentation advises for remote files: with one a core it takes about twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import duckdb
import pyarrow as pa

from benchmarks.peers.content import Place
from storage_engine.repository.duck_s3 import create_secret, load_httpfs
from tests.servers import ACCESS_KEY, REGION, SECRET_KEY


def connect(place: Place) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(config={"autoinstall_known_extensions": "false"})
    connection.execute("SET enable_progress_bar = false")
    connection.execute("SET threads = 32")
    load_httpfs(connection)
    load(connection, "ducklake")
    catalog = f"{place.folder}/catalog.ducklake"
    if place.postgres is not None:
        load(connection, "postgres_scanner")
        catalog = f"postgres:{place.postgres}"
    create_secret(
        connection,
        {
            "KEY_ID": ACCESS_KEY,
            "SECRET": SECRET_KEY,
            "REGION": REGION,
            "ENDPOINT": place.host,
            "URL_STYLE": "path",
            "USE_SSL": False,
        },
    )
    connection.execute(f"ATTACH 'ducklake:{catalog}' AS lake (DATA_PATH '{place.uri}/')")
    return connection


def load(connection: duckdb.DuckDBPyConnection, extension: str) -> None:
    """From its package: DuckDB would download it."""
    package = Path(str(files(f"duckdb_extension_{extension}")))
    connection.execute(f"LOAD '{next(package.rglob(f'{extension}.duckdb_extension'))}'")


def fill(place: Place, batches: Iterable[pa.Table]) -> None:
    with connect(place) as connection:
        connection.execute(
            "CREATE TABLE lake.customer"
            " (id VARCHAR, name VARCHAR, tier VARCHAR, age BIGINT, score DOUBLE)"
        )
        for batch in batches:
            connection.register("batch", batch)
            connection.execute(
                "MERGE INTO lake.customer USING batch USING (id)"
                " WHEN MATCHED THEN UPDATE WHEN NOT MATCHED THEN INSERT"
            )


@contextmanager
def open_latest(place: Place) -> Iterator[Callable[[str], pa.Table]]:
    with connect(place) as connection:
        yield lambda tier: connection.execute(
            "FROM lake.customer WHERE tier = ?", [tier]
        ).to_arrow_table()
