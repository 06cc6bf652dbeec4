"""One type with every kind of field, its rows in every storage shape, and random filters on it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from functools import cache
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from uuid import UUID

import duckdb
import pyarrow as pa
from hypothesis import strategies as st

from storage_engine.model import Entity, Field, Relation, row_schema
from storage_engine.model.arrow import fields_json, objects_to_table
from storage_engine.model.columns import sqlite_type
from storage_engine.model.decimals import Precision
from storage_engine.model.declarations import spec_of
from storage_engine.model.expressions import Filter
from storage_engine.query.compiler import DialectName
from storage_engine.query.conditions import Conditions, Shape
from storage_engine.query.dialects import Binder, DuckDb, Sqlite, install, quoted
from storage_engine.repository.sqlite.data_table import encode, rows_of
from storage_engine.testing.evaluator import matches


class Colour(Enum):
    RED = "red"
    GREEN = "green"
    NONE = ""


class Size(StrEnum):
    S = "s"
    L = "l"


class Level(IntEnum):
    LOW = -1
    HIGH = 10


class Node(TypedDict):
    price: NotRequired[Annotated[Decimal, Precision(30, 4)] | None]
    clock: NotRequired[time]
    colour: NotRequired[Colour]
    ref: NotRequired[UUID]
    n: NotRequired[int | None]
    at: NotRequired[datetime]
    raw: NotRequired[bytes]
    next: NotRequired[Node]


class Thing(Entity):
    id: Field[str] = Field(primary_key=True)
    text: Field[str | None] = Field(default=None)
    named: Field[str] = Field(default="d")
    whole: Field[int | None] = Field(default=None)
    real: Field[float | None] = Field(default=None)
    flag: Field[bool | None] = Field(default=None)
    moment: Field[datetime | None] = Field(default=None)
    day: Field[date | None] = Field(default=None)
    raw: Field[bytes | None] = Field(default=None)
    mixed: Field[int | str | None] = Field(default=None)
    number: Field[int | float | None] = Field(default=None)
    open: Field[Any] = Field(default=None)
    profile: Field[dict[str, Any] | None] = Field(default=None)
    node: Field[Node | None] = Field(default=None)
    tags: Field[list[str] | None] = Field(default=None)
    days: Field[list[date]] = Field(default_factory=list)
    events: Field[list[dict[str, Any]] | None] = Field(default=None)
    things: Field[list[Any]] = Field(default_factory=list)
    either: Field[str | list[str] | None] = Field(default=None)
    money: Field[Decimal | None] = Field(default=None, precision=7, scale=2)
    huge: Field[Decimal | None] = Field(default=None, precision=38, scale=9)
    cost: Field[Decimal] = Field(default=Decimal("1.5"), precision=18, scale=4)
    clock: Field[time | None] = Field(default=None)
    colour: Field[Colour | None] = Field(default=None)
    size: Field[Size] = Field(default=Size.S)
    level: Field[Level | None] = Field(default=None)
    mode: Field[Literal["r", "w", None]] = Field(default=None)
    ref: Field[UUID | None] = Field(default=None)
    prices: Field[list[Decimal]] = Field(default_factory=list, precision=12, scale=3)
    colours: Field[list[Colour]] = Field(default_factory=list)
    refs: Field[list[UUID]] = Field(default_factory=list)
    coloured: Field[Colour | list[Size] | int | None] = Field(default=None)


class Link(Relation[Thing, Thing]):
    weight: Field[int | None] = Field(default=None)


THING = spec_of(Thing)
LINK = spec_of(Link)

# --- values -----------------------------------------------------------------------------------

NASTY = [
    "", "a", "b", "ab", "A", "a%b", "_", "a_b", "é", "z", "\U0001f600", "\uffff", "a\x00b", "\x00",
    "'; DROP TABLE t; --", '"', "\\", "\\u0000", "$.a", "true", "5", "null", "\n",
]  # fmt: skip
TEXTS = st.sampled_from(NASTY) | st.text(max_size=3)
INTS = st.sampled_from([0, 1, -1, 5, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)]) | (
    st.integers(-3, 3)
)
FLOATS = st.sampled_from(
    [0.0, -0.0, 0.5, 1.0, -1.0, 5.0, 0.1, 2.0**53, 2.0**63, -(2.0**63), 1e300]
) | (st.floats(allow_nan=False, allow_infinity=False))
NUMBERS = INTS | FLOATS
MOMENTS = st.sampled_from(
    [
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(2020, 2, 29, 12, tzinfo=UTC),
        datetime(2020, 2, 29, 12, 0, 0, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    ]
)
DAYS = st.sampled_from([date(1, 1, 1), date(1970, 1, 1), date(2020, 2, 29), date(9999, 12, 31)])
RAWS = st.sampled_from([b"", b"\x00", b"a", b"a\x00", b"\xff", b"\xfb\xef", b"~~~"])
MONEY = st.sampled_from(
    ["0", "0.01", "-0.01", "99999.99", "-99999.99", "1.5", "1.50", "10", "100", "-2"]
).map(Decimal)
HUGE = st.sampled_from(
    [
        "0", "0.000000001", "-0.000000001", "9" * 29 + "." + "9" * 9, "-" + "9" * 29, "1.5", "-1",
        "12345678901234567890.123456789", "2",
    ]
).map(Decimal)  # fmt: skip
DECIMALS = (
    MONEY
    | HUGE
    | st.sampled_from(["0.005", "99999.995", "1e40", "-1e40", "1e-30"]).map(Decimal)
    | st.integers(-3, 3)
)
CLOCKS = st.sampled_from(
    [time(0), time(12), time(12, 0, 0, 1), time(23, 59, 59, 999999), time(9, 5)]
)
COLOURS = st.sampled_from(list(Colour))
SIZES = st.sampled_from([*Size, "s", "l"])
LEVELS = st.sampled_from([*Level, -1, 10])
REFS = st.sampled_from(
    [UUID(int=0), UUID(int=2**128 - 1), UUID("c9bf9e57-1685-4c89-bafb-ff5af830be8a")]
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
KEYS = st.sampled_from(["a", "b", "k", "two words", "a.b", "0", "é", "#", "$"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=4,
)
NODES: st.SearchStrategy[Any] = st.deferred(
    lambda: st.fixed_dictionaries(
        {},
        optional={
            "n": st.none() | INTS,
            "at": MOMENTS,
            "raw": RAWS,
            "next": NODES,
            "price": st.none() | MONEY,
            "clock": CLOCKS,
            "colour": COLOURS,
            "ref": REFS,
        },
    )
)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "text": maybe(TEXTS),
    "named": TEXTS,
    "whole": maybe(INTS),
    "real": maybe(FLOATS),
    "flag": maybe(st.booleans()),
    "moment": maybe(MOMENTS),
    "day": maybe(DAYS),
    "raw": maybe(RAWS),
    "mixed": maybe(INTS | TEXTS),
    "number": maybe(NUMBERS),
    "open": VALUES,
    "profile": maybe(st.dictionaries(KEYS, VALUES, max_size=3)),
    "node": maybe(NODES),
    "tags": maybe(st.lists(TEXTS, max_size=3)),
    "days": st.lists(DAYS, max_size=2),
    "events": maybe(st.lists(st.dictionaries(KEYS, VALUES, max_size=2), max_size=3)),
    "things": st.lists(VALUES, max_size=3),
    "either": maybe(TEXTS | st.lists(TEXTS, max_size=2)),
    "money": maybe(MONEY),
    "huge": maybe(HUGE),
    "cost": MONEY,
    "clock": maybe(CLOCKS),
    "colour": maybe(COLOURS),
    "size": SIZES,
    "level": maybe(LEVELS),
    "mode": st.sampled_from(["r", "w", None]),
    "ref": maybe(REFS),
    "prices": st.lists(MONEY, max_size=2),
    "colours": st.lists(COLOURS, max_size=2),
    "refs": st.lists(REFS, max_size=2),
    "coloured": maybe(COLOURS | st.lists(SIZES, max_size=2) | st.integers(0, 2)),
}


@st.composite
def objects(draw: st.DrawFn, max_size: int = 8) -> list[Thing]:
    count = draw(st.integers(0, max_size))
    made = []
    for number in range(count):
        # Few fields a row: the rest is NULL, which is what most often goes wrong.
        names = draw(st.sets(st.sampled_from(sorted(FIELDS)), max_size=6))
        values = {name: draw(FIELDS[name]) for name in sorted(names)}
        made.append(Thing(id=f"{number}{draw(st.sampled_from(NASTY))}", **values))
    return made


# --- filters ----------------------------------------------------------------------------------

_TYPED: dict[str, tuple[Any, Any]] = {
    "id": (lambda: Thing.id, TEXTS),
    "text": (lambda: Thing.text, TEXTS),
    "named": (lambda: Thing.named, TEXTS),
    "whole": (lambda: Thing.whole, NUMBERS),
    "real": (lambda: Thing.real, NUMBERS),
    "moment": (lambda: Thing.moment, MOMENTS),
    "day": (lambda: Thing.day, DAYS),
    "raw": (lambda: Thing.raw, RAWS),
    "mixed": (lambda: Thing.mixed, NUMBERS | TEXTS),
    "number": (lambda: Thing.number, NUMBERS),
    "open": (lambda: Thing.open, NUMBERS | TEXTS),
    "open.a": (lambda: Thing.open["a"], NUMBERS | TEXTS),
    "profile.a.b": (lambda: Thing.profile.path("a.b"), NUMBERS | TEXTS),
    "profile.k": (lambda: Thing.profile["k"], NUMBERS | TEXTS),
    "profile.odd": (lambda: Thing.profile["two words"], NUMBERS | TEXTS),
    "profile.dot": (lambda: Thing.profile["a.b"], NUMBERS | TEXTS),
    "profile.k:str": (lambda: Thing.profile.path("k", str), TEXTS),
    "profile.k:int": (lambda: Thing.profile.path("k", int), NUMBERS),
    "profile.k:float": (lambda: Thing.profile.path("k", float), NUMBERS),
    "node.n": (lambda: Thing.node["n"], NUMBERS),
    "node.at": (lambda: Thing.node["at"], MOMENTS),
    "node.raw": (lambda: Thing.node["raw"], RAWS),
    "node.next.n": (lambda: Thing.node.path("next.n"), NUMBERS),
    "node.next.at": (lambda: Thing.node["next"]["at"], MOMENTS),
    "events.k": (lambda: Thing.events.any_path("k"), NUMBERS | TEXTS),
    "events.a.b": (lambda: Thing.events.any_path("a.b"), NUMBERS | TEXTS),
    "things.a": (lambda: Thing.things.any_path("a"), NUMBERS | TEXTS),
    "profile.k.any": (lambda: Thing.profile["k"].any_path("a"), NUMBERS | TEXTS),
    "either": (lambda: Thing.either, TEXTS),
    "money": (lambda: Thing.money, DECIMALS),
    "huge": (lambda: Thing.huge, DECIMALS),
    "cost": (lambda: Thing.cost, DECIMALS),
    "clock": (lambda: Thing.clock, CLOCKS),
    "colour": (lambda: Thing.colour, COLOURS | st.sampled_from(["red", ""])),
    "size": (lambda: Thing.size, SIZES),
    "level": (lambda: Thing.level, LEVELS),
    "mode": (lambda: Thing.mode, st.sampled_from(["r", "w"])),
    "ref": (lambda: Thing.ref, REFS | REFS.map(str)),
    "coloured": (lambda: Thing.coloured, COLOURS | st.integers(0, 2)),
    "node.price": (lambda: Thing.node["price"], DECIMALS),
    "node.clock": (lambda: Thing.node["clock"], CLOCKS),
    "node.next.colour": (lambda: Thing.node["next"]["colour"], COLOURS),
    "node.ref": (lambda: Thing.node["ref"], REFS),
}
_TEXTS = [
    "id", "text", "named", "mixed", "open", "open.a", "profile.k", "profile.k:str", "events.k",
    "either", "colour", "size",
]  # fmt: skip
_CONTAINS: list[tuple[Any, Any]] = [
    (lambda: Thing.text, TEXTS),
    (lambda: Thing.open, NUMBERS | TEXTS | st.booleans()),
    (lambda: Thing.tags, TEXTS),
    (lambda: Thing.days, DAYS),
    (lambda: Thing.prices, DECIMALS),
    (lambda: Thing.colours, COLOURS),
    (lambda: Thing.refs, REFS | REFS.map(str)),
    (lambda: Thing.colour, TEXTS),
    (lambda: Thing.things, NUMBERS | TEXTS | st.booleans()),
    (lambda: Thing.either, TEXTS),
    (lambda: Thing.profile["a"], NUMBERS | TEXTS),
    (lambda: Thing.events.any_path("k"), NUMBERS | TEXTS | st.booleans()),
]
_BOOLS: list[Any] = [
    lambda: Thing.flag,
    lambda: Thing.open,
    lambda: Thing.profile["k"],
    lambda: Thing.profile.path("k", bool),
    lambda: Thing.events.any_path("k"),
]


@st.composite
def leaves(draw: st.DrawFn) -> Filter:
    match draw(st.sampled_from(["compare", "compare", "in", "text", "contains", "bool", "null"])):
        case "compare":
            make, values = _TYPED[draw(st.sampled_from(sorted(_TYPED)))]
            ref, value = make(), draw(values)
            match draw(st.sampled_from(["==", "!=", "<", "<=", ">", ">="])):
                case "==":
                    return ref == value
                case "!=":
                    return ref != value
                case "<":
                    return ref < value
                case "<=":
                    return ref <= value
                case ">":
                    return ref > value
                case _:
                    return ref >= value
        case "in":
            make, values = _TYPED[draw(st.sampled_from(sorted(_TYPED)))]
            return make().in_(draw(st.lists(values, max_size=3)))
        case "text":
            ref = _TYPED[draw(st.sampled_from(_TEXTS))][0]()
            part = draw(TEXTS)
            return ref.startswith(part) if draw(st.booleans()) else ref.endswith(part)
        case "contains":
            make, values = draw(st.sampled_from(_CONTAINS))
            return make().contains(draw(values))
        case "bool":
            ref = draw(st.sampled_from(_BOOLS))()
            return ref.is_true() if draw(st.booleans()) else ref.is_false()
        case _:
            more = [lambda: Thing.flag, lambda: Thing.tags, lambda: Thing.profile]
            makes = [make for make, _ in _TYPED.values()] + more
            ref = draw(st.sampled_from(makes))()
            return ref.is_null() if draw(st.booleans()) else ref.is_not_null()


FILTERS = st.recursive(
    leaves(),
    lambda inner: (
        st.builds(lambda a, b: a & b, inner, inner)
        | st.builds(lambda a, b: a | b, inner, inner)
        | st.builds(lambda a: ~a, inner)
    ),
    max_leaves=4,
)

# --- the same rows everywhere -----------------------------------------------------------------


@cache
def _database() -> duckdb.DuckDBPyConnection:
    made = duckdb.connect(config={"threads": 1})
    made.execute("SET GLOBAL TimeZone = 'UTC'")  # cursors take global settings only
    return made


def duck() -> duckdb.DuckDBPyConnection:
    """A connection of its own to one database: opening one for each example takes long."""
    return _database().cursor()


class World:
    """Some objects of one type as DuckDB columns, SQLite columns and SQLite payloads."""

    def __init__(self, things: Sequence[Any], spec: Any = THING) -> None:
        self.spec = spec
        self.objects = list(things)
        table = objects_to_table(spec, self.objects)
        self.duck = duck()
        payload = fields_json(spec, table)
        self.duck.register("rows_columns", table)
        ids = [table.column(name) for name in spec.identity]
        self.duck.register(
            "rows_payload",
            pa.Table.from_arrays([*ids, payload], names=[*spec.identity, "fields_json"]),
        )
        self.lite = sqlite3.connect(":memory:")
        install(self.lite)
        names = list(row_schema(spec).names)
        storages = {f.name: sqlite_type(f.storage) for f in spec.fields}
        columns = ", ".join(f"{quoted(n)} {storages.get(n, 'TEXT')}" for n in names)
        self.lite.execute(f"CREATE TABLE rows_columns ({columns})")
        marks = ", ".join("?" * len(names))
        self.lite.executemany(
            f"INSERT INTO rows_columns VALUES ({marks})", rows_of(encode(spec, table, names))
        )
        keys = ", ".join(spec.identity)
        self.lite.execute(f"CREATE TABLE rows_payload ({keys}, fields_json TEXT)")
        self.lite.executemany(
            f"INSERT INTO rows_payload VALUES ({', '.join('?' * (len(spec.identity) + 1))})",
            zip(*(c.to_pylist() for c in ids), payload.to_pylist(), strict=True),
        )

    def close(self) -> None:
        self.duck.close()
        self.lite.close()

    def run(self, engine: str, shape: Shape, sql: str, values: Mapping[str, Any]) -> list[Any]:
        if engine == "duckdb":
            return self.duck.execute(sql, dict(values)).fetchall()
        return self.lite.execute(sql, dict(values)).fetchall()

    def where(self, engine: str, shape: Shape, expression: Filter) -> list[str]:
        binder = Binder()
        dialect = DuckDb(binder) if engine == "duckdb" else Sqlite(binder)
        condition = Conditions(dialect, shape).condition(expression)
        sql = f'SELECT "entity_key" FROM rows_{shape} AS q WHERE {condition}'
        return sorted(row[0] for row in self.run(engine, shape, sql, binder.used(sql)))

    def expected(self, expression: Filter) -> list[str]:
        return sorted(o.id for o in self.objects if matches(expression, o))


ENGINES: list[tuple[DialectName, Shape]] = [
    ("duckdb", "columns"),
    ("duckdb", "payload"),
    ("sqlite", "columns"),
    ("sqlite", "payload"),
]
