"""Expectations: what they say, which rows break them, and that nothing broken is published."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from storage_engine import Entity, Field, Relation, Session, ValidationError
from storage_engine.errors import ConfigurationError
from storage_engine.model.declarations import spec_of
from storage_engine.model.expectations import (
    Expectation,
    InRange,
    Matches,
    NotNull,
    RefersTo,
    Unique,
    parse_expectation,
    parse_expectations,
)
from storage_engine.repository import initialize_storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Person(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str | None] = Field(default=None)
    age: Field[int | None] = Field(default=None)
    born: Field[date | None] = Field(default=None)
    boss: Field[str | None] = Field(default=None)


class Knows(Relation[Person, Person]):
    since: Field[int]


ALL = {
    "not null": ({"not_null": "name"}, NotNull("name"), "name is not null"),
    "unique": ({"unique": "name"}, Unique(("name",)), "name is unique"),
    "unique pair": ({"unique": ["a", "b"]}, Unique(("a", "b")), "a + b is unique"),
    "range": (
        {"range": {"column": "age", "min": 1, "max": 9}},
        InRange("age", 1, 9),
        "age is between 1 and 9",
    ),
    "least": ({"range": {"column": "age", "min": 1}}, InRange("age", 1), "age is at least 1"),
    "most": (
        {"range": {"column": "born", "max": date(2024, 1, 31)}},
        InRange("born", max="2024-01-31"),
        "born is at most 2024-01-31",
    ),
    "pattern": (
        {"pattern": {"column": "name", "pattern": "[A-Z]+"}},
        Matches("name", "[A-Z]+"),
        "name matches [A-Z]+",
    ),
    "referential": (
        {"referential": {"column": "boss", "type": "Person"}},
        RefersTo("boss", "Person"),
        "boss refers to a stored Person",
    ),
}


@pytest.mark.parametrize("name", ALL)
def test_expectations_are_data(name: str) -> None:
    raw, expected, said = ALL[name]
    found = parse_expectation(raw)
    assert found == expected
    assert found.describe() == said
    assert parse_expectation(found.as_dict()) == found


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("not_null", "an expectation is one of not_null, unique, range, pattern, referential"),
        ({"not_null": "a", "unique": "a"}, "an expectation is one of"),
        ({"never": "a"}, "'never' is not known"),
        ({"not_null": 1}, "not_null takes a text, not 1"),
        ({"unique": []}, "unique takes a column or a list"),
        ({"unique": ["a", "a"]}, "unique names a column twice"),
        ({"range": {"column": "a"}}, "range needs min, max or both"),
        ({"range": {"column": "a", "min": 2, "max": 1}}, "no value is at least 2 and at most 1"),
        ({"range": {"column": "a", "min": 1, "max": "z"}}, "of different kinds"),
        ({"range": {"column": "a", "min": True}}, "a bound is a number"),
        ({"range": {"column": "a", "least": 1}}, "range takes column, max, min"),
        ({"pattern": {"column": "a", "pattern": "("}}, "is not a regular expression"),
        ({"referential": "a"}, "referential takes column, type"),
    ],
)
def test_wrong_expectations_say_why(raw: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_expectation(raw)
    assert said in str(caught.value)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    uri = str(tmp_path / "store")
    initialize_storage(uri, engine_version="v2")
    with Session(uri) as opened:
        opened.ensure(Person(id="stored"))
        opened.commit()
        yield opened


ROWS = [
    ("a", "ANN", 1, date(2024, 1, 1), "stored"),
    ("b", "BOB", 9, date(2024, 1, 31), "a"),
    ("c", "bob", 10, date(2024, 2, 1), "nobody"),
    ("d", "BOB", 0, None, None),
    ("e", None, None, None, "e"),
]
# Which rows break each, by id.
BROKEN: dict[Expectation, set[str]] = {
    NotNull("name"): {"e"},
    Unique(("name",)): {"b", "d"},
    Unique(("name", "age")): set(),
    InRange("age", 1, 9): {"c", "d"},
    InRange("age", min=1): {"d"},
    InRange("born", max="2024-01-31"): {"c"},
    InRange("name", min="B"): {"a"},
    Matches("name", "[A-Z]+"): {"c"},
    Matches("name", "A|B"): {"a", "b", "c", "d"},
    RefersTo("boss", "Person"): {"c"},
    RefersTo("boss", "Unwritten"): {"a", "b", "c", "e"},
}


@pytest.mark.spark
def test_each_row_learns_what_it_breaks(spark: SparkSession, session: Session) -> None:
    from storage_engine.spark.quality import evaluate

    schema = "id string, name string, age bigint, born date, boss string"
    frame = spark.createDataFrame(ROWS, schema)
    found = evaluate(frame, list(BROKEN), spec_of(Person), session)
    assert found.columns == [*frame.columns, "__reasons"]
    collected = {row["id"]: row["__reasons"] for row in found.collect()}
    for expectation, ids in BROKEN.items():
        said = expectation.describe()
        assert {id for id, reasons in collected.items() if said in reasons} == ids, said
    again = evaluate(found, [NotNull("name")], spec_of(Person), session).collect()
    for row in again:
        extra = ["name is not null"] if row["id"] == "e" else []
        assert row["__reasons"] == [*collected[row["id"]], *extra]

    wrong: list[Expectation] = [
        NotNull("nme"),
        InRange("age", "1"),
        Matches("age", "1"),
        InRange("name", 1),
    ]
    with pytest.raises(ValidationError) as caught:
        evaluate(frame, wrong, spec_of(Person), session)
    for said in ("no column nme", "age is bigint", "not a text", "name is string"):
        assert said in str(caught.value)


@pytest.mark.spark
def test_nothing_broken_is_published(spark: SparkSession, session: Session) -> None:
    from storage_engine.spark import write_entities, write_relations

    schema = "id string, name string, age bigint, born date, boss string"
    frame = spark.createDataFrame(ROWS, schema)
    expectations = parse_expectations(
        [{"not_null": "name"}, {"referential": {"column": "boss", "type": "Person"}}]
    )
    with pytest.raises(ValidationError) as caught:
        write_entities(frame, Person, session, expectations=expectations)
    assert "name is not null in 1 row" in str(caught.value)
    assert "boss refers to a stored Person in 1 row" in str(caught.value)
    assert session.repository.head_commit_id() == 1

    result = write_entities(
        frame, Person, session, expectations=expectations, on_bad_rows="quarantine"
    )
    assert (result.inserted, result.quarantined) == (3, 2)
    assert result.reasons == {"name is not null": 1, "boss refers to a stored Person": 1}

    edges = spark.createDataFrame(
        [("a", "b", 1), ("a", "x", 2)], "left_key string, right_key string, since bigint"
    )
    ends = [RefersTo("left_key", "Person"), RefersTo("right_key", "Person")]
    with pytest.raises(ValidationError, match="right_key refers to a stored Person in 1 row"):
        write_relations(edges, Knows, session, expectations=ends)
    good = edges.filter("since = 1")
    assert write_relations(good, Knows, session, expectations=ends).inserted == 1


@pytest.mark.spark
@pytest.mark.parametrize("ages", ["bigint", "double"])  # doubles are converted in Python
def test_a_reference_to_a_row_that_is_set_aside(
    spark: SparkSession, session: Session, ages: str
) -> None:
    """Nor to one that is set aside for such a reference; among good rows circles are fine."""
    from storage_engine.spark import write_entities

    good = [
        ("circle1", 1, "circle2"),
        ("circle2", 1, "circle1"),
        ("own", 1, "own"),
        ("under stored", 1, "stored"),
        ("twice", 2, None),  # of its two rows one is good
        ("under twice", 1, "twice"),
        ("circle3", 1, "circle4"),
        ("circle4", 1, "circle3"),  # its other row refers to a bad one
        ("root", 1, None),
    ]
    bad = [
        ("old", 999, None),
        ("stored", 999, None),  # of which another version is stored
        ("twice", 999, None),
        ("a", 1, "old"),
        ("b", 1, "a"),
        ("circle4", 1, "b"),
        (None, 1, "root"),
        ("nobody's", 1, "nobody"),
    ]
    chain = [(f"chain{n}", 1, f"chain{n + 1}") for n in range(300)] + [("chain300", 1, "b")]
    rows = [*good, *bad, *chain]
    frame = spark.createDataFrame(rows, "id string, age bigint, boss string").selectExpr(
        "id", f"cast(age AS {ages}) AS age", "boss"
    )
    refers = {"referential": {"column": "boss", "type": "Person"}}
    expectations = parse_expectations([{"range": {"column": "age", "max": 150}}, refers])
    options: Any = {"expectations": expectations, "on_bad_rows": "quarantine"}
    preview = write_entities(frame, Person, session, dry_run=True, **options)
    result = write_entities(frame, Person, session, **options)
    for counted in (preview, result):
        assert (counted.inserted, counted.quarantined) == (len(good), len(bad) + len(chain))
        assert counted.reasons["boss refers to a stored Person"] == len(chain) + 4
        assert counted.problem is None
    stored = session.repository.read(spec_of(Person)).column("id").to_pylist()
    assert sorted(stored) == sorted([*(key for key, _, _ in good), "stored"])
    again = write_entities(frame, Person, session, **options)
    assert (again.commit_id, again.unchanged, again.quarantined) == (
        None, len(good), result.quarantined,
    )  # fmt: skip

    # A row that does not fit its type is not there either.
    misfit = spark.createDataFrame(
        [("p", 1.5, None), ("q", 1.0, "p"), ("r", 1.0, "q"), ("s", 1.0, "root")],
        "id string, age double, boss string",
    )
    result = write_entities(misfit, Person, session, **options)
    assert (result.inserted, result.quarantined) == (1, 3)
