"""Writing while things go wrong, and beside others: published once or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from storage_engine import OntologiaConfig, Session, initialize_storage
from storage_engine.commitlog import layout
from storage_engine.commitlog.heartbeat import GivenUp
from storage_engine.model import TypeSpec
from storage_engine.objectstore.open import open_store
from storage_engine.objectstore.protocol import ObjectStore, OutcomeUnknown
from storage_engine.repository.open import open_object_repository
from storage_engine.runtime.core import SessionSettings
from storage_engine.runtime.session import session_on
from storage_engine.spark import write_entities, writer
from tests.engines import CUSTOMER, PRODUCT, Customer, Product
from tests.spark.gates import Gate, await_file, in_thread
from tests.spark.killed_driver import APP

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]  # the JVM may have to wait its turn

CUSTOMERS = "id string, name string, age int"
ROWS = [("a", "new", 1), ("b", "new", 2)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    initialize_storage(str(tmp_path / "onto"), "v2")
    return tmp_path / "onto"


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    with Session(str(folder)) as made:
        yield made


@pytest.fixture
def parts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks stage however little they have."""
    monkeypatch.setattr(writer, "LOOSE_BYTES", 0)


def names(session: Session, spec: TypeSpec = CUSTOMER, column: str = "name") -> dict[str, Any]:
    stored = session.repository.read(spec)
    return dict(zip(*stored.select(["entity_key", column]).to_pydict().values(), strict=True))


def disturbed(df: DataFrame, disturb: Callable[[], None]) -> DataFrame:
    """The frame, with something done by the task that reads it, before its rows come."""

    def through(batches: Iterator[Any]) -> Iterator[Any]:
        disturb()
        yield from batches

    return df.coalesce(1).mapInArrow(through, df.schema)


def staged(folder: Path) -> list[Path]:
    return sorted((folder / "staged").rglob("*.parquet"))


# -- tasks ----------------------------------------------------------------------------------------


def test_tasks_that_fail_or_are_killed(
    spark: SparkSession, session: Session, folder: Path, parts_at_once: None
) -> None:
    """The first attempt raises, the second is killed, the third is believed."""
    marks = folder.parent

    def disturb() -> None:
        import os

        for name in ("failed", "killed"):
            mark = os.path.join(str(marks), name)
            if not os.path.exists(mark):
                open(mark, "w").close()
                if name == "failed":
                    raise RuntimeError("the first attempt fails")
                os.kill(os.getpid(), 9)

    written = write_entities(
        disturbed(spark.createDataFrame(ROWS, CUSTOMERS), disturb), Customer, session
    )
    assert (marks / "failed").exists()
    assert (marks / "killed").exists()
    assert (written.commit_id, written.inserted) == (1, 2)
    assert names(session) == {"a": "new", "b": "new"}
    assert len(staged(folder)) == 1


def test_a_second_copy_of_a_task_leaves_nothing(
    spark: SparkSession, session: Session, folder: Path, parts_at_once: None
) -> None:
    """An attempt that staged its part and then failed: what speculation would leave too."""
    mark = str(folder.parent / "failed")

    def late(batches: Iterator[Any]) -> Iterator[Any]:
        import os

        yield from batches
        if not os.path.exists(mark):
            open(mark, "w").close()
            raise RuntimeError("after all rows")

    df = spark.createDataFrame(ROWS, CUSTOMERS).coalesce(1).mapInArrow(late, CUSTOMERS)
    written = write_entities(df, Customer, session, target_part_bytes=1)
    assert (written.commit_id, written.inserted, written.files) == (1, 2, 1)
    assert os.path.exists(mark)
    (part,) = staged(folder)
    assert part.stem.split("-")[1] == "00000"
    assert names(session) == {"a": "new", "b": "new"}


# -- the driver and its CAS -----------------------------------------------------------------------


def test_a_driver_killed_before_and_after_the_cas(spark: SparkSession, tmp_path: Path) -> None:
    """Run again with the same unit of work, all is there once."""
    drivers = {}
    for when in ("before", "after"):
        uri = str(tmp_path / when)
        initialize_storage(uri, "v2")
        drivers[when] = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.killed_driver", uri, when],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    for when, driver in drivers.items():
        assert driver.wait(500) == -signal.SIGKILL
        config = OntologiaConfig(s3_lock_timeout_ms=60_000)
        with Session(str(tmp_path / when), config=config) as session:
            published = session.repository.head_commit_id()
            assert published == (1 if when == "after" else 0)
            assert len(names(session)) == 2 * published
            session.ensure(Customer(id="c", name="later"))
            assert session.commit() == published + 1
            df = spark.createDataFrame(ROWS, CUSTOMERS)
            again = write_entities(df, Customer, session, idempotency=APP)
            assert again.already_applied == (when == "after")
            assert again.commit_id == (1 if when == "after" else 2)
            assert names(session) == {"a": "new", "b": "new", "c": "later"}


class MuteStore:
    """Passes requests on; the answer to the next write of head is lost."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put_if_match(self, key: str, data: bytes, etag: str, *, write_id: str) -> str:
        answer = self._inner.put_if_match(key, data, etag, write_id=write_id)
        if key == layout.HEAD and not self.lost:
            self.lost += 1
            raise OutcomeUnknown("connection reset")
        return answer


def test_a_lost_response_to_the_cas(spark: SparkSession, folder: Path) -> None:
    config = OntologiaConfig()
    store = MuteStore(open_store(str(folder), config))
    repository = open_object_repository(cast(ObjectStore, store), config)
    session = session_on(repository, SessionSettings.of(config))
    df = spark.createDataFrame(ROWS, CUSTOMERS)
    written = write_entities(df, Customer, session, idempotency=("crm", 1))
    assert (written.commit_id, written.inserted, store.lost) == (1, 2, 1)
    again = write_entities(df, Customer, session, idempotency=("crm", 1))
    assert (again.commit_id, again.already_applied) == (1, True)
    assert repository.head_commit_id() == 1
    session.close()
    repository.close()


# -- beside others --------------------------------------------------------------------------------


def test_others_write_while_a_job_stages(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    """Two jobs on two types are at work; a session is not held up, and what it wrote stays."""
    uri = str(folder)
    gate = Gate(tmp_path)
    with Session(uri) as other, Session(uri) as first, Session(uri) as second:
        other.ensure([Customer(id=key, name="old") for key in "abc"])
        assert other.commit() == 1
        rows = [(key, "ours", 1) for key in "abcd"]
        df = disturbed(spark.createDataFrame(rows, CUSTOMERS), gate)
        job = in_thread(lambda: write_entities(df, Customer, first))
        await_file(gate.reached)
        assert not (folder / layout.LOCK).exists(), "the lock is held while rows are staged"
        other.ensure([Customer(id="b", name="theirs"), Customer(id="d", name="theirs")])
        assert other.commit() == 2
        products = spark.createDataFrame([("p", 1.0)], "sku string, price double")
        beside = in_thread(lambda: write_entities(products, Product, second))
        gate.opened.touch()
        assert beside.result(500).inserted == 1
        written = job.result(500)
        assert (written.updated, written.inserted, written.kept) == (2, 0, 2)
        assert names(other) == {"a": "ours", "b": "theirs", "c": "ours", "d": "theirs"}
        assert names(other, PRODUCT, "price") == {"p": 1.0}
        assert other.repository.head_commit_id() == 4
        history = {row["id"]: row["types"] for row in other.list_commits()}
        assert sorted(map(str, history.values())) == [
            "['Customer']", "['Customer']", "['Customer']", "['Product']",
        ]  # fmt: skip


def test_a_lost_heartbeat_cancels_the_job(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    with Session(str(folder), config=OntologiaConfig(s3_lease_ttl_ms=600)) as session:
        df = disturbed(spark.createDataFrame(ROWS, CUSTOMERS), gate)
        job = in_thread(lambda: write_entities(df, Customer, session))
        await_file(gate.reached)
        (heartbeat,) = (folder / "meta" / "attempts").iterdir()
        heartbeat.unlink()  # as a collector does that has given the attempt up
        with pytest.raises(GivenUp, match="nothing was published"):
            job.result(500)
        assert not gate.opened.exists(), "the job was cancelled, not waited for"
        assert session.repository.head_commit_id() == 0
    assert staged(folder) == []
    assert threading.active_count() < 50
