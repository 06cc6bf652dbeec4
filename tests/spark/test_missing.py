"""`missing: mark`: rows that a full extract no longer has are marked, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from storage_engine import (
    ConfigurationError,
    Entity,
    Field,
    MissingRowsError,
    OvertakenExtractError,
    Relation,
    Session,
    initialize_storage,
)
from storage_engine.model import spec_of
from storage_engine.spark import publish as driver_part
from storage_engine.spark import write_entities, write_relations, writer
from storage_engine.spark.missing_policy import MissingPolicy, field_marks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]  # the JVM may have to wait its turn


class Plant(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str | None]
    country: Field[str] = Field(default="DE")
    seq: Field[int] = Field(default=0)
    active: Field[bool] = Field(default=True)
    ended_at: Field[datetime | None] = Field(default=None)


class Supplies(Relation[Plant, Plant]):
    contract: Field[str] = Field(instance_key=True)
    active: Field[bool] = Field(default=True)
    ended_at: Field[datetime | None] = Field(default=None)


MARK = {"set": {"active": False, "ended_at": "now"}, "limit": "50%"}
Rows = list[tuple[Any, ...]]
Write = Callable[..., Any]


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    uri = str(tmp_path / "onto")
    initialize_storage(uri, "v2")
    with Session(uri) as made:
        yield made


BOTH = pytest.mark.parametrize("in_driver", [True, False], ids=["driver", "spark"])


@pytest.fixture
def in_driver() -> bool:
    """Who compares, whatever the size; tests that care have both."""
    return True


@pytest.fixture(autouse=True)
def _compared(monkeypatch: pytest.MonkeyPatch, in_driver: bool) -> None:
    monkeypatch.setattr(writer, "fits", lambda _, **__: in_driver)


@pytest.fixture
def write(spark: SparkSession, session: Session) -> Write:
    def run(rows: Rows, columns: str = "id string, name string", **options: Any) -> Any:
        return write_entities(
            spark.createDataFrame(rows, columns), Plant, session, **{"missing": MARK, **options}
        )

    return run


def named(*ids: str) -> Rows:
    return [(key, f"name of {key}") for key in ids]


def plants(session: Session) -> dict[str, Plant]:
    return {plant.id: plant for plant in session.query().entities(Plant).collect()}


def active(session: Session) -> str:
    return "".join(sorted(plant.id for plant in plants(session).values() if plant.active))


@BOTH
def test_lost_and_regained(write: Write, session: Session) -> None:
    """One commit each; what is marked stays as it is, what comes back has no mark any more."""
    write(named(*"abcdef"), missing="keep")
    began = datetime.now(UTC)
    lost = write([*named(*"abcd"), ("e", "changed"), ("g", "new")])
    assert (lost.inserted, lost.updated, lost.unchanged, lost.marked) == (1, 1, 4, 1)
    assert (lost.commit_id, lost.rows) == (2, 6)
    assert [c["key"] for c in session.list_commit_changes(2)] == ["e", "f", "g"]
    gone = plants(session)["f"]
    assert (gone.active, gone.name) == (False, "name of f")
    assert gone.ended_at is not None
    assert began <= gone.ended_at <= datetime.now(UTC)

    more = write([*named(*"abc"), ("e", "changed"), ("g", "new")])
    assert (more.marked, more.updated, more.unchanged) == (1, 0, 5)
    assert plants(session)["f"].ended_at == gone.ended_at, "it ended once"

    back = write([*named(*"abcf"), ("e", "changed"), ("g", "new")])
    assert (back.updated, back.inserted, back.marked) == (1, 0, 0)
    assert active(session) == "abcefg"
    assert plants(session)["f"].ended_at is None


@BOTH
def test_too_many_stop_the_write(write: Write, session: Session) -> None:
    write(named(*"abcdef"))
    with pytest.raises(MissingRowsError) as caught:
        write(named(*"ab"))
    assert "Plant: 4 of 6 rows (66.7 %) are missing" in str(caught.value)
    assert "for example 'c', 'd', 'e'; at most 50 % may be" in str(caught.value)
    assert "missing.limit" in str(caught.value)
    assert (caught.value.missing, caught.value.of) == (4, 6)
    previewed = write([], dry_run=True)
    assert (previewed.marked, previewed.commit_id) == (6, None)
    assert "6 of 6 rows (100 %)" in previewed.problem
    assert session.repository.head_commit_id() == 1
    assert write(named(*"ab"), missing={**MARK, "limit": 4}).marked == 4
    # Those that are marked already are no part of it any more.
    with pytest.raises(MissingRowsError, match="1 of 2 rows"):
        write(named("a"), missing={**MARK, "limit": "49.9%"})
    assert active(session) == "ab"


def test_what_was_set_aside_older_or_repeated_is_not_missing(
    write: Write, session: Session
) -> None:
    columns = "id string, name string, country string, seq bigint"
    write([(key, "n", "DE", 5) for key in "abcde"], columns)
    rows = [
        ("a", "n", None, 5),  # bad
        ("b", "older", "DE", 4),
        ("c", "n", "DE", 5),
        ("c", "n", "DE", 3),  # gives way
    ]
    result = write(rows, columns, on_bad_rows="quarantine", order_by="seq")
    assert (result.quarantined, result.stale, result.duplicates, result.marked) == (1, 1, 1, 2)
    assert active(session) == "abc"


@BOTH
def test_rows_that_tell_no_identity_stop_the_marking_alone(write: Write, session: Session) -> None:
    """Nobody knows whose they are: maybe of what seems to be missing."""
    write(named(*"abcd"))
    rows = [*named(*"abc"), (None, "whose?"), ("", "whose?"), ("z", "new")]
    result = write(rows, on_bad_rows="quarantine")
    assert (result.inserted, result.quarantined, result.marked) == (1, 2, 0)
    assert "2 rows of the source do not tell which Plant they are" in result.notes[0]
    assert active(session) == "abcdz"


def test_rows_that_python_converts(write: Write, session: Session) -> None:
    """Bad ones of them are there as well: 1.5 is no whole number, and `a` is no text of JSON."""
    columns = "id string, name string, seq double"
    write([(key, "n", 1.0) for key in "abcd"], columns)
    result = write(
        [("a", "n", 1.5), ("b", "n", 1.0), ("c", "n", 2.0)], columns, on_bad_rows="quarantine"
    )
    assert (result.quarantined, result.updated, result.unchanged) == (1, 1, 1)
    assert result.marked == 1
    assert active(session) == "abc"


def test_a_scope_says_what_the_extract_should_have(write: Write, session: Session) -> None:
    columns = "id string, name string, country string"
    write([("a", "n", "DE"), ("b", "n", "DE"), ("c", "n", "FR"), ("d", "n", "FR")], columns)
    german = {**MARK, "scope": "country = 'DE'"}
    assert write([("a", "n", "DE")], columns, missing=german).marked == 1
    assert active(session) == "acd"
    with pytest.raises(ConfigurationError, match=r"missing\.scope: \"land = 'DE'\" cannot be"):
        write([], columns, missing={**MARK, "scope": "land = 'DE'"})
    with pytest.raises(ConfigurationError, match="is string, not a condition"):
        write([], columns, missing={**MARK, "scope": "country"})


def test_units_of_work(write: Write, session: Session) -> None:
    """A replay, and an older extract that comes late, undo nothing and mark nothing."""
    write(named(*"abc"), idempotency=("crm", 1))
    write(named(*"abd"), idempotency=("crm", 2))
    head = session.repository.head_commit_id()
    for rows, version in ((named(*"abd"), 2), (named(*"abc"), 1)):
        late = write(rows, idempotency=("crm", version))
        assert late.already_applied
        assert late.marked == 0
    assert session.repository.head_commit_id() == head
    assert active(session) == "abd"


def test_what_another_commit_changed_meanwhile_stays(
    write: Write, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(named(*"abcd"))
    publish = driver_part.publish

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(writer, "publish", publish)
        with Session(session.repository.uri) as other:
            other.ensure(Plant(id="c", name="by another"))
            other.commit()
        return publish(*arguments)

    monkeypatch.setattr(writer, "publish", overtaken)
    result = write(named(*"ab"))
    assert (result.marked, result.kept, result.updated) == (1, 1, 0)
    assert active(session) == "abc"
    assert plants(session)["c"].name == "by another"


def test_another_extract_of_the_same_source_published_meanwhile(
    write: Write, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is newer: what it has, and we lack, must not be marked."""
    write(named(*"abcd"), idempotency=("crm", "one"))
    publish = driver_part.publish

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(writer, "publish", publish)
        write([*named(*"abcd"), ("e", "new")], idempotency=("crm", "three"))
        return publish(*arguments)

    monkeypatch.setattr(writer, "publish", overtaken)
    with pytest.raises(OvertakenExtractError, match="crm 'three' was published"):
        write(named(*"abc"), idempotency=("crm", "two"))
    assert active(session) == "abcde"


def test_relations(spark: SparkSession, session: Session) -> None:
    columns = "left_key string, right_key string, contract string"
    rows = [("a", "b", "1"), ("a", "b", "2"), ("a", "c", "1"), ("x", "y", "9")]
    options = {"missing": {**MARK, "scope": "contract <> '9'"}}
    write_relations(spark.createDataFrame(rows, columns), Supplies, session, **options)
    result = write_relations(
        spark.createDataFrame(rows[1:3], columns), Supplies, session, **options
    )
    assert (result.marked, result.unchanged) == (1, 2)
    (ended,) = session.query().relations(Supplies).where(Supplies.active.is_false()).collect()
    assert (ended.left_key, ended.right_key, ended.contract) == ("a", "b", "1")
    with pytest.raises(MissingRowsError, match=r"for example \('a', 'b', '2'\)"):
        write_relations(spark.createDataFrame([], columns), Supplies, session, **options)


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ({"activ": False}, "unknown field 'activ', did you mean 'active'"),
        ({"active": "no"}, "active: .*bool"),
        ({"id": "x"}, "'id' is part of the identity"),
        ({"name": "now"}, "name: now is a time, and the field is"),
        ({"active": None}, "active: .*bool"),
        ({"ended_at": "yesterday"}, "ended_at: "),
    ],
)
def test_marks_that_do_not_fit(marks: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        field_marks(MissingPolicy.parse({"set": marks}), spec_of(Plant))


def test_marks_that_all_rows_have(write: Write) -> None:
    with pytest.raises(ConfigurationError, match="country is what rows of the extract have too"):
        write(named("a"), missing={"set": {"country": "DE"}})


def test_values_of_all_kinds(write: Write, session: Session) -> None:
    """A fixed time instead of now, null, a text."""
    write(named("a", "b"))
    marks = {"ended_at": "2026-11-17T00:00:00Z", "name": None, "country": "none"}
    assert write(named("a"), missing={"set": marks, "limit": 1}).marked == 1
    ended = plants(session)["b"]
    assert (ended.name, ended.country) == (None, "none")
    assert ended.ended_at == datetime(2026, 11, 17, tzinfo=UTC)
    assert write(named("a"), missing={"set": marks, "limit": 1}).commit_id is None


@BOTH
def test_thousands(spark: SparkSession, session: Session, in_driver: bool) -> None:
    """Of 20,000 rows 200 are lost, and some of them regained after compaction."""
    everything = "SELECT concat('p', id) AS id, 'n' AS name, id AS n FROM range(20000)"

    def write(where: str) -> Any:
        rows = spark.sql(f"SELECT id, name FROM ({everything}) WHERE {where}")
        marks = {"set": {"active": False, "ended_at": "now"}}
        return write_entities(rows, Plant, session, missing=marks)

    write("true")
    lost = write("n % 100 <> 7")
    assert (lost.marked, lost.updated, lost.unchanged, lost.commit_id) == (200, 0, 19_800, 2)
    session.compact()
    back = write("n % 100 <> 7 OR n < 1000")
    assert (back.updated, back.marked, back.unchanged) == (10, 0, 19_800)
    if in_driver:
        with pytest.raises(MissingRowsError, match="of 19810 rows"):
            write("n < 10000")
    assert session.query().entities(Plant).where(Plant.active.is_false()).count() == 190
