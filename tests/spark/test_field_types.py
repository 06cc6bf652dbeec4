"""Decimals, enums, UUIDs and times of day as Spark reads and writes them."""

from __future__ import annotations

from datetime import time
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from storage_engine import (
    CompactionPolicy,
    Entity,
    Field,
    Session,
    ValidationError,
    initialize_storage,
)
from storage_engine.spark import (
    read_entities,
    register,
    spark_schema,
    write_type,
)
from storage_engine.spark.compaction import compact_with_spark
from storage_engine.spark.jobs.ingest import DriftPolicy, IngestSpec, Source, ingest
from tests.runtime.support import make_storage, read

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]

SOME = UUID("c9bf9e57-1685-4c89-bafb-ff5af830be8a")
NINES = "9" * 29 + "." + "9" * 9


class Status(Enum):
    OPEN = "open"
    PAID = "paid"


class SparkOrder(Entity, name="Order"):
    id: Field[str] = Field(primary_key=True)
    total: Field[Decimal] = Field(precision=12, scale=2)
    huge: Field[Decimal | None] = Field(default=None, precision=38, scale=9)
    status: Field[Status] = Field(default=Status.OPEN)
    level: Field[Literal[1, 2] | None] = Field(default=None)
    opens: Field[time] = Field(default=time(9, 5))
    closes: Field[time | None] = Field(default=None)
    ref: Field[UUID | None] = Field(default=None)


Order: Any = SparkOrder
ORDERS = [
    Order(id="a", total="1.5", huge=NINES, status="paid", level=1, opens="00:00", ref=SOME),
    Order(id="b", total="-9999999999.99", closes=time(23, 59, 59, 999999)),
    Order(id="c", total=0, huge=f"-{NINES}", closes=time(0)),
]
COLUMNS = {
    "total": "decimal(12,2)",
    "huge": "decimal(38,9)",
    "status": "string",
    "level": "bigint",
    "opens": "string",
    "closes": "string",
    "ref": "string",
}
MORNING = "09:05:00.000000"
ROWS = {
    "a": (Decimal("1.50"), Decimal(NINES), "paid", 1, "00:00:00.000000", None, str(SOME)),
    "b": (Decimal("-9999999999.99"), None, "open", None, MORNING, "23:59:59.999999", None),
    "c": (Decimal("0"), Decimal(f"-{NINES}"), "open", None, MORNING, "00:00:00.000000", None),
}


def rows(df: DataFrame) -> dict[str, tuple[Any, ...]]:
    return {row["id"]: tuple(row[name] for name in COLUMNS) for row in df.collect()}


@pytest.fixture
def uri(tmp_path: Path) -> str:
    made = str(tmp_path / "onto")
    initialize_storage(made)
    return made


def test_reading_in_any_zone_and_by_any_way(spark: SparkSession, uri: str, tmp_path: Path) -> None:
    register(spark)
    with Session(uri) as session:
        for order in ORDERS:  # files of their own, whose rows must not be mixed up
            session.ensure(order)
            session.commit()
        zone = spark.conf.get("spark.sql.session.timeZone")
        spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
        try:
            frame = read_entities(spark, Order, session, with_commit_id=True)
            assert rows(frame) == ROWS
        finally:
            spark.conf.set("spark.sql.session.timeZone", str(zone))
        assert dict(frame.drop("commit_id", "id").dtypes) == COLUMNS
        late = read_entities(spark, Order, session, filter="closes > '12:00' AND total < 0")
        assert [row["id"] for row in late.collect()] == ["b"]
    options = {"storage_uri": uri, "type": "Order"}
    loaded = spark.read.format("ontologia").options(**options).load()
    assert rows(loaded) == ROWS
    local = make_storage(tmp_path, "sqlite-v2")
    with Session(local) as session:
        session.ensure(ORDERS)
        session.commit()
        assert rows(read_entities(spark, Order, session)) == ROWS


def test_writing_and_writing_again(spark: SparkSession, uri: str) -> None:
    given = [(key, *values) for key, values in ROWS.items()]
    native = spark.createDataFrame(given, spark_schema(Order))
    texts = native.select(
        "id",
        F.col("total").cast("string"),
        F.col("huge").cast("string"),
        "status",
        F.col("level").cast("tinyint"),
        F.regexp_replace("opens", r":00\.000000$", "").alias("opens"),
        "closes",
        F.upper("ref").alias("ref"),
    )
    with Session(uri) as session:
        first = write_type(native, Order, session)
        assert (first.inserted, first.updated) == (3, 0)
        for again in (native, native.withColumn("ref", F.upper("ref")), texts):
            result = write_type(again, Order, session)
            assert (result.inserted, result.updated, result.unchanged) == (0, 0, 3)
        changed = texts.withColumn("opens", F.lit("10:00:00.5"))
        assert write_type(changed, Order, session).updated == 3
        few = write_type(native.select("id", "total").limit(1), Order, session)
        assert few.updated == 1  # the rest has its default
    assert {order.id: order.total for order in read(uri, Order)} == {
        order.id: order.total for order in ORDERS
    }


def test_rows_that_do_not_fit_are_set_aside(spark: SparkSession, uri: str) -> None:
    frame = spark.createDataFrame(
        [
            ("good", "1.5", "paid", 1, "09:05", str(SOME)),
            ("digits", "0.001", "paid", 1, "09:05", None),
            ("status", "1", "payed", 1, "09:05", None),
            ("level", "1", "paid", 3, "09:05", None),
            ("clock", "1", "paid", 1, "25:00", None),
            ("ref", "1", "paid", 1, "09:05", "c9"),
        ],
        "id string, total string, status string, level int, opens string, ref string",
    )
    native = frame.withColumn("total", F.lit("1.5").cast("decimal(12,2)")).drop("opens")
    with Session(uri) as session:
        for source, bad in ((frame, 5), (native, 3)):
            with pytest.raises(ValidationError, match="payed"):
                write_type(source, Order, session)
            result = write_type(source, Order, session, on_bad_rows="quarantine")
            assert result.quarantined == bad
    assert "status" not in {order.id for order in read(uri, Order)}


def test_compaction_by_spark(spark: SparkSession, uri: str) -> None:
    with Session(uri) as session:
        for order in [*ORDERS, ORDERS[0].replace(closes=time(1))]:
            session.ensure(order)
            session.commit()
        before = read(uri, Order)
        policy = CompactionPolicy(min_entries=2)
        report = compact_with_spark(spark, session, policy=policy, above_bytes=0)
        assert report.runs
    assert read(uri, Order) == before


def test_an_ingestion_of_text(spark: SparkSession, uri: str, tmp_path: Path) -> None:
    source = tmp_path / "orders.csv"
    source.write_text(
        "id,total,status,opens\na,1.5,paid,09:05\nb,1.005,paid,09:05\nc,1.500,nope,09:05\n"
    )
    order = IngestSpec(
        storage_uri=uri,
        type="Order",
        models="tests.spark.test_field_types",
        source=Source(
            format="csv",
            paths=(str(source),),
            row_schema="id string, total decimal(12,2), status string, opens string",
        ),
        on_bad_rows="quarantine",
        drift=DriftPolicy(retyped="quarantine"),
    )
    result = ingest(spark, order)
    assert result.quarantined == 2
    assert [(o.id, o.total, o.status) for o in read(uri, Order)] == [
        ("a", Decimal("1.50"), Status.PAID)
    ]
