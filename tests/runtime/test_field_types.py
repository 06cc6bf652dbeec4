"""Decimals, enums, literals, UUIDs and times of day on every engine and through every door."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import time
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_engine import Entity, Field, Precision, Session, ValidationError, open_repository
from storage_engine.model import spec_of
from storage_engine.query import aggregates
from tests.cli.support import onto
from tests.runtime.support import ENGINES, make_storage, read

NIL, LAST = UUID(int=0), UUID(int=2**128 - 1)
SOME = UUID("c9bf9e57-1685-4c89-bafb-ff5af830be8a")
NINES = "9" * 29 + "." + "9" * 9


class Status(Enum):
    OPEN = "open"
    PAID = "paid"
    LATE = "late"


class Level(IntEnum):
    LOW = -1
    HIGH = 5


class Line(TypedDict):
    price: Annotated[Decimal, Precision(24, 6)]
    status: NotRequired[Status]


class DeclaredOrder(Entity, name="Order"):
    id: Field[str] = Field(primary_key=True)
    total: Field[Decimal] = Field(precision=12, scale=2, index=True)
    huge: Field[Decimal | None] = Field(default=None, precision=38, scale=9)
    whole: Field[Decimal | None] = Field(default=None, precision=38, scale=0)
    status: Field[Status] = Field(default=Status.OPEN)
    level: Field[Level | None] = Field(default=None)
    mode: Field[Literal["r", "w"]] = Field(default="r")
    at: Field[time | None] = Field(default=None)
    ref: Field[UUID | None] = Field(default=None, index=True)
    lines: Field[list[Line]] = Field(default_factory=list)


Order: Any = DeclaredOrder  # tests give it what type checkers object to

ORDERS = [
    Order(id="a", total="0", huge=NINES, whole=10**38 - 1, at=time(0), ref=NIL),
    Order(
        id="b",
        total="-9999999999.99",
        huge=f"-{NINES}",
        whole=-(10**38) + 1,
        status=Status.PAID,
        level=Level.LOW,
        mode="w",
        at=time(23, 59, 59, 999999),
        ref=LAST,
        lines=[{"price": Decimal("12.5"), "status": Status.LATE}],
    ),
    Order(id="c", total="9999999999.99", huge="0.000000001", level=5, at=time(9, 5), ref=SOME),
    Order(id="d", total="10.10", status="paid"),
    Order(id="e", total="9.9", status="late", whole=0),
]


@pytest.fixture(params=ENGINES)
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return make_storage(tmp_path, str(request.param))


@pytest.fixture
def shop(uri: str) -> Iterator[Session]:
    with Session(uri) as session:
        session.ensure(ORDERS)
        session.commit()
        yield session


def ids(query: Any) -> str:
    return "".join(order.id for order in query.collect())


def test_values_at_the_limits_come_back(shop: Session, uri: str) -> None:
    assert read(uri, Order) == ORDERS
    back = read(uri, Order)[1]
    assert (back.status, back.level) == (Status.PAID, Level.LOW)
    assert type(back.level) is Level
    assert back.lines[0]["status"] is Status.LATE
    assert str(back.total) == "-9999999999.99"
    shop.ensure([Order(**vars(order)) for order in ORDERS])
    shop.ensure(ORDERS[3].replace(total=Decimal("10.1000")))
    assert shop.commit() is None  # nothing differs
    shop.ensure(ORDERS[3].replace(total=Decimal("10.11")))
    assert shop.commit() is not None


def test_filters_order_and_groups(shop: Session) -> None:
    orders = shop.query().entities(Order)
    assert ids(orders.where(Order.total > Decimal("9.90"))) == "cd"
    assert ids(orders.where(Order.total >= Decimal("9.895"))) == "cde"
    assert ids(orders.where(Order.total == 0)) == "a"
    assert ids(orders.where(Order.total != Decimal("1e30"))) == "abcde"
    assert ids(orders.where(Order.huge < Decimal("1e-9"))) == "b"
    assert ids(orders.where(Order.status == Status.PAID)) == "bd"
    assert ids(orders.where(Order.status.in_([Status.OPEN, "late"]))) == "ace"
    assert ids(orders.where(Order.status.startswith("pa"))) == "bd"
    assert ids(orders.where(Order.level > Level.LOW)) == "c"
    assert ids(orders.where(Order.mode == "w")) == "b"
    assert ids(orders.where(Order.at < time(9, 5, 0, 1))) == "ac"
    assert ids(orders.where(Order.ref == SOME)) == "c"
    assert ids(orders.where(Order.ref.in_([str(NIL), LAST]))) == "ab"
    assert ids(orders.where(Order.lines.any_path("price") > Decimal("12.4999999"))) == "b"
    assert ids(orders.where(Order.lines.any_path("status") == Status.LATE)) == "b"
    assert ids(orders.order_by(Order.total)) == "baedc"
    assert ids(orders.order_by(Order.huge, desc=True)) == "acbde"
    assert ids(orders.order_by(Order.whole)) == "beacd"
    assert ids(orders.order_by(Order.at, desc=True)) == "bcade"
    assert ids(orders.order_by(Order.ref)) == "acbde"


def test_aggregates_are_exact(shop: Session) -> None:
    orders = shop.query().entities(Order)
    assert orders.sum(Order.total) == Decimal("20.00")
    assert orders.sum(Order.huge) == Decimal("0.000000001")
    assert orders.where(Order.id == "b").sum(Order.huge) == Decimal(f"-{NINES}")
    assert orders.avg(Order.total) == 4.0
    assert orders.where(Order.id == "nobody").sum(Order.total) is None
    assert (orders.min(Order.total), orders.max(Order.total)) == (
        Decimal("-9999999999.99"),
        Decimal("9999999999.99"),
    )
    assert (orders.min(Order.at), orders.max(Order.at)) == (time(0), time(23, 59, 59, 999999))
    assert orders.max(Order.status) is Status.PAID
    assert orders.min(Order.level) is Level.LOW
    assert (orders.min(Order.ref), orders.max(Order.ref)) == (NIL, LAST)
    groups = orders.group_by(Order.status).having(aggregates.sum(Order.total) > Decimal("9.9"))
    table = groups.agg(total=aggregates.sum(Order.total), last=aggregates.max(Order.at))
    assert table.to_pylist() == [] or table.column("status").to_pylist() == ["open"]
    assert table.schema.field("total").type == pa.decimal128(38, 2)
    by_time = orders.group_by(Order.at).agg(n=aggregates.count())
    assert by_time.column("at").to_pylist() == [
        time(0),
        time(9, 5),
        time(23, 59, 59, 999999),
        None,
    ]
    having = orders.group_by(Order.id).having(aggregates.min(Order.ref) == SOME)
    assert having.agg(n=aggregates.count()).column("id").to_pylist() == ["c"]


def test_a_sum_of_too_many_digits_is_an_error(shop: Session) -> None:
    shop.ensure(Order(id="f", total=1, whole=1))
    shop.commit()
    query = shop.query().entities(Order).where(Order.whole > 0)
    with pytest.raises(OverflowError, match="38 digits"):
        query.sum(Order.whole)


MISTAKES: list[tuple[Any, type[Exception], str]] = [
    (lambda: Order.total > 1.5, TypeError, "a float is not exact, write Decimal"),
    (lambda: Order.total == "1", TypeError, "cannot be compared with '1'"),
    (lambda: Order.total == Decimal("NaN"), ValueError, "not finite"),
    (lambda: Order.total.startswith("1"), TypeError, "startswith needs a text"),
    (lambda: Order.status == "payed", ValueError, "did you mean 'paid'"),
    (lambda: Order.status.in_(["nope"]), ValueError, "unknown value 'nope'"),
    (lambda: Order.status == Level.LOW, TypeError, "cannot be compared"),
    (lambda: Order.level == 7, ValueError, "unknown value '7'"),
    (lambda: Order.ref == "x", TypeError, "is not a UUID"),
    (lambda: Order.ref.startswith("c9"), TypeError, "startswith needs a text"),
    (lambda: Order.ref.contains("c9"), TypeError, "contains needs a text or a list"),
    (lambda: Order.at > "09:00", TypeError, "cannot be compared"),
    (lambda: Order.lines.any_path("status") == "nope", ValueError, "unknown value 'nope'"),
    (lambda: aggregates.sum(Order.at), TypeError, "sum needs a number"),
    (lambda: aggregates.sum(Order.status), TypeError, "sum needs a number"),
]


@pytest.mark.parametrize(("make", "error", "message"), MISTAKES)
def test_mistakes_are_told_at_the_line_that_has_them(
    make: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_sql_arrow_and_changes_show_columns(shop: Session) -> None:
    asked = 'SELECT id FROM "Order" WHERE status = ? AND level = ? AND ref = ? AND "at" = ?'
    last = time(23, 59, 59, 999999)
    assert shop.sql(asked, [Status.PAID, Level.LOW, LAST, last]).collect() == [{"id": "b"}]
    named = shop.sql('SELECT id FROM "Order" WHERE level = $level', {"level": Level.LOW})
    assert named.collect() == [{"id": "b"}]
    rows = shop.sql('SELECT sum(total) AS t, max("at") AS "at" FROM "Order"').to_arrow()
    assert rows.to_pylist() == [{"t": Decimal("20.00"), "at": time(23, 59, 59, 999999)}]
    table = shop.query().entities(Order).to_arrow()
    assert table.schema.field("total").type == pa.decimal128(12, 2)
    assert table.schema.field("at").type == pa.time64("us")
    assert table.schema.field("ref").type == pa.string()
    shop.ensure(ORDERS[0].replace(status=Status.PAID, total="1"))
    shop.commit()
    (change,) = shop.diff(1, 2)
    assert change["after"] == {"total": Decimal("1.00"), "status": "paid"}


def test_history_and_as_of(shop: Session) -> None:
    shop.ensure(ORDERS[0].replace(at=time(1), ref=None))
    shop.commit()
    orders = shop.query().entities(Order).where(Order.id == "a")
    assert [order.at for order in orders.with_history().collect()] == [time(0), time(1)]
    assert orders.as_of(1).first() == ORDERS[0]


def test_a_storage_is_read_without_the_class(shop: Session, uri: str) -> None:
    repository = open_repository(uri)
    try:
        (stored,) = repository.stored_types([("entity", "Order")])
    finally:
        repository.close()
    assert stored.schema_sha256 == spec_of(Order).schema_sha256
    assert stored.python_class is None
    assert {f.name: f.storage for f in stored.fields}["huge"] == "decimal(38,9)"


def test_compaction_and_pruning_keep_every_row(shop: Session, uri: str) -> None:
    for number in range(4):
        shop.ensure(Order(id=f"n{number}", total=number, at=time(number), ref=UUID(int=number)))
        shop.commit()
    before = read(uri, Order)
    if "sqlite" not in uri:
        shop.compact()
    assert read(uri, Order) == before
    orders = shop.query().entities(Order)
    assert ids(orders.where((Order.total >= 2) & (Order.total < 4))) == "n2n3"
    assert ids(orders.where(Order.total > Decimal("9.995"))) == "cd"
    assert ids(orders.where(Order.at == time(3))) == "n3"
    assert ids(orders.where(~(Order.at != time(2)))) == "n2"


# --- doors ----------------------------------------------------------------------------------------

GOOD: dict[str, list[Any]] = {
    "id": ["x", "y"],
    "total": ["1.5", "-2"],
    "huge": [NINES, None],
    "status": ["paid", "open"],
    "level": [5, None],
    "mode": ["w", "r"],
    "at": ["09:05", None],
    "ref": [str(SOME).upper(), None],
}
EXPECTED = [
    Order(id="x", total="1.5", huge=NINES, status="paid", level=5, mode="w", at="09:05", ref=SOME),
    Order(id="y", total=-2),
]


def _arrow(values: dict[str, list[Any]]) -> pa.Table:
    types = {
        "total": pa.decimal128(20, 4),
        "huge": pa.decimal256(60, 12),
        "level": pa.int8(),
        "at": pa.time64("ns"),
        "status": pa.dictionary(pa.int8(), pa.string()),
    }
    parse: dict[str, Any] = {"total": Decimal, "huge": Decimal, "at": time.fromisoformat}
    return pa.table(
        {
            name: pa.array(
                [v if v is None else parse.get(name, lambda v: v)(v) for v in column],
                types.get(name, pa.string()),
            )
            for name, column in values.items()
        }
    )


def _source(form: str, folder: Path, values: dict[str, list[Any]]) -> Any:
    names = list(values)
    rows = [dict(zip(names, row, strict=True)) for row in zip(*values.values(), strict=True)]
    match form:
        case "arrow":
            return _arrow(values)
        case "parquet":
            pq.write_table(_arrow(values), folder / "in.parquet")
            return folder / "in.parquet"
        case "text":
            return pa.table(
                {n: pa.array(c, pa.int64() if n == "level" else None) for n, c in values.items()}
            )
        case "csv":
            lines = [",".join("" if v is None else str(v) for v in row.values()) for row in rows]
            (folder / "in.csv").write_text("\n".join([",".join(names), *lines]))
            return folder / "in.csv"
        case _:
            (folder / "in.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
            return folder / "in.jsonl"


def _load(uri: str, source: Any) -> None:
    with Session(uri) as session:
        session.ingest(Order, source)


FORMS = ["arrow", "parquet", "text", "csv", "jsonl"]


@pytest.mark.parametrize("form", FORMS)
def test_bulk_input_arrives(form: str, tmp_path: Path) -> None:
    uri = make_storage(tmp_path, "object-v2")
    _load(uri, _source(form, tmp_path, GOOD))
    assert read(uri, Order) == EXPECTED


BAD: list[tuple[str, Any, str]] = [
    ("total", "0.001", "0.001"),
    ("total", "99999999999", "99999999999"),
    ("status", "payed", "'payed'"),
    ("level", 7, "7"),
    ("mode", "x", "'x'"),
    ("ref", "not-a-uuid", "'not-a-uuid'"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("field", "value", "shown"), BAD, ids=lambda v: str(v))
def test_bulk_input_that_does_not_fit_is_refused_by_row(
    form: str, field: str, value: Any, shown: str, tmp_path: Path
) -> None:
    uri = make_storage(tmp_path, "sqlite-v2")
    given = {**GOOD, field: [GOOD[field][0], value]}
    with pytest.raises(ValidationError) as caught:
        _load(uri, _source(form, tmp_path, given))
    assert f"column {field!r}" in str(caught.value)
    assert shown in str(caught.value)
    assert "row 1" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "column", "why"),
    [
        ("total", pa.array([1.5]), "is double, which cannot become Decimal\\(12, 2\\)"),
        ("at", pa.array([1], pa.time64("ns")), "is finer than microseconds"),
        ("at", pa.array([86_400], pa.time32("s")), "lies outside of a day"),
        ("at", pa.array(["24:00"]), "is not a time of day, got '24:00'"),
        ("ref", pa.array([5]), "is int64, which cannot become UUID"),
        ("status", pa.array([5]), "which cannot become Literal"),
    ],
)
def test_other_columns_are_refused(field: str, column: pa.Array, why: str, tmp_path: Path) -> None:
    table = pa.table({"id": ["x"], "total": [Decimal(1)]})
    names = [*(name for name in table.column_names if name != field), field]
    source = pa.table({n: column if n == field else table.column(n) for n in names})
    uri = make_storage(tmp_path, "sqlite-v1")
    with pytest.raises(ValidationError, match=why):
        _load(uri, source)


def test_uuids_come_as_bytes_too(tmp_path: Path) -> None:
    uri = make_storage(tmp_path, "object-v1")
    refs = pa.array([SOME.bytes, NIL.bytes], pa.uuid())
    _load(uri, pa.table({"id": ["x", "y"], "total": [1, 2], "ref": refs}))
    assert [order.ref for order in read(uri, Order)] == [SOME, NIL]


@pytest.mark.parametrize("engine", ["sqlite-v1", "object-v2"])
def test_what_the_command_line_exports_is_imported_again(engine: str, tmp_path: Path) -> None:
    uri = make_storage(tmp_path, engine)
    with Session(uri) as session:
        session.ensure(ORDERS)
    asked = ("query", "entities", "Order", "--storage-uri", uri)
    names = ",".join(f.name for f in spec_of(Order).fields)
    (tmp_path / "out.csv").write_text(onto(*asked, "--format", "csv", "--columns", names).out)
    rows = json.loads(onto(*asked, "--json", "--columns", names).out)["rows"]
    (tmp_path / "out.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    for number, name in enumerate(("out.csv", "out.jsonl")):
        (tmp_path / str(number)).mkdir()
        other = make_storage(tmp_path / str(number), engine)
        _load(other, tmp_path / name)
        assert read(other, Order) == ORDERS


FILTERS = [
    ("total > 9.90", "cd"),
    ('total == "0"', "a"),
    ('total in [0,"10.10"]', "ad"),
    (f"huge == {NINES}", "a"),
    ("lines[].price > 12.4999999999999999999", "b"),
    ('at == "09:05"', "c"),
    ('status == "paid"', "bd"),
    (f'ref == "{str(SOME).upper()}"', "c"),
]


def test_filters_as_they_are_typed(tmp_path: Path) -> None:
    uri = make_storage(tmp_path, "sqlite-v2")
    with Session(uri) as session:
        session.ensure(ORDERS)
    for text, expected in FILTERS:
        asked = ("query", "entities", "Order", "--storage-uri", uri, "--filter", *text.split(" "))
        shown = onto(*asked, "--format", "csv", "--columns", "id")
        assert "".join(shown.out.split()[1:]) == expected, (text, shown.err)
