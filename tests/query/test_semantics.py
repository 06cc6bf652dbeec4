"""The tables of docs/queries.md, row by row, on every engine."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine.model import Entity, Field
from storage_engine.model.arrow import objects_to_table
from storage_engine.model.declarations import spec_of
from storage_engine.model.expressions import Filter
from storage_engine.query.aggregates import max
from storage_engine.query.compiler import Compiler
from storage_engine.query.conditions import Conditions, after_prefix, float_bound, int_bound
from storage_engine.query.dialects import Binder, DuckDb, Sqlite, install
from storage_engine.query.spec import Order, QuerySpec, When
from storage_engine.testing.evaluator import evaluate
from tests.query.worlds import ENGINES, THING, Thing, World, duck

ROWS = [
    Thing(id="none"),
    Thing(id="int", mixed=5, open=5, whole=5, number=5, profile={"k": 5}),
    Thing(id="float", number=5.0, open=5.0, profile={"k": 5.0}),
    Thing(id="text", mixed="5", open="5", text="5", profile={"k": "5"}),
    Thing(id="true", open=True, flag=True, profile={"k": True}),
    Thing(id="false", open=False, flag=False, profile={"k": False}),
    Thing(id="null", profile={"k": None}),
    Thing(id="empty", profile={}, tags=[], events=[], open=[]),
    Thing(id="list", open=[5], profile={"k": [5]}, tags=["5"], events=[{"k": 5}, {"k": "x"}]),
    Thing(id="dict", open={"k": 5}, profile={"k": {"k": 5}}, events=[{}], things=[7]),
]


@pytest.fixture(scope="module", name="world")
def a_world() -> Iterator[World]:
    made = World(ROWS)
    yield made
    made.close()


WHOLE: Any = Thing.whole  # type checkers want an int, the language takes any number

CASES: list[tuple[Filter, str, str]] = [
    # filter, rows where it is true, rows where it is false; elsewhere it is unknown
    (Thing.whole == 5, "int", ""),
    (Thing.whole != 5, "", "int"),
    (WHOLE == 5.0, "int", ""),
    (WHOLE > 4.5, "int", ""),
    (WHOLE < 1e300, "int", ""),
    (WHOLE == 5.5, "", "int"),
    (Thing.number == 5, "int float", ""),
    (Thing.mixed == 5, "int", "text"),
    (Thing.mixed != 5, "text", "int"),
    (Thing.mixed > 4, "int", ""),
    (Thing.mixed >= "5", "text", ""),
    (Thing.mixed.in_([5, "5"]), "int text", ""),
    (Thing.mixed.in_([]), "", "none int float text true false null empty list dict"),
    (Thing.mixed.startswith("5"), "text", ""),
    (Thing.open == 5, "int float", "text true false empty list dict"),
    (Thing.open != 5, "text true false empty list dict", "int float"),
    (Thing.open <= 5, "int float", ""),
    (Thing.open.is_true(), "true", "none int float text false null empty list dict"),
    (Thing.open.is_false(), "false", "none int float text true null empty list dict"),
    (Thing.open.is_null(), "none null", "int float text true false empty list dict"),
    (Thing.open.contains(5), "list", "empty"),
    (Thing.open.contains("5"), "text", "empty list"),
    (Thing.open["k"] == 5, "dict", ""),
    (Thing.profile["k"].is_null(), "none null empty", "int float text true false list dict"),
    (Thing.profile["k"]["k"].is_not_null(), "dict",
     "none int float text true false null empty list"),
    (Thing.profile.path("k", int) == 5, "int", ""),
    (Thing.profile.path("k", int) != 6, "int", ""),
    (Thing.profile.path("k", float) == 5, "int float", ""),
    (Thing.profile.path("k", str).is_null(), "none int float true false null empty list dict",
     "text"),
    (Thing.tags.contains("5"), "list", "empty"),
    (Thing.events.any_path("k") == 5, "list",
     "none int float text true false null empty dict"),
    (~(Thing.events.any_path("k") == 5), "none int float text true false null empty dict",
     "list"),
    (Thing.events.any_path("k") != 5, "list",
     "none int float text true false null empty dict"),
    (Thing.events.any_path("k").is_null(), "dict",
     "none int float text true false null empty list"),
    (Thing.things.any_path("k").is_null(), "dict",
     "none int float text true false null empty list"),
    (Thing.flag.is_true() & (Thing.whole == 5), "",
     "none int float text false null empty list dict"),
    (Thing.flag.is_true() | (Thing.whole == 5), "true int", ""),
    (~(Thing.whole == 5), "", "int"),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "true", "false"), CASES, ids=[repr(c[0]) for c in CASES])
def test_truth(world: World, expression: Filter, true: str, false: str) -> None:
    expected: dict[str, Any] = {row.id: None for row in ROWS}
    expected |= {**dict.fromkeys(true.split(), True), **dict.fromkeys(false.split(), False)}
    assert {row.id: evaluate(expression, row) for row in ROWS} == expected
    for engine, shape in ENGINES:
        binder = Binder()
        dialect = DuckDb(binder) if engine == "duckdb" else Sqlite(binder)
        condition = Conditions(dialect, shape).condition(expression)
        sql = f"SELECT entity_key, {condition} FROM rows_{shape} AS q"
        found = dict(world.run(engine, shape, sql, binder.used(sql)))
        truths = {key: None if value is None else bool(value) for key, value in found.items()}
        assert truths == expected, (engine, shape)


def test_rows_can_be_mappings() -> None:
    row = {"entity_key": "a", "whole": 3, "days": [date(2020, 1, 1)]}
    assert evaluate((Thing.id == "a") & (Thing.whole < 4), row) is True
    assert evaluate(Thing.id == "a", {"id": "a"}) is True
    assert evaluate(Thing.days.contains(date(2020, 1, 1)), row) is True
    assert evaluate(Thing.text == "x", row) is None


@pytest.mark.parametrize("op", ["==", "!=", "<", "<=", ">", ">="])
@pytest.mark.parametrize(
    "value", [0, 5, 5.0, 5.5, -5.5, 2.0**53, 2**53 + 1, -(2**53) - 1, 2.0**63, -(2.0**63), 1e300]
)
def test_bounds_restate_comparisons_exactly(op: Any, value: float) -> None:
    compare = {
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        "<": lambda a, b: a < b,
        "<=": lambda a, b: a <= b,
        ">": lambda a, b: a > b,
        ">=": lambda a, b: a >= b,
    }
    near = int(value) if abs(value) < 2**62 else 2**63 - 1
    for bound, numbers in (
        (int_bound(op, value), [near + n for n in (-2, -1, 0) if near + n < 2**63] + [-(2**63), 0]),
        (float_bound(op, value), [float(near), float(near - 1), 0.0, -1e308, float(near) + 4]),
    ):
        for number in numbers:
            same = bound if isinstance(bound, bool) else compare[bound[0]](number, bound[1])
            assert same is compare[op](number, value), (number, op, value, bound)


@pytest.mark.parametrize(
    ("prefix", "after"),
    [("", None), ("a", "b"), ("a\U0010ffff", "b"), ("\U0010ffff", None), ("\ud7ff", "\ue000")],
)
def test_the_end_of_a_prefix(prefix: str, after: str | None) -> None:
    assert after_prefix(prefix) == after


def test_a_payload_without_the_field_has_its_default() -> None:
    for engine in ("duckdb", "sqlite"):
        connection: Any
        if engine == "duckdb":
            connection = duck()
            table = pa.table(
                {"entity_key": ["a", "b"], "fields_json": ['{"id":"a"}', '{"named":"x"}']}
            )
            connection.register("rows", table)
        else:
            connection = sqlite3.connect(":memory:")
            install(connection)
            connection.execute("CREATE TABLE rows (entity_key, fields_json)")
            connection.execute("INSERT INTO rows VALUES ('a', '{\"id\":\"a\"}')")
            connection.execute("INSERT INTO rows VALUES ('b', '{\"named\":\"x\"}')")
        for made, expected in (
            (Thing.named == "d", [("a",)]),
            (Thing.named != "d", [("b",)]),
            (Thing.named.startswith("d"), [("a",)]),
            (Thing.text.is_null(), [("a",), ("b",)]),
            (Thing.days.is_not_null(), [("a",), ("b",)]),
        ):
            spec = QuerySpec(THING, made)
            compiled = Compiler(engine, "payload").select(spec, "rows", ["entity_key"])  # type: ignore[arg-type]
            found = connection.execute(compiled.sql, dict(compiled.parameters)).fetchall()
            assert found == expected, (engine, made)
        connection.close()


def test_conjuncts_say_what_they_reach_for() -> None:
    made = (Thing.id == "a") & (Thing.whole > 3) & ((Thing.open == 1) | (Thing.text == "x"))
    parts = Compiler("duckdb", "columns").conjuncts(made)
    assert [(part.reach, set(part.columns)) for part in parts] == [
        ("identity", {"entity_key"}),
        ("typed", {"whole"}),
        ("row", {"open", "text"}),
    ]
    assert [part.parameters for part in parts][:2] == [{"q0": "a"}, {"q1": 3}]
    reached = [part.reach for part in Compiler("sqlite", "payload").conjuncts(made)]
    assert reached == ["identity", "row", "row"]
    assert Compiler("duckdb", "columns").conjuncts(None) == ()


def test_history_is_ordered_by_commit_within_ties() -> None:
    spec = QuerySpec(THING, order=(Order(Thing.text.operand, True),), when=When(history=True))
    sql = Compiler("sqlite", "columns").select(spec, "rows", ["entity_key"]).sql
    assert sql.endswith('ORDER BY q."text" DESC NULLS LAST, q."commit_id", q."entity_key"')


def test_typed_filters_reach_the_parquet_scan(tmp_path: Any) -> None:
    path = tmp_path / "things.parquet"
    spread = [
        Thing(id=str(n), whole=n, text=chr(96 + n), day=date(2017 + n, 1, 1)) for n in range(9)
    ]
    pq.write_table(objects_to_table(THING, spread), path)
    connection = duck()
    connection.execute(f"CREATE VIEW rows AS SELECT * FROM read_parquet('{path}')")
    made: Filter = (WHOLE > 4.5) & Thing.text.startswith("a") & (Thing.day >= date(2020, 1, 1))
    compiled = Compiler("duckdb", "columns").select(QuerySpec(THING, made), "rows", ["entity_key"])
    plan = connection.execute(f"EXPLAIN {compiled.sql}", dict(compiled.parameters)).fetchall()[0][1]
    scan = plan[plan.index("READ_PARQUET") :]
    assert "FILTER " not in plan
    for condition in ("whole>4", "text>='a'", "text<'b'", "day>='2020-01-01'::DATE"):
        assert condition in scan.replace(" ", "").replace("\n", ""), plan
    connection.close()


class Shadows(Entity):
    """Fields named like everything that compiled SQL calls its own."""

    id: Field[str] = Field(primary_key=True)
    q: Field[str] = Field(default="q")
    t: Field[int] = Field(default=1)
    e0: Field[list[dict[str, Any]]] = Field(default_factory=list)
    v0: Field[int] = Field(default=1)
    c0: Field[dict[str, Any]] = Field(default_factory=dict)
    value: Field[list[str]] = Field(default_factory=list)
    select: Field[str] = Field(default="s")
    json: Field[str] = Field(default="j")


def test_fields_may_be_named_like_our_own_names() -> None:
    spec = spec_of(Shadows)
    rows = [
        Shadows(id="a", q="x", t=2, e0=[{"k": "x"}], v0=3, c0={"k": 1}, value=["x"]),
        Shadows(id="b"),
    ]
    world = World(rows, spec)
    made = (
        (Shadows.q == "x")
        & (Shadows.t > 1)
        & (Shadows.e0.any_path("k") == "x")
        & (Shadows.c0["k"] == 1)
        & Shadows.value.contains("x")
        & Shadows.select.startswith("s")
        & Shadows.json.contains("j")
    )
    groups = (("t", Shadows.t.operand), ("c0.k", Shadows.c0.path("k", int).operand))
    for engine, shape in ENGINES:
        assert world.where(engine, shape, made) == ["a"]
        asked = QuerySpec(spec, groups=groups, aggregates=(("v0", max(Shadows.v0)),))
        compiled = Compiler(engine, shape).aggregate(asked, f"rows_{shape}")
        found = world.run(engine, shape, compiled.sql, compiled.parameters)
        assert found == [(1, None, 1), (2, 1, 3)]
    world.close()


def test_texts_are_whole_whatever_characters_they_have() -> None:
    rows = [
        Thing(id="nul", mixed="a\x00b", profile={"k": "a\x00b"}, tags=["a\x00b"], text="a\x00b"),
        Thing(id="cut", mixed="a", profile={"k": "a"}, tags=["a"], text="a"),
        Thing(id="escaped", mixed="a\\u0000b", profile={"k": "\\u0000"}, tags=["\\"], text="\\"),
    ]
    world = World(rows)
    for made, expected in (
        (Thing.mixed == "a", ["cut"]),
        (Thing.mixed == "a\x00b", ["nul"]),
        (Thing.mixed > "a", ["escaped", "nul"]),
        (Thing.mixed.endswith("b"), ["escaped", "nul"]),
        (Thing.profile["k"] == "a", ["cut"]),
        (Thing.profile["k"].contains("\x00"), ["nul"]),
        (Thing.profile["k"] == "\\u0000", ["escaped"]),
        (Thing.tags.contains("a"), ["cut"]),
        (Thing.tags.contains("a\x00b"), ["nul"]),
        (Thing.tags.contains("\\"), ["escaped"]),
        (Thing.text.contains("b"), ["nul"]),
        (Thing.text.startswith("a\x00"), ["nul"]),
    ):
        assert world.expected(made) == expected
        for engine, shape in ENGINES:
            assert world.where(engine, shape, made) == expected, (engine, shape, made)
    world.close()
