"""Migration by Spark: what the engine would have made, beside writers, or nothing at all."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from storage_engine import Entity, Field, Relation, Session, initialize_storage, upgrader
from storage_engine.errors import ConfigurationError, MigrationError, StorageBackendError
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.spark import migrate_with_spark
from storage_engine.spark.jobs import migrate
from storage_engine.spark.migration import SparkStager
from tests.runtime.evolving import (
    Bought1,
    Bought2,
    Bought3,
    Client,
    Customer1,
    Customer2,
    Customer3,
    Product1,
)
from tests.spark.gates import Gate, await_file, in_thread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


class BoughtByClient(Relation[Client, Product1], name="Bought"):
    count: Field[int] = Field(default=1)


def staged(uri: str) -> set[str]:
    """Attempts with something in the store."""
    return {path.name for path in (Path(uri) / "staged").glob("*") if any(path.rglob("*.parquet"))}


def rows(uri: str, name: str) -> list[dict[str, Any]]:
    with Session(uri) as session:
        found: list[dict[str, Any]] = session.sql(
            f'SELECT * EXCLUDE (commit_id) FROM "{name}" ORDER BY 1, 2'
        ).collect()
    return found


def test_spark_rewrites_what_is_above_a_size(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = str(tmp_path / "store")
    initialize_storage(uri)
    with Session(uri) as session:
        session.ensure(Customer1(id=f"c{n}", first="A", last=str(n)) for n in range(50))
        session.ensure(Product1(sku="p"))
        session.ensure(Bought1(left_key=f"c{n}", right_key="p", count=n) for n in range(3))
    with Session(uri) as session:  # newer versions of some
        session.ensure(Customer1(id=f"c{n}", first="B", last=str(n), age=n) for n in range(40, 60))
    by_spark: list[str] = []
    given_up: list[bool] = []
    stage = SparkStager.stage

    def recorded(self: SparkStager, migration: Any, folder: Any, as_of: int) -> Any:
        if given_up:
            self.cancel()  # as the heartbeat does
        parts = stage(self, migration, folder, as_of)
        by_spark.extend([migration.spec.name] if parts is not None else [])
        return parts

    monkeypatch.setattr(SparkStager, "stage", recorded)

    def migrated(*types: Any, **options: Any) -> Any:
        relations = [cls for cls in types if cls.__name__.startswith("Bought")]
        entities = [cls for cls in types if cls not in relations]
        with Session(uri, entity_types=entities, relation_types=relations) as session:
            return migrate_with_spark(spark, session, dry_run=False, force=True, **options)

    # Additive; what is below the size is left to the engine.
    shop: tuple[Any, ...] = (Customer2, Product1, Bought2)
    told: list[int] = []
    done = migrated(*shop, above_bytes=1, progress=lambda _, count: told.append(count))
    assert (done.commit_id, done.rows_migrated, sum(told)) == (3, {"Customer": 60}, 60)
    assert by_spark == ["Customer"]
    customers = {row["id"]: row for row in rows(uri, "Customer")}
    assert len(customers) == 60
    assert (customers["c1"]["first"], customers["c1"]["age"]) == ("A", 0.0)
    assert (customers["c45"]["first"], customers["c45"]["age"]) == ("B", 45.0)
    assert json.loads(customers["c1"]["tags"]) == []

    # A row that cannot be upgraded, and upgraders that executors cannot have: nothing is left.
    def broken(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == "c7":
            raise ValueError("seven")
        row["name"] = f"{row.pop('first')} {row.pop('last')}"
        return row

    before = staged(uri)
    shop = (Customer3, Product1, Bought3)
    with pytest.raises(MigrationError, match=r"Customer 'c7'.*ValueError: seven") as raised:
        migrated(*shop, above_bytes=0, upgraders={("Customer", 2): broken})
    assert (raised.value.identity, raised.value.old and raised.value.old["last"]) == ("c7", "7")
    elsewhere = ModuleType("only_on_the_driver")
    monkeypatch.setitem(sys.modules, elsewhere.__name__, elsewhere)
    exec("def upgrade(row):\n    return row", vars(elsewhere))
    with pytest.raises(ConfigurationError, match=r"cannot import 'only_on_the_driver'.*py-files"):
        migrated(*shop, above_bytes=0, upgraders={("Customer", 2): elsewhere.upgrade})
    with (
        (tmp_path / "open").open("w") as held,
        pytest.raises(ConfigurationError, match="cannot be sent to Spark's executors"),
    ):
        migrated(
            *shop, above_bytes=0, upgraders={("Customer", 2): lambda row: {**row, "file": held}}
        )
    given_up.append(True)
    with pytest.raises(StorageBackendError, match="given up") as raised_again:
        migrated(*shop, above_bytes=0, upgraders={("Customer", 2): broken})
    assert raised_again.value.retryable
    given_up.clear()
    assert staged(uri) == before
    with Session(uri) as session:
        assert session.repository.head_commit_id() == 3

    # With an upgrader, while others write rows of the old version.
    gate = Gate(tmp_path)

    def one_name(row: dict[str, Any]) -> dict[str, Any]:
        gate()
        row["name"] = f"{row.pop('first')} {row.pop('last')}"
        return row

    running = in_thread(
        lambda: migrated(*shop, above_bytes=0, upgraders={("Customer", 2): one_name})
    )
    await_file(gate.reached)
    with Session(uri) as session:
        session.ensure(Customer2(id="c1", first="new", last="one"))
        session.ensure(Customer2(id="c99", first="late", last="comer"))
    gate.opened.touch()
    done = running.result()
    assert (done.commit_id, done.rows_migrated) == (5, {"Customer": 61})
    names = {row["id"]: row["name"] for row in rows(uri, "Customer")}
    assert len(names) == 61
    assert (names["c1"], names["c99"], names["c45"]) == ("new one", "late comer", "B 45")

    # A rename: the relation follows it, and both go to Spark.
    done = migrated(Client, Product1, BoughtByClient, above_bytes=0)
    assert done.rows_migrated == {"Bought": 3, "Client": 61}
    assert by_spark[-2:] == ["Client", "Bought"]
    assert rows(uri, "Client")[0]["full_name"] == "A 0"
    assert [row["count"] for row in rows(uri, "Bought")] == [0, 1, 2]
    with Session(uri) as session:
        report = verify_storage(session.repository, deep=True)
    assert [finding.message for finding in report.findings] == []


class Item(Entity):
    sku: Field[str] = Field(primary_key=True)


@upgrader("Item", from_version=2)
def labelled(row: dict[str, Any]) -> dict[str, Any]:
    return {"sku": row["sku"], "label": row["sku"].upper()}


def test_the_program_shows_applies_and_refuses(
    tmp_path: Path,
    spark: SparkSession,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri = str(tmp_path / "store")
    initialize_storage(uri)
    with Session(uri) as session:
        session.ensure(Item(sku=f"s{n}") for n in range(5))

    def declare(fields: str) -> None:
        models = ModuleType("items_now")
        monkeypatch.setitem(sys.modules, models.__name__, models)
        text = "from storage_engine import Entity, Field\n"
        text += "class Item(Entity):\n    sku: Field[str] = Field(primary_key=True)\n"
        exec(f"{text}    {fields}", vars(models))

    def run(*options: str, code: int = 0) -> dict[str, Any]:
        common = ["--storage-uri", uri, "--models", "items_now", "--spark-above", "0", "--json"]
        assert migrate.main([*common, *options]) == code
        printed: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return printed

    declare('note: Field[str] = Field(default="-")')
    preview = run()
    assert (preview["possible"], preview["estimated_rows"]) == (True, {"Item": 5})
    assert run("--apply", code=4)["error"]["type"] == "MigrationTokenError"
    assert run("--token", "x", code=2)["error"]["type"] == "ConfigurationError"
    applied = run("--apply", "--token", preview["token"])
    assert (applied["commit_id"], applied["by_spark"]) == (2, ["Item"])
    assert run("--apply", "--force")["applied"] is False

    declare("label: Field[str]")
    assert run("--upgraders", "items_now", code=3)["missing_upgraders"][0]["from_version"] == 2
    applied = run("--apply", "--force", "--upgraders", __name__)
    assert applied["by_spark"] == ["Item"]
    assert rows(uri, "Item")[4]["label"] == "S4"
