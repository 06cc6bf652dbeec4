"""A small source beside a large type: only what its keys can meet is read, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ontologia_dagster.downstream.metadata import run_figures
from storage_engine import Entity, Field, Relation, Session, ValidationError, initialize_storage
from storage_engine.repository.object.read import key_lookup
from storage_engine.repository.object.read.bloom import BloomFilter
from storage_engine.spark import increments, reconcile, write_entities, write_relations
from storage_engine.spark.jobs.ingest import summary
from storage_engine.spark.results import WriteResult
from tests.repository.object.test_key_lookup import ODD
from tests.spark import read_world as world

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]  # the JVM may have to wait its turn

KEYS = [key for key in ODD if key]  # an empty key cannot be written


class Part(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str | None] = Field(default=None)
    weight: Field[float]
    n: Field[int]


class Uses(Relation[Part, Part]):
    share: Field[int]


COLUMNS = "id string, name string, weight double, n int"
Model = dict[str, tuple[Any, ...]]


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    uri = str(tmp_path / "onto")
    initialize_storage(uri, "v2")
    with Session(uri, entity_types=[Part], relation_types=[Uses]) as made:
        yield made


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is stored, and however many the source's rows are of it."""
    monkeypatch.setattr(increments, "LARGE_BYTES", 0)
    monkeypatch.setattr(increments, "_PART", 1)


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each lookup has found."""
    found: list[int] = []
    right = increments.KeyLookup.__call__

    def noted(self: Any, keys: Any) -> Any:
        met = right(self, keys)
        found.append(met.count if met is not None else -1)
        return met

    monkeypatch.setattr(increments.KeyLookup, "__call__", noted)
    return found


def parts(session: Session) -> Model:
    found = session.query().entities(Part).collect()
    return {one.id: (one.id, one.name, one.weight, one.n) for one in found}


def row(key: str, draw: random.Random) -> tuple[Any, ...]:
    name = draw.choice([None, "", "a name", "\x00"])
    return (key, name, draw.choice([0.0, 1.5]), draw.randrange(3))


def write(spark: SparkSession, session: Session, rows: list[Any], model: Model) -> Any:
    """Write, and hold the result and what is stored then against a plain model."""
    expected = [sum(r[0] not in model for r in rows), sum(model.get(r[0], r) != r for r in rows)]
    result = write_entities(spark.createDataFrame(rows, COLUMNS), Part, session)
    model.update((r[0], r) for r in rows)
    assert [result.inserted, result.updated] == expected
    assert result.unchanged == len(rows) - sum(expected)
    assert parts(session) == model
    return result


def stored_in_every_way(spark: SparkSession, session: Session, draw: random.Random) -> Model:
    """Staged parts, small commits with commit ids in their files, and a snapshot of some of them:
    keys that have versions in all of these, and keys that have one."""
    model: Model = {}
    write(spark, session, [row(key, draw) for key in KEYS], model)
    write(spark, session, [row(key, draw) for key in KEYS[::3]], model)
    world.compact(session)
    write(spark, session, [row(key, draw) for key in KEYS[::5]], model)
    for key in KEYS[::7]:
        made = row(key, draw)
        session.ensure(Part(id=made[0], name=made[1], weight=made[2], n=made[3]))
        model[key] = made
    session.commit()
    return model


def test_every_key_in_every_file_beside_a_plain_model(
    spark: SparkSession, session: Session, lookups: list[int]
) -> None:
    draw = random.Random(7)
    model = stored_in_every_way(spark, session, draw)
    lookups.clear()
    every = [row(key, draw) for key in KEYS]
    result = write(spark, session, every, model)
    assert lookups[-1] >= len(KEYS)
    assert result.stored_bytes >= result.stored_bytes_read > 0
    again = write(spark, session, every, model)
    assert again.commit_id is None
    some = [row(f"new {n}", draw) for n in range(3)] + [row(key, draw) for key in KEYS[4:20:4]]
    write(spark, session, some, model)
    # Nothing that is stored can have these: no file is opened.
    beyond = write(spark, session, [row("\U0010ffff" * 2, draw)], model)
    assert (lookups[-1], beyond.stored_bytes_read, beyond.inserted) == (0, 0, 1)
    nothing = write(spark, session, [], model)
    assert (nothing.rows, nothing.stored_bytes_read) == (0, 0)
    assert len(lookups) == 5


@pytest.mark.parametrize("defect", ["range", "bloom", "file"])
def test_a_key_that_is_left_out_wrongly_is_found_by_the_model(
    spark: SparkSession, session: Session, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    """Planted: the search runs in this process, where the defect is."""
    draw = random.Random(7)
    model: Model = {}
    write(spark, session, [row(key, draw) for key in KEYS], model)
    if defect == "range":
        monkeypatch.setattr(key_lookup, "_bounds", lambda _: (b"b", b"c"))
    elif defect == "bloom":
        lying = BloomFilter(bytes(32))  # it holds nothing
        monkeypatch.setattr(key_lookup, "_bloom", lambda *_: lying)
    else:
        monkeypatch.setattr(key_lookup.WantedKeys, "in_file", lambda *_: False)
    monkeypatch.setattr(increments.KeyLookup, "_search", _in_this_process)
    with pytest.raises(AssertionError):
        write(spark, session, [("a", "changed", 2.5, 9), ("é", "changed", 2.5, 9)], model)


def _in_this_process(self: Any, wanted: Any, files: Any, schema: Any) -> list[str]:
    import pyarrow as pa

    shares = [increments._share(item) for item in files]
    batch = pa.RecordBatch.from_pydict({"id": [0]})
    work = increments._search_files(
        self.uri, self.config, wanted, schema, self.spec.primary_key, [shares], [batch]
    )
    return [text for made in work for text in made.column(0).to_pylist()]


def test_rows_in_order_repeated_bad_and_counted(
    spark: SparkSession, session: Session, lookups: list[int], tmp_path: Path
) -> None:
    """What else a write may be asked for gives the same as comparing with everything does."""
    stored = [(f"k{n:02}", "stored", 1.0, n) for n in range(40)]
    write_entities(spark.createDataFrame(stored, COLUMNS), Part, session)
    later = [("k01", "stale", 1.0, 0), ("k02", "newer", 1.0, 9), ("k02", "older", 1.0, 8)]
    later += [("k03", "stored", 1.0, 3), ("k99", "new", 1.0, 1), ("k99", "new", 1.0, 1)]
    ordered = write_entities(spark.createDataFrame(later, COLUMNS), Part, session, order_by="n")
    assert (ordered.inserted, ordered.updated, ordered.unchanged) == (1, 1, 1)
    assert (ordered.stale, ordered.duplicates, lookups[-1]) == (1, 2, 3)
    bad = [(None, "x", 1.0, 1), ("", "y", 1.0, 1), ("k04", "z", None, 1), ("k05", "five", 1.0, 5)]
    set_aside = write_entities(
        spark.createDataFrame(bad, COLUMNS),
        Part,
        session,
        on_bad_rows="quarantine",
        quarantine=str(tmp_path / "aside"),
        count_by="n",
    )
    assert (set_aside.updated, set_aside.quarantined) == (1, 3)
    assert set_aside.tally == {"5": [0, 1, 0]}
    twice = spark.createDataFrame([("k06", "a", 1.0, 1), ("k06", "b", 1.0, 1)], COLUMNS)
    with pytest.raises(ValidationError, match="more than once in the input"):
        write_entities(twice, Part, session)
    with pytest.raises(ValidationError, match="3 rows cannot be written"):
        write_entities(spark.createDataFrame(bad, COLUMNS), Part, session)
    preview = write_entities(
        spark.createDataFrame([("k07", "seven", 1.0, 7)], COLUMNS), Part, session, dry_run=True
    )
    assert (preview.updated, preview.stored_bytes_read > 0) == (1, True)
    # A full extract that marks what it lacks has to see all identities.
    before = len(lookups)
    marked = write_entities(
        spark.createDataFrame([("k02", "newer", 1.0, 9)], COLUMNS),
        Part,
        session,
        missing={"set": {"name": "gone"}, "limit": "100%"},
    )
    assert (marked.marked, marked.unchanged, len(lookups)) == (40, 1, before)
    assert marked.stored_bytes_read == marked.stored_bytes > 0
    assert parts(session)["k07"] == ("k07", "gone", 1.0, 7)


def test_more_rows_than_are_looked_up_and_identities_of_several_columns(
    spark: SparkSession, session: Session, lookups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [(f"k{n}", "end", 1.0, n) for n in range(6)]
    write_entities(spark.createDataFrame(ends, COLUMNS), Part, session)
    pairs = [(f"k{a}", f"k{b}", 1) for a in range(6) for b in range(6) if a != b]
    columns = "left_key string, right_key string, share int"
    write_relations(spark.createDataFrame(pairs, columns), Uses, session)
    some = [("k0", "k1", 2), ("k0", "k2", 1), ("k1", "k0", 3), ("k5", "k5", 1)]
    result = write_relations(spark.createDataFrame(some, columns), Uses, session)
    assert (result.inserted, result.updated, result.unchanged) == (1, 2, 1)
    assert lookups == [3], "not those that have one key in common"
    # The guess was that there are few: once they are known to be many, all is compared.
    monkeypatch.setattr(increments, "_FEW_ROWS", 3)
    monkeypatch.setattr(increments, "is_increment", lambda *_, **__: True)
    monkeypatch.setattr("storage_engine.spark.writer.is_increment", lambda *_, **__: True)
    many = [("k0", "k1", 5), ("k0", "k2", 1), ("k1", "k0", 3), ("k5", "k4", 7)]
    whole = write_relations(spark.createDataFrame(many, columns), Uses, session)
    assert (whole.updated, whole.unchanged, lookups[-1]) == (2, 2, -1)
    assert whole.stored_bytes_read == whole.stored_bytes
    monkeypatch.setattr(increments, "_FEW_ROWS", 100)
    with monkeypatch.context() as planted:
        planted.setattr(increments, "_FOUND_BYTES", 0)
        planted.setattr(increments.KeyLookup, "_search", _in_this_process)
        crowd = write_relations(spark.createDataFrame(some[1:], columns), Uses, session)
    assert (crowd.unchanged, lookups[-1]) == (3, -1), "too much was found to be brought"
    monkeypatch.setattr(reconcile, "brought", lambda _: None)
    too_much = write_relations(spark.createDataFrame(some[:1], columns), Uses, session)
    assert (too_much.updated, len(lookups)) == (1, 3)


def test_which_sources_are_small(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(frame: Any, rows: int = 10_000, size: int = 100) -> bool:
        return increments.is_increment(frame, stored_rows=rows, stored_bytes=size)

    rows = spark.createDataFrame([(1,)], "n int")  # Catalyst does not know how many these are
    monkeypatch.setattr(increments, "_PART", 10)
    monkeypatch.setattr(increments, "LARGE_BYTES", 100)
    assert small(rows)
    assert not small(rows, size=99)
    assert not small(rows, rows=9), "of a type that is hardly larger"
    assert small(spark.range(1_000)), "little by Catalyst's estimate"
    many = spark.range(10_000_000)
    assert not small(many)
    assert small(many.where("id = 7")), "a condition on a large source, of which little is left"
    assert not small(many.where("id < 2000"))
    grouped = many.where("id = 7").selectExpr("id % 5 AS n").groupBy("n").count()
    assert not small(grouped), "counting would shuffle it once more"


def test_what_was_read_is_told() -> None:
    read = WriteResult("Part", 2, 2, rows=1, updated=1, stored_bytes=4 << 20, stored_bytes_read=9)
    assert summary(read).endswith("; compared by 9 B of the 4.0 MiB stored")
    assert "compared" not in summary(replace(read, stored_bytes_read=4 << 20))
    assert {"stored_bytes", "stored_bytes_read"} <= run_figures(read, spark_s=1, cut=False).keys()
    assert read.as_dict()["stored_bytes_read"] == 9
