"""Rows of one version made into rows of another: additively, by upgraders, or not at all."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from storage_engine.errors import MigrationError
from storage_engine.model import Entity, Field, Relation, TypeSpec, spec_of
from storage_engine.model.arrow import objects_to_table, row_schema, table_to_rows
from storage_engine.schema.diff import evolved
from storage_engine.schema.rewrite import rewrite
from storage_engine.schema.upgraders import Upgrader


class Old(Entity, name="Customer"):
    id: Field[str] = Field(primary_key=True)
    age: Field[int]
    nick: Field[str]
    tags: Field[list[int]] = Field(default_factory=list)
    seen: Field[datetime | None] = Field(default=None)


NOON = datetime(2026, 11, 17, 12, tzinfo=UTC)
OLD = spec_of(Old)


def old_rows(*ages: int) -> pa.Table:
    return objects_to_table(
        OLD, [Old(id=f"c{n}", age=a, nick=f"n{n}", tags=[n], seen=NOON) for n, a in enumerate(ages)]
    )


def step(function: Any, version: int = 1, *, batch: bool = False) -> Upgrader:
    return Upgrader("Customer", version, function, batch)


def made(target: TypeSpec, table: pa.Table, *steps: Upgrader) -> list[dict[str, Any]]:
    result = rewrite(OLD, evolved(OLD, target), steps)(table)
    assert result.schema.equals(row_schema(evolved(OLD, target)))
    return table_to_rows(evolved(OLD, target), result)


class Wider(Entity, name="Customer"):
    id: Field[str] = Field(primary_key=True)
    age: Field[float]
    name: Field[str | None] = Field(renamed_from="nick", default=None)
    tags: Field[list[float]] = Field(default_factory=list)
    seen: Field[datetime | int | None] = Field(default=None)
    tier: Field[Literal["Gold", "Standard"]] = Field(default="Standard")
    worth: Field[Decimal] = Field(default=Decimal("1.50"), precision=6, scale=2)
    extra: Field[dict[str, int]] = Field(default_factory=dict)


def test_additive_changes_need_no_upgrader() -> None:
    assert made(spec_of(Wider), old_rows(1, 2)) == [
        {
            "id": f"c{n}",
            "age": float(n + 1),
            "name": f"n{n}",
            "tags": [float(n)],
            "seen": NOON,
            "tier": "Standard",
            "worth": Decimal("1.50"),
            "extra": {},
        }
        for n in range(2)
    ]
    assert made(spec_of(Wider), old_rows()) == []


def test_each_row_gets_its_own_from_a_factory() -> None:
    numbers = iter(range(10))

    class Counted(Entity, name="Customer"):
        id: Field[str] = Field(primary_key=True)
        age: Field[int]
        nick: Field[str]
        tags: Field[list[int]] = Field(default_factory=list)
        seen: Field[datetime | None] = Field(default=None)
        number: Field[int] = Field(default_factory=lambda: next(numbers))

    assert [row["number"] for row in made(spec_of(Counted), old_rows(1, 2, 3))] == [0, 1, 2]


def test_an_int_that_no_float_can_hold_is_named() -> None:
    with pytest.raises(MigrationError, match=r"Customer 'c1': field 'age' .*nothing was publ") as e:
        made(spec_of(Wider), old_rows(1, 2**53 + 1))
    assert e.value.identity == "c1"
    assert e.value.old is not None
    assert e.value.old["age"] == 2**53 + 1


def test_an_int_that_no_float_can_hold_is_named_inside_a_value_too() -> None:
    table = objects_to_table(
        OLD, [Old(id=f"c{n}", age=1, nick="n", tags=[5, t]) for n, t in enumerate((7, 2**53 + 1))]
    )
    expected = r"Customer 'c1': field 'tags' .*a float cannot hold exactly.*nothing was publ"
    with pytest.raises(MigrationError, match=expected) as e:
        made(spec_of(Wider), table)
    assert e.value.old is not None
    assert e.value.old["tags"] == [5, 2**53 + 1]
    tags = [row["tags"] for row in made(spec_of(Wider), table.slice(0, 1))]
    assert tags == [[5.0, 7.0]]


class Split(Entity, name="Customer"):
    id: Field[str] = Field(primary_key=True)
    years: Field[int]
    label: Field[str]


SPLIT = spec_of(Split)


def by_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "years": row["age"], "label": f"{row['nick']}/{len(row['tags'])}"}


def by_table(table: pa.Table) -> pa.Table:
    label = pc.binary_join_element_wise(table["nick"], "1", "/")
    return pa.table({"id": table["id"], "years": table["age"], "label": label})


@pytest.mark.parametrize(
    "steps",
    [
        [step(by_row)],
        [step(by_table, batch=True)],
        [step(by_row), step(lambda row: row, 2)],
        [step(by_row), step(lambda table: table, 2, batch=True)],
        [step(by_table, batch=True), step(lambda row: row, 2)],
        [step(lambda table: table, batch=True), step(by_row, 2)],
    ],
)
def test_upgraders_of_rows_and_tables_in_chains(steps: list[Upgrader]) -> None:
    expected = [
        {"id": "c0", "years": 5, "label": "n0/1"},
        {"id": "c1", "years": 6, "label": "n1/1"},
    ]
    assert made(SPLIT, old_rows(5, 6), *steps) == expected


def fails_at(age: int, *, batch: bool) -> Upgrader:
    def row(given: dict[str, Any]) -> dict[str, Any]:
        if given["age"] == age:
            raise ValueError("too old")
        return by_row(given)

    def table(given: pa.Table) -> pa.Table:
        if pc.any(pc.equal(given["age"], age)).as_py():
            raise ValueError("too old")
        return by_table(given)

    return step(table if batch else row, batch=batch)


WRONG = [
    (fails_at(7, batch=False), "c7", r"failed with ValueError: too old"),
    (fails_at(7, batch=True), "c7", r"failed with ValueError: too old"),
    (step(lambda r: {**by_row(r), "years": "many"}), "c0", "does not fit.*years"),
    (step(lambda r: {"id": r["id"]}), "c0", "years: is required"),
    (step(lambda r: {**by_row(r), "age": 1}), "c0", "unknown field 'age'"),
    (step(lambda _: None), "c0", "rows cannot be left out"),
    (step(lambda r: {**by_row(r), "id": "x"}), "c0", "keys cannot change"),
    (step(lambda t: t, batch=True), "c0", "does not fit"),
    (
        step(
            lambda t: by_table(t).set_column(
                1, "years", pa.array([None if a == 3 else a for a in t["age"].to_pylist()])
            ),
            batch=True,
        ),
        "c3",
        "column 'years' is null",
    ),
]


@pytest.mark.parametrize(("upgrader", "identity", "message"), WRONG)
def test_what_is_wrong_names_type_identity_and_the_old_row(
    upgrader: Upgrader, identity: str, message: str
) -> None:
    with pytest.raises(MigrationError, match=message) as error:
        made(SPLIT, old_rows(*range(10)), upgrader)
    assert (error.value.type, error.value.identity) == ("Customer", identity)
    assert error.value.old is not None
    assert error.value.old["id"] == identity
    assert "nothing was published" in str(error.value)


def test_a_table_upgrader_keeps_the_rows() -> None:
    with pytest.raises(MigrationError, match=r"made 1 row of 2; nothing was published"):
        made(SPLIT, old_rows(1, 2), step(lambda t: by_table(t).slice(0, 1), batch=True))
    with pytest.raises(MigrationError, match="gave list instead of an Arrow table"):
        made(SPLIT, old_rows(1, 2), step(lambda t: t.to_pylist(), batch=True))


class Person(Entity):
    id: Field[str] = Field(primary_key=True)


class Knows(Relation[Person, Person]):
    since: Field[str] = Field(instance_key=True)
    strength: Field[int]


class Knows2(Relation[Person, Person], name="Knows"):
    begun: Field[str] = Field(instance_key=True)
    strength: Field[float]
    note: Field[str | None] = Field(default=None)


def test_relations() -> None:
    table = objects_to_table(
        spec_of(Knows), [Knows(left_key="a", right_key="b", since="2020", strength=3)]
    )
    target = evolved(spec_of(Knows), spec_of(Knows2))
    row = {"left_key": "a", "right_key": "b", "begun": "2020", "strength": 3.0, "note": None}
    assert table_to_rows(target, rewrite(spec_of(Knows), target, ())(table)) == [row]

    def upgrade(given: dict[str, Any]) -> dict[str, Any]:
        assert given == {"left_key": "a", "right_key": "b", "since": "2020", "strength": 3}
        return {**{k: given[k] for k in ("left_key", "right_key")}, "begun": "2020", "strength": 1}

    upgraded = rewrite(spec_of(Knows), target, [Upgrader("Knows", 1, upgrade)])(table)
    assert table_to_rows(target, upgraded) == [{**row, "strength": 1.0}]

    with pytest.raises(MigrationError) as error:
        rewrite(spec_of(Knows), target, [Upgrader("Knows", 1, lambda r: r)])(table)
    assert error.value.identity == ("a", "b", "2020")


class Noted(Entity, name="Customer"):
    id: Field[str] = Field(primary_key=True)
    note: Field[str | None] = Field(default=None)
    marks: Field[dict[str, int | None]] = Field(default_factory=dict)


def test_a_batch_upgrader_gets_all_that_one_of_rows_made() -> None:
    """Also what the first row has not, and values of lists and dicts as they are."""

    def some(row: dict[str, Any]) -> dict[str, Any]:
        number = row["age"]
        noted = {"note": f"note {number}"} if number > 1 else {}
        return {"id": row["id"], "marks": {f"m{number}": number}, **noted}

    rows = made(spec_of(Noted), old_rows(1, 2, 3), step(some), step(lambda t: t, 2, batch=True))
    assert [(row["note"], row["marks"]) for row in rows] == [
        (None, {"m1": 1}),
        ("note 2", {"m2": 2}),
        ("note 3", {"m3": 3}),
    ]


def test_rows_that_make_no_column_are_an_error_of_the_migration() -> None:
    def mixed(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "note": row["age"] if row["age"] > 1 else "one"}

    with pytest.raises(MigrationError, match=r"Customer: .*'note'.*nothing was published"):
        made(spec_of(Noted), old_rows(1, 2), step(mixed), step(lambda t: t, 2, batch=True))
