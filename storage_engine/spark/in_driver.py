"""Comparing hashes in the driver, with DuckDB: for sources of a machine's size.

Spark's shuffle and join of two tables of hashes cost more than reading both sides. Up to some
millions of rows it is far cheaper to bring the hashes to the driver, 24 bytes a row, and join them
there. Beyond that, and where the size of the source cannot be told, Spark does it (`reconcile`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from storage_engine.config import MIB
from storage_engine.repository.duck import Duck
from storage_engine.spark.jobs import is_connect

# Bytes of the driver's JVM for each row, through which the hashes pass as 24 each.
_HEAP_PER_STORED_ROW = 200
_HEAP_PER_SOURCE_ROW = 80  # whose number is a guess, on the high side for text files
_LITTLE = 16 * MIB  # a source of this size is little, whatever is stored
_MEMORY_PER_ROW = 64  # of DuckDB's table of what is stored; what does not fit goes to disk
_TOO_MUCH = "spark.driver.maxResultSize"  # named by Spark when it will not bring so much


def fits(source: DataFrame, *, stored_rows: int, stored_bytes: int) -> bool:
    """Whether the hashes of both sides are little for the driver, as far as can be told before."""
    if is_connect(source.sparkSession):
        return False
    spark: Any = source.sparkSession
    heap = int(spark._jvm.java.lang.Runtime.getRuntime().maxMemory())
    if stored_rows > heap // _HEAP_PER_STORED_ROW:
        return False
    # What Catalyst expects: the size of files, and beyond all bounds where it does not know.
    plan: Any = source._jdf
    size = int(str(plan.queryExecution().optimizedPlan().stats().sizeInBytes()))
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


def judged(
    mine: pa.Table,
    known: pa.Table,
    keys: Sequence[str],
    content: str,
    statuses: Sequence[str],
    *,
    commit: str | None,
) -> pa.Table:
    """Keys that differ, `status` (its number in `statuses`) and rows (`n`); for the other statuses
    one row each, without keys. `commit`: identities may be in `known` several times, and the
    greatest value of this column tells the latest."""
    number = {status: place for place, status in enumerate(statuses)}
    listed = ", ".join(keys)
    latest = "FROM known"
    if commit is not None:
        latest = (
            f"SELECT {listed}, arg_max({content}, {commit}) AS {content} FROM known "
            f"GROUP BY {listed}"
        )
    same = " AND ".join(f"m.{key} = l.{key}" for key in keys)
    shown = ", ".join(
        f"CASE WHEN status IN ({number['inserted']}, {number['updated']}) THEN {key} END AS {key}"
        for key in keys
    )
    sql = f"""
        WITH latest AS ({latest}), compared AS (
            SELECT {", ".join(f"m.{key}" for key in keys)}, CASE
                WHEN m.{keys[0]} IS NULL THEN {number["bad"]}
                WHEN l.{keys[0]} IS NULL THEN {number["inserted"]}
                WHEN m.{content} = l.{content} THEN {number["unchanged"]}
                ELSE {number["updated"]} END AS status
            FROM mine m LEFT JOIN latest l ON {same}
        )
        SELECT {shown}, status, count(*) AS n FROM compared GROUP BY ALL
    """
    memory = 256 + known.num_rows * _MEMORY_PER_ROW // MIB
    duck = Duck(uri="hashes in the driver", memory_limit=f"{memory}MiB")
    try:
        cursor = duck.cursor()
        cursor.register("mine", mine)
        cursor.register("known", known)
        with duck.errors():
            return duck.run(cursor, lambda: cursor.execute(sql).to_arrow_table())
    finally:
        duck.close()
