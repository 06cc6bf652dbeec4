"""Comparing with what is stored: by hashes, which must neither lose a change nor hide a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from storage_engine import Session, ValidationError, initialize_storage
from storage_engine.spark import hash_tables as in_driver
from storage_engine.spark import reconcile, write_entities, writer
from tests.engines import Customer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]  # the JVM may have to wait its turn

CUSTOMERS = "id string, name string, age int"
STORED = [(f"c{number}", "stored", number) for number in range(8)]


@pytest.fixture
def session(spark: SparkSession, tmp_path: Path) -> Iterator[Session]:
    uri = str(tmp_path / "onto")
    initialize_storage(uri, "v2")
    with Session(uri) as made:
        write_entities(spark.createDataFrame(STORED, CUSTOMERS), Customer, made)
        yield made


@pytest.fixture(params=["driver", "spark"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who compares, whatever the size."""
    monkeypatch.setattr(writer, "fits", lambda _, **__: request.param == "driver")
    return str(request.param)


def customers(session: Session) -> list[tuple[Any, ...]]:
    found = session.query().entities(Customer).order_by(Customer.id).collect()
    return [(one.id, one.name, one.age) for one in found]


@pytest.mark.usefixtures("where")
def test_identities_with_the_same_first_hash(
    spark: SparkSession, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that meet by it only what differs is published; then with several versions stored."""
    right, first = reconcile._hashes, reconcile._KEYS[0]

    def colliding(*arguments: Any) -> Any:
        made = right(*arguments)
        return {**made, first: F.pmod(made[first], F.lit(2))}

    monkeypatch.setattr(reconcile, "_hashes", colliding)
    source = [*STORED[2:], ("c0", "changed", 0), ("c1", "stored", None), ("new", "new", 1)]
    result = write_entities(spark.createDataFrame(source, CUSTOMERS), Customer, session)
    assert (result.inserted, result.updated, result.unchanged) == (1, 2, 6)
    assert result.rows == 9
    assert customers(session) == sorted(source)
    assert len(session.list_commit_changes(2)) == 3

    back = write_entities(spark.createDataFrame(STORED, CUSTOMERS), Customer, session)
    assert (back.inserted, back.updated, back.unchanged) == (0, 2, 6), "an old version is a change"
    assert customers(session) == [*STORED, ("new", "new", 1)]
    again = write_entities(spark.createDataFrame(STORED, CUSTOMERS), Customer, session)
    assert (again.commit_id, again.unchanged) == (None, 8)


@pytest.mark.usefixtures("where")
def test_a_repetition_is_an_error_though_one_of_the_rows_is_stored(
    spark: SparkSession, session: Session
) -> None:
    source = spark.createDataFrame([*STORED, ("c3", "another", 3)], CUSTOMERS)
    with pytest.raises(ValidationError, match="more than once in the input, for example 'c3'"):
        write_entities(source, Customer, session)
    assert customers(session) == STORED


@pytest.mark.usefixtures("where")
def test_every_bad_row_is_told_beside_good_ones(spark: SparkSession, session: Session) -> None:
    """Where one stops the write they are found by staging alone."""
    bad = [("c1", None, 1), ("c1", None, 1), (None, "x", 1), (None, "x", 1), ("", "y", 1)]
    source = spark.createDataFrame([*STORED, *bad, ("new", "new", 1)], CUSTOMERS)
    with pytest.raises(ValidationError, match="5 rows cannot be written") as caught:
        write_entities(source, Customer, session)
    assert "column 'name' is null in 2 rows" in str(caught.value)
    assert "column 'id' is null in 2 rows" in str(caught.value)
    assert customers(session) == STORED
    previewed = write_entities(source, Customer, session, dry_run=True)
    assert (previewed.inserted, previewed.unchanged, previewed.quarantined) == (1, 8, 5)
    set_aside = write_entities(source, Customer, session, on_bad_rows="quarantine")
    assert (set_aside.inserted, set_aside.unchanged, set_aside.quarantined) == (1, 8, 5)


def test_the_driver_compares_what_is_known_to_be_little(
    spark: SparkSession, tmp_path: Path
) -> None:
    def fits(frame: DataFrame, rows: int = 1000, bytes: int = 0) -> bool:
        return in_driver.fits(frame, stored_rows=rows, stored_bytes=bytes)

    path = str(tmp_path / "little")
    spark.range(1000).write.parquet(path)
    little = spark.read.parquet(path)
    assert fits(little)
    assert not fits(little, rows=1 << 40), "what is stored passes through the driver too"
    rows = spark.createDataFrame(STORED, CUSTOMERS)
    assert not fits(rows), "nobody knows how many these are"
    many = spark.range(16 << 20)  # of 8 bytes
    assert not fits(many)
    assert fits(many, bytes=16 << 20)


def test_more_than_expected_is_compared_by_spark(
    spark: SparkSession, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = spark.createDataFrame([*STORED, ("new", "new", 1)], CUSTOMERS)
    too_much = PySparkException("Total size of results is bigger than spark.driver.maxResultSize")
    errors = [too_much, PySparkException("no executors")]

    def refused(_: DataFrame) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(writer, "fits", lambda _, **__: True)
    with monkeypatch.context() as patched:
        patched.setattr(type(source), "toArrow", refused)
        assert in_driver.brought(source) is None
        with pytest.raises(PySparkException, match="no executors"):
            in_driver.brought(source)
    monkeypatch.setattr(reconcile, "brought", lambda _: None)
    result = write_entities(source, Customer, session)
    assert (result.inserted, result.unchanged) == (1, 8)
