"""Bulk input: everything wrong at once, every cast exact."""

import datetime as dt
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, NotRequired, TypedDict

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from storage_engine.errors import ValidationError
from storage_engine.model import (
    Entity,
    Field,
    Relation,
    TypeSpec,
    conform,
    objects_to_table,
    row_schema,
    spec_of,
    table_to_objects,
)


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    age: Field[int]
    score: Field[float | None]
    tier: Field[str] = Field(default="Standard")
    tags: Field[list[str]] = Field(default_factory=list)
    since: Field[datetime] = Field(default=datetime(2024, 1, 1, tzinfo=UTC))


class Employment(Relation[Customer, Customer]):
    stint: Field[str] = Field(instance_key=True)
    role: Field[str]


class Likes(Relation[Customer, Customer]):
    pass


def run(spec: TypeSpec, table: pa.Table) -> pa.Table:
    conformer = conform(spec, table.schema)
    batches = [conformer.batch(b) for b in table.to_batches()]
    made = pa.Table.from_batches(batches, schema=conformer.schema)
    made.validate(full=True)
    assert made.schema.equals(row_schema(spec))
    return made


def one(annotation: Any, array: pa.Array) -> list[Any]:
    """What a column becomes in a type with one field `x` of that annotation."""
    made = type(
        "T",
        (Entity,),
        {
            "__annotations__": {"id": Field[str], "x": Field[annotation]},
            "id": Field(primary_key=True),
        },
    )
    keys = pa.array([str(i) for i in range(len(array))])
    spec = spec_of(made)
    return [o.x for o in table_to_objects(spec, run(spec, pa.table({"id": keys, "x": array})))]


# --- the schema -------------------------------------------------------------------------------


def test_everything_wrong_with_a_schema_is_said_at_once():
    source = pa.schema([("id", pa.int64()), ("NAME", pa.string()), ("age", pa.string())])
    with pytest.raises(ValidationError) as caught:
        conform(spec_of(Customer), source)
    assert str(caught.value) == (
        "Customer: column 'id' is int64, which cannot become str; column 'name' is missing; "
        "column 'age' is string, which cannot become int; "
        "unknown column 'NAME', did you mean 'name'?"
    )
    assert caught.value.type == "Customer"
    assert caught.value.field == "id, name, age, NAME"


def test_column_given_twice():
    source = pa.schema([("id", pa.string()), ("id", pa.string()), ("x", pa.int64())])
    with pytest.raises(ValidationError, match="column 'id' is there 2 times"):
        conform(spec_of(Customer), source)


def test_relation_columns():
    table = pa.table({"left_key": ["a"], "right_key": ["b"], "stint": ["s"], "role": ["r"]})
    assert run(spec_of(Employment), table).to_pylist() == [
        {"left_key": "a", "right_key": "b", "instance_key": "s", "role": "r"}
    ]
    with pytest.raises(ValidationError) as caught:
        conform(spec_of(Employment), pa.schema([("instance_key", pa.string())]))
    for said in ("'left_key' is missing", "'right_key' is missing", "'stint' is missing"):
        assert said in str(caught.value)
    assert "unknown column 'instance_key'" in str(caught.value)


def test_unkeyed_relation():
    table = pa.table({"left_key": ["a"], "right_key": ["b"]})
    assert run(spec_of(Likes), table).to_pylist() == [
        {"left_key": "a", "right_key": "b", "instance_key": ""}
    ]


def test_missing_columns_are_filled_as_the_constructor_would():
    spec = spec_of(Customer)
    made = run(spec, pa.table({"id": ["a", "b"], "name": ["A", "B"], "age": [1, 2]}))
    assert table_to_objects(spec, made) == [
        Customer(id="a", name="A", age=1, score=None),
        Customer(id="b", name="B", age=2, score=None),
    ]
    assert made.column("entity_key").to_pylist() == ["a", "b"]


def test_factories_fill_each_row_and_are_checked():
    class Counted(Entity):
        id: Field[str] = Field(primary_key=True)
        n: Field[int] = Field(default_factory=iter([1, 2, "x"]).__next__)  # type: ignore[arg-type]

    conformer = conform(spec_of(Counted), pa.schema([("id", pa.string())]))
    batch = pa.RecordBatch.from_pydict({"id": ["a", "b"]})
    assert conformer.batch(batch).column("n").to_pylist() == [1, 2]
    with pytest.raises(ValidationError, match="n: the result of default_factory does not fit"):
        conformer.batch(batch)


def test_column_order_is_free_and_no_class_is_needed():
    spec = TypeSpec.from_schema_dict(spec_of(Customer).schema_dict())
    table = pa.table({"age": [1], "name": ["A"], "id": ["a"], "tags": [["x"]]})
    assert run(spec, table).select(["id", "age", "tags", "tier"]).to_pylist() == [
        {"id": "a", "age": 1, "tags": '["x"]', "tier": "Standard"}
    ]


def test_a_batch_unlike_its_source():
    conformer = conform(
        spec_of(Likes), pa.schema([("left_key", pa.string()), ("right_key", pa.string())])
    )
    with pytest.raises(ValidationError, match="other columns than its source announced"):
        conformer.batch(pa.RecordBatch.from_pydict({"left_key": ["a"], "right_key": [1]}))


# --- the values -------------------------------------------------------------------------------


def test_every_faulty_column_is_said_at_once_with_count_and_first_row():
    table = pa.table(
        {
            "id": ["a", "", None, ""],
            "name": ["x", None, "y", None],
            "age": [1.0, 2.0, 2.5, 3.0],
            "score": [1.0, float("nan"), float("inf"), None],
        }
    )
    conformer = conform(spec_of(Customer), table.schema)
    with pytest.raises(ValidationError) as caught:
        conformer.batch(table.to_batches()[0])
    assert str(caught.value) == (
        "Customer: column 'id' is null in 1 row (row 2); column 'id' is empty in 2 rows (first "
        "row 1); column 'name' is null in 2 rows (first row 1); column 'age' is not a whole "
        "number in 1 row (row 2); column 'score' is NaN or infinite in 2 rows (first row 1)"
    )
    assert caught.value.field == "id, name, age, score"


def test_rows_are_counted_over_the_whole_source():
    conformer = conform(spec_of(Employment), EMPLOYMENT)
    conformer.batch(employment(["r"] * 5))
    with pytest.raises(ValidationError, match=r"'role' is null in 1 row \(row 7\)"):
        conformer.batch(employment(["r", "r", None]))


EMPLOYMENT = pa.schema([(n, pa.string()) for n in ("left_key", "right_key", "stint", "role")])


def employment(roles: list[str | None]) -> pa.RecordBatch:
    keys = ["k"] * len(roles)
    return pa.RecordBatch.from_arrays([keys, keys, keys, roles], schema=EMPLOYMENT)


@pytest.mark.parametrize("column", ["left_key", "right_key", "stint"])
def test_relation_keys_are_checked(column: str):
    batch = employment(["r", "r"])
    for bad, said in ((None, "null"), ("", "empty")):
        arrays = [
            pa.array(["k", bad]) if name == column else batch.column(name)
            for name in batch.schema.names
        ]
        with pytest.raises(ValidationError, match=rf"'{column}' is {said} in 1 row \(row 1\)"):
            conform(spec_of(Employment), EMPLOYMENT).batch(
                pa.RecordBatch.from_arrays(arrays, schema=EMPLOYMENT)
            )


AT = datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
NAIVE = AT.replace(tzinfo=None)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
STRINGS = [pa.string(), pa.large_string(), pa.string_view()]
BINARIES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(1)]
INTEGERS = [
    *[pa.int8(), pa.int16(), pa.int32(), pa.int64()],
    *[pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()],
]
INT64 = [-(2**63), 2**63 - 1]
DECIMALS = [pa.decimal128(20, 0), pa.decimal256(50, 0)]  # as Spark hands over uint64, and beyond
CASTS = [
    *[(str, pa.array(["a", "é"], t), ["a", "é"]) for t in STRINGS],
    (str, pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
    (str, pa.array(["a"], pa.large_string()).dictionary_encode(), ["a"]),
    (str, pa.RunEndEncodedArray.from_arrays([2], pa.array(["a"])), ["a", "a"]),
    (str | None, pa.array([None, "b"]).dictionary_encode(), [None, "b"]),
    (str | None, pa.nulls(2), [None, None]),
    *[(int, pa.array([1, 2], t), [1, 2]) for t in INTEGERS],
    (int | None, pa.array([1.0, None, -(2.0**53)]), [1, None, -(2**53)]),
    (int, pa.array([2.0**53 + 2, 2.0**63 - 1024, -(2.0**63)]), [2**53 + 2, 2**63 - 1024, -(2**63)]),
    (int, pa.array([2.0**100 / 2.0**50], pa.float32()), [2**50]),
    *[(int, pa.array([INT64[0], INT64[1]], t), INT64) for t in DECIMALS],
    (int | None, pa.array([Decimal("-1.00"), None], pa.decimal128(5, 2)), [-1, None]),
    (int, pa.array([Decimal("1E+3")], pa.decimal128(5, -3)), [1000]),
    (float, pa.array([0.5], pa.float16()), [0.5]),
    (float, pa.array([0.5], pa.float32()), [0.5]),
    (float, pa.array([1, 2**53]), [1.0, 2.0**53]),
    (float, pa.array([1], pa.int8()), [1.0]),
    (bool | None, pa.array([True, None]), [True, None]),
    *[(datetime, pa.array([NAIVE], pa.timestamp(u)), [AT]) for u in ("s", "ms", "us", "ns")],
    *[(datetime, pa.array([AT], pa.timestamp(u, tz="UTC")), [AT]) for u in ("s", "ms", "us", "ns")],
    (datetime, pa.array([AT], pa.timestamp("ms", tz="Europe/Paris")), [AT]),
    (datetime, pa.array([-1000], pa.timestamp("ns")), [EPOCH - dt.timedelta(microseconds=1)]),
    (datetime | None, pa.array([None, AT], pa.timestamp("s", tz="UTC")), [None, AT]),
    (datetime, pa.array([datetime.max.replace(tzinfo=UTC)]), [datetime.max.replace(tzinfo=UTC)]),
    (date, pa.array([date.min, date.max]), [date.min, date.max]),
    (date, pa.array([date(2024, 1, 2)], pa.date64()), [date(2024, 1, 2)]),
    *[(bytes, pa.array([b"a"], t), [b"a"]) for t in BINARIES],
]


@pytest.mark.parametrize(
    ("annotation", "array", "values"), CASTS, ids=lambda v: str(getattr(v, "type", v))
)
def test_casts(annotation: Any, array: pa.Array, values: list[Any]):
    got = one(annotation, array)
    assert got == values
    assert [type(v) for v in got] == [type(v) for v in values]


LOSSY = [
    (int, pa.array([2**63], pa.uint64()), "beyond 64 bits"),
    (int, pa.array([1.0, float("nan")]), "not a whole number"),
    (int, pa.array([float("-inf")]), "not a whole number"),
    (int, pa.array([2.0**63]), "beyond 64 bits"),
    (int, pa.array([-1e300]), "beyond 64 bits"),
    (int, pa.array([2**63], pa.decimal128(20, 0)), "beyond 64 bits"),
    (int, pa.array([-(2**63) - 1], pa.decimal256(40, 0)), "beyond 64 bits"),
    (int, pa.array([Decimal("1.01")], pa.decimal128(5, 2)), "not a whole number"),
    (float, pa.array([2**53 + 1]), "a float cannot hold exactly"),
    (float, pa.array([-(2**53) - 1]), "a float cannot hold exactly"),
    (float, pa.array([2**64 - 1], pa.uint64()), "a float cannot hold exactly"),
    (float, pa.array([float("inf")], pa.float32()), "NaN or infinite"),
    (datetime, pa.array([1], pa.timestamp("ns")), "is finer than microseconds"),
    (datetime, pa.array([-1], pa.timestamp("ns")), "is finer than microseconds"),
    (datetime, pa.array([2**62], pa.timestamp("s")), "outside years 1 to 9999"),
    (datetime, pa.array([253402300800], pa.timestamp("s")), "outside years 1 to 9999"),
    (datetime, pa.array([-62135596801], pa.timestamp("s")), "outside years 1 to 9999"),
    (date, pa.array([2932897], pa.int32()).view(pa.date32()), "outside years 1 to 9999"),
    (date, pa.array([86400000 * 2932897]).view(pa.date64()), "outside years 1 to 9999"),
    (date, pa.array([1]).view(pa.date64()), "has a time of day"),
    (str, pa.array([b"\xff"]).view(pa.string()), "not valid UTF-8"),
]


@pytest.mark.parametrize(("annotation", "array", "said"), LOSSY, ids=str)
def test_lossy_values_are_refused(annotation: Any, array: pa.Array, said: str):
    good = pa.nulls(1, array.type)
    with pytest.raises(ValidationError, match=rf"'x'.* {said} in 1 row \(row \d\)"):
        one(annotation | None, pa.concat_arrays([good, array]))


INCOMPATIBLE = [
    (str, pa.int64()),
    (str, pa.binary()),
    (int, pa.string()),
    (int, pa.bool_()),
    (float, pa.decimal128(5, 0)),
    (float, pa.string()),
    (bool, pa.int8()),
    (datetime, pa.string()),
    (datetime, pa.date32()),
    (date, pa.timestamp("us")),
    (bytes, pa.string()),
    (str, pa.list_(pa.string())),
    (int, pa.dictionary(pa.int8(), pa.string())),
]


@pytest.mark.parametrize(("annotation", "source"), INCOMPATIBLE, ids=str)
def test_incompatible_types(annotation: Any, source: pa.DataType):
    with pytest.raises(ValidationError, match="which cannot become"):
        one(annotation, pa.nulls(0, source))


# --- JSON columns -----------------------------------------------------------------------------


class Address(TypedDict):
    city: str
    zip: NotRequired[str]
    note: NotRequired[str | None]


class Tree(TypedDict):
    n: int
    kids: "NotRequired[list[Tree]]"


SHORT = pa.struct([("city", pa.string()), ("zip", pa.string())])
STRUCT = pa.struct([("city", pa.string()), ("zip", pa.string()), ("note", pa.string())])
NUMBERS = pa.struct([("a", pa.int64()), ("b", pa.int64())])
NESTED = [
    (list[int], pa.array([[1, 2], []], pa.list_(pa.int8())), [[1, 2], []]),
    (list[int], pa.array([[1, 2]], pa.large_list(pa.int64())), [[1, 2]]),
    (list[int], pa.array([[1, 2]], pa.list_(pa.int64(), 2)), [[1, 2]]),
    (list[float], pa.array([[1, 2]]), [[1.0, 2.0]]),
    (list[str] | None, pa.array([["a"], None]), [["a"], None]),
    (list[datetime], pa.array([[NAIVE]], pa.list_(pa.timestamp("ms"))), [[AT]]),
    (list[bytes], pa.array([[b"\xff"]]), [[b"\xff"]]),
    (dict[str, int], pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32())), [{"a": 1}]),
    (dict[str, int], pa.array([{"a": 1}, {"b": 2}]), [{"a": 1}, {"b": 2}]),
    (dict[str, int | None], pa.array([{"a": 1, "b": None}]), [{"a": 1, "b": None}]),
    (
        dict[str, dict[str, int]],  # a struct lacks keys, a map does not
        pa.array([[("m", {"a": 1, "b": None})]], pa.map_(pa.string(), NUMBERS)),
        [{"m": {"a": 1}}],
    ),
    (
        Address,
        pa.array([{"city": "x"}, {"city": "y", "zip": "1"}], STRUCT),
        [{"city": "x", "note": None}, {"city": "y", "zip": "1", "note": None}],
    ),
    (
        list[Address] | int,
        pa.array([[{"city": "x"}]], pa.list_(SHORT)),
        [[{"city": "x"}]],
    ),
    (
        Tree,
        pa.array([{"n": 1, "kids": [{"n": 2, "kids": None}]}]),
        [{"n": 1, "kids": [{"n": 2}]}],
    ),
    (int | str, pa.array([5]), [5]),
    (int | bool, pa.array([True]), [True]),
    (Any, pa.array([{"a": [1, None]}]), [{"a": [1, None]}]),
    (int | datetime, pa.array([AT]), [AT]),
]


@pytest.mark.parametrize(("annotation", "array", "values"), NESTED, ids=str)
def test_nested_values(annotation: Any, array: pa.Array, values: list[Any]):
    assert one(annotation, array) == values


TEXTS = [
    (list[int], ["[1, 2]"], [[1, 2]]),
    (dict[str, float], ['{"b":1,"a":2}'], [{"a": 2.0, "b": 1.0}]),
    (list[datetime], ['["2024-01-02T03:04:05Z"]'], [[AT]]),
    (list[bytes], ['["aGk="]'], [[b"hi"]]),
    (list[int] | None, ["[1]", None, "null"], [[1], None, None]),
    (Any, ['"text"', "5", "null", None], ["text", 5, None, None]),
    (int | str, ["5", "x"], ["5", "x"]),
    (str | list[str] | None, ['["x"]', None], ['["x"]', None]),
]


@pytest.mark.parametrize(("annotation", "texts", "values"), TEXTS, ids=str)
@pytest.mark.parametrize("source", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_string_columns_are_json_text_unless_str_is_declared(
    annotation: Any, texts: list[Any], values: list[Any], source: pa.DataType
):
    assert one(annotation, pa.array(texts, source)) == values


def test_json_text_is_made_canonical():
    spec = spec_of(Customer)
    table = pa.table({"id": ["a"], "name": ["A"], "age": [1], "tags": ['[ "b" ,"\\u00e9"]']})
    assert run(spec, table).column("tags").to_pylist() == ['["b","é"]']


BAD_JSON = [
    (list[int], pa.array(["[1", "{}", "[1]"]), "Invalid JSON", 2, 0),
    (list[int], pa.array(["[1]", '["1"]']), "valid integer", 1, 1),
    (list[float], pa.array(["[NaN]"]), "finite", 1, 0),
    (Any, pa.array(["5", "NaN"]), "finite", 1, 1),
    (list[int], pa.array([f"[{2**63}]"]), "beyond 64 bits", 1, 0),
    (list[str], pa.array(['["\\ud800"]']), "Invalid JSON", 1, 0),
    (list[int], pa.array([["a"]]), "valid integer", 1, 0),
    (list[int], pa.array([[1.0]]), "valid integer", 1, 0),
    (list[int], pa.array([[1], [None]]), "valid integer", 1, 1),
    (Address, pa.array([{"city": None, "zip": "1"}]), "valid string", 1, 0),
    (Address, pa.array([{"city": "x", "zap": "1"}]), "Extra inputs", 1, 0),
    (list[datetime], pa.array([[1]], pa.list_(pa.timestamp("ns"))), "nanoseconds", 1, 0),
    (Any, pa.array([AT]), "datetime is not a JSON value", 1, 0),
    (
        dict[str, int],
        pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int32())),
        "repeated map key",
        1,
        0,
    ),
    *[
        (kind, pa.array([[("city", None)]], pa.map_(pa.string(), item)), said, 1, 0)
        for kind, item, said in (
            (dict[str, int], pa.int32(), "valid integer"),
            (dict[str, list[int]] | None, pa.list_(pa.int32()), "valid list"),
            (Address, pa.string(), "valid string"),
        )
    ],
]


@pytest.mark.parametrize(("annotation", "array", "said", "count", "first"), BAD_JSON, ids=str)
def test_bad_json_values(annotation: Any, array: pa.Array, said: str, count: int, first: int):
    rows = f"1 row (row {first})" if count == 1 else f"{count} rows (first row {first})"
    with pytest.raises(ValidationError) as caught:
        one(annotation, array)
    assert said in str(caught.value)
    assert str(caught.value).endswith(f"in {rows}")


def test_null_in_a_json_column_that_cannot_be_null():
    with pytest.raises(ValidationError, match=r"'x' is null in 1 row \(row 1\)"):
        one(list[int], pa.array([[1], None]))


# --- frames -----------------------------------------------------------------------------------

EXPECTED = [
    Customer(id="a", name="A", age=1, score=0.5, tags=["x"], since=AT),
    Customer(id="b", name="B", age=2, score=None, tags=[], since=AT),
]


def test_pandas():
    frame = pd.DataFrame(
        {
            "id": ["a", "b"],
            "name": pd.Categorical(["A", "B"]),
            "age": [1.0, 2.0],  # what pandas makes of integers that had gaps
            "score": [0.5, None],
            "tags": [["x"], []],
            "since": pd.to_datetime([AT, AT]),
        }
    )
    spec = spec_of(Customer)
    table = pa.Table.from_pandas(frame, preserve_index=False)
    assert table_to_objects(spec, run(spec, table)) == EXPECTED


def test_polars():
    frame = pl.DataFrame(
        {
            "id": ["a", "b"],
            "name": pl.Series(["A", "B"], dtype=pl.Categorical),
            "age": pl.Series([1, 2], dtype=pl.Int16),
            "score": pl.Series([0.5, None], dtype=pl.Float32),
            "tags": [["x"], []],
            "since": pl.Series([AT, AT], dtype=pl.Datetime("ms", "Europe/Paris")),
        }
    )
    spec = spec_of(Customer)
    assert table_to_objects(spec, run(spec, frame.to_arrow())) == EXPECTED


def test_same_rows_as_objects():
    spec = spec_of(Customer)
    table = objects_to_table(spec, EXPECTED)
    source = table.drop_columns(["entity_key"])
    assert run(spec, source).equals(table)


def test_slices_and_empty_batches():
    spec = spec_of(Customer)
    source = objects_to_table(spec, EXPECTED).drop_columns(["entity_key"])
    assert table_to_objects(spec, run(spec, source.slice(1))) == EXPECTED[1:]
    conformer = conform(spec, source.schema)
    empty = pa.RecordBatch.from_arrays(
        [pa.nulls(0, f.type) for f in source.schema], schema=source.schema
    )
    assert conformer.batch(empty).num_rows == 0


def test_sliced_timestamps():
    at = pa.array([NAIVE, NAIVE + dt.timedelta(days=1)], pa.timestamp("ns")).slice(1)
    assert one(datetime, at) == [AT + dt.timedelta(days=1)]
