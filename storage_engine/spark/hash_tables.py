"""Hashes of both sides of a comparison, brought to the driver and joined there.

Spark's shuffle and join of two tables of hashes cost more than reading both sides. Up to some
millions of rows it is far cheaper to bring the hashes to the driver, 24 bytes a row, and join them
there with DuckDB. Beyond that, and where the size of the source cannot be told, Spark does it.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from storage_engine.config import MIB
from storage_engine.repository.duck import Duck
from storage_engine.spark.driver import driver_memory, expected_bytes, is_connect

# Bytes of the driver's JVM for each row, through which the hashes pass as 24 each.
_HEAP_PER_STORED_ROW = 200
_HEAP_PER_SOURCE_ROW = 80  # whose number is a guess, on the high side for text files
_LITTLE = 16 * MIB  # a source of this size is little, whatever is stored
_MEMORY_PER_ROW = 64  # of DuckDB's table of what is stored; what does not fit goes to disk
_TOO_MUCH = "spark.driver.maxResultSize"  # named by Spark when it will not bring so much


def fits(source: DataFrame, *, stored_rows: int, stored_bytes: int) -> bool:
    """Whether the hashes of both sides are little for the driver, as far as can be told before."""
    if is_connect(source.sparkSession):
        return False  # there is no driver of ours
    heap = driver_memory(source.sparkSession)
    if stored_rows > heap // _HEAP_PER_STORED_ROW:
        return False
    size = expected_bytes(source)
    if size is None:
        return False
    rows = size * stored_rows // max(1, stored_bytes)  # if they are as dense as the stored ones
    return size <= _LITTLE or rows <= heap // _HEAP_PER_SOURCE_ROW


def brought(frame: DataFrame) -> pa.Table | None:
    """The rows of a frame; None where they turn out to be more than Spark would bring."""
    try:
        return frame.toArrow()
    except (PySparkException, Py4JJavaError) as error:
        if _TOO_MUCH not in str(error):
            raise
        return None


def compare_hashes(
    mine: pa.Table,
    theirs: pa.Table,
    keys: Sequence[str],
    content: str,
    statuses: Sequence[str],
    *,
    commit: str | None,
    bucket: str | None = None,
) -> pa.Table:
    """Keys that differ, `status` (its number in `statuses`) and rows (`n`); for the other statuses
    one row each, without keys. `commit`: identities may be in `theirs` several times, and the
    greatest value of this column tells the latest. `bucket`: what is unchanged has a row for each
    value of this column of `mine`."""
    number = {status: place for place, status in enumerate(statuses)}
    listed = ", ".join(keys)
    latest = "FROM theirs"
    if commit is not None:
        latest = (
            f"SELECT {listed}, arg_max({content}, {commit}) AS {content} FROM theirs "
            f"GROUP BY {listed}"
        )
    same = " AND ".join(f"m.{key} = l.{key}" for key in keys)
    shown = ", ".join(
        f"CASE WHEN status IN ({number['inserted']}, {number['updated']}) THEN {key} END AS {key}"
        for key in keys
    )
    buckets = brought_along = ""
    if bucket is not None:
        brought_along = f", m.{bucket}"
        buckets = f", CASE WHEN status = {number['unchanged']} THEN {bucket} END AS {bucket}"
    sql = f"""
        WITH latest AS ({latest}), compared AS (
            SELECT {", ".join(f"m.{key}" for key in keys)}{brought_along}, CASE
                WHEN m.{keys[0]} IS NULL THEN {number["bad"]}
                WHEN l.{keys[0]} IS NULL THEN {number["inserted"]}
                WHEN m.{content} = l.{content} THEN {number["unchanged"]}
                ELSE {number["updated"]} END AS status
            FROM mine m LEFT JOIN latest l ON {same}
        )
        SELECT {shown}, status{buckets}, count(*) AS n FROM compared GROUP BY ALL
    """
    return _joined(sql, mine, theirs)


def absent_keys(
    mine: pa.Table,
    theirs: pa.Table,
    keys: Sequence[str],
    *,
    seen: str,
    open_rows: str,
    commit: str | None,
) -> tuple[pa.Table, int]:
    """Keys of latest rows in `theirs` that are `open_rows` and not in `mine`, and how many rows
    are open. `seen` takes the first key's place in `mine`, where rows that are bad have one too."""
    listed = ", ".join(keys)
    latest = f"SELECT {listed} FROM theirs WHERE {open_rows}"
    if commit is not None:
        latest = (
            f"SELECT {listed} FROM theirs GROUP BY {listed} HAVING arg_max({open_rows}, {commit})"
        )
    first, *others = keys
    same = " AND ".join([f"m.{seen} = l.{first}", *(f"m.{key} = l.{key}" for key in others)])
    sql = f"""
        WITH latest AS MATERIALIZED ({latest})
        SELECT {", ".join(f"l.{key}" for key in keys)}, false AS is_total, 0 AS total
        FROM latest l WHERE NOT EXISTS (SELECT 1 FROM mine m WHERE {same})
        UNION ALL SELECT {", ".join("NULL" for _ in keys)}, true, count(*) FROM latest
    """
    table = _joined(sql, mine, theirs)
    is_total = table.column("is_total")
    total = table.filter(is_total).column("total")[0].as_py()
    return table.filter(pc.invert(is_total)).select(list(keys)), int(total)


def _joined(sql: str, mine: pa.Table, theirs: pa.Table) -> pa.Table:
    memory = 256 + theirs.num_rows * _MEMORY_PER_ROW // MIB
    duck = Duck(uri="hashes in the driver", memory_limit=f"{memory}MiB")
    try:
        cursor = duck.cursor()
        cursor.register("mine", mine)
        cursor.register("theirs", theirs)
        with duck.errors():
            return duck.run(cursor, lambda: cursor.execute(sql).to_arrow_table())
    finally:
        duck.close()
